"""Writes docs/metrics.md: `python -m s2rl.logs.docs`."""

from __future__ import annotations

from pathlib import Path

from s2rl.logs.metrics import markdown

TARGET = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(markdown(), encoding="utf-8")
