from __future__ import annotations

from pathlib import Path

import pytest

from s2rl.config import load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_config_is_valid(path):
    config = load_config(path)
    assert config.eval.data, "an example shows held-out accuracy"
    assert config.name == path.stem


def test_there_are_examples():
    assert {path.stem for path in CONFIGS} >= {"tiny", "quickstart", "hard"}
