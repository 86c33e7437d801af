from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s2rl.config import RunConfig, config_from_dict


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration whose run folder is below the test's folder."""

    def make(*overrides: str) -> RunConfig:
        data = {
            "name": "t",
            "runs_dir": str(tmp_path / "runs"),
            "steps": 10,
            "model": {"path": "model"},
            "data": {"train": [{"path": "train.jsonl"}]},
            "rewards": {"functions": [{"function": "exact_match"}]},
            "logging": {"live": "off"},
        }
        return config_from_dict(data, overrides)

    return make
