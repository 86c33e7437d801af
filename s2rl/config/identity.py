"""What makes two configurations the same run.

Resources, limits, logging and evaluation may change when a run is resumed; what shapes the trained weights may not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from s2rl.config.schema import RunConfig

FIXED = (
    "seed",
    "model.path",
    "model.tokenizer",
    "data",
    "rewards.functions",
    "rollout.sampling",
    "rollout.dtype",
    "rollout.kv_on_update",
    "learner.dtype",
    "learner.optimizer",
    "algorithm",
    "staleness",
    "sync.every",
)
"""Keys (with everything below them) that a resumed run must share with its first start."""


def digest(config: RunConfig) -> str:
    """sha256 over the values that a resumed run must keep; folders do not count, so a run may be moved."""
    values = _identity(config.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def resume_conflicts(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """One line per value that differs from the saved configuration and must not.

    `saved` is the content of a run folder's config.yaml. A key that only one of the two has counts as different.
    """
    then, now = _identity(saved), _identity(config.model_dump(mode="json"))
    return [
        f"{key}: {_word(then, key)} in the run folder, {_word(now, key)} now"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]


def _word(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "not there"


def _identity(data: Mapping[str, Any]) -> dict[str, Any]:
    fixed = [*FIXED]
    schedule = data.get("learner", {}).get("optimizer", {}).get("schedule")
    if schedule != "constant":  # the course of the learning rate depends on where the run ends
        fixed.append("steps")
    chosen = {}
    for key, value in _leaves(data):
        if any(key == name or key.startswith(f"{name}.") for name in fixed):
            is_path = key in ("model.path", "model.tokenizer") or (
                key.startswith("data.train.") and key.endswith(".path")
            )
            chosen[key] = Path(value).name if is_path and value else value
    return chosen


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{prefix}{key}.")
    elif isinstance(data, list) and data:
        for index, value in enumerate(data):
            yield from _leaves(value, f"{prefix}{index}.")
    else:
        yield prefix[:-1], data
