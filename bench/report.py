"""Results as JSON files and lines of text."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a result."""
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read complete lines of a JSON-lines file that may be growing; none when it does not exist yet."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def machine() -> str:
    """Cores, processor and load, for the report."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{len(os.sched_getaffinity(0))} cores ({model}), load {os.getloadavg()[0]:.1f} at the start"
