"""One training run of s2rl as a child process, watched from outside: what it cost until when."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.process_tree import ProcessTree, Snapshot
from bench.report import read_lines
from s2rl.config import RunConfig

REPOSITORY = Path(__file__).parents[1]
_READY = "engine and learner agree on log-probabilities"
"""run.log says this when models are loaded, the first weights proven and the start-up check is done."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Snapshots of a finished run."""

    begin: Snapshot
    ready: Snapshot
    """Models loaded, first weights on the workers, start-up check done."""
    trained: Snapshot
    """The last step is done: optimizer step and publication."""
    evaluated: Snapshot
    """The last row of metrics.jsonl is written: the last evaluation too is done."""
    end: Snapshot
    """Every process is gone."""
    metrics: list[dict[str, Any]]

    @property
    def training_s(self) -> float:
        """Wall time of all steps."""
        return self.trained.at_s - self.ready.at_s

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> TrainingRun:
        """What `save` wrote."""
        data = json.loads(path.read_text())
        metrics = data.pop("metrics")
        return TrainingRun(metrics=metrics, **{name: Snapshot(**value) for name, value in data.items()})


def run_training(
    config: RunConfig,
    *,
    config_file: Path,
    overrides: Sequence[str],
    limit_s: float,
    on_poll: Callable[[ProcessTree], None] | None = None,
) -> TrainingRun:
    """Run `s2rl train` with `config_file` and `overrides`, which `config` is the result of. Its folder is made anew."""
    if config.run_dir.exists():
        shutil.rmtree(config.run_dir)
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    log = config.runs_dir / f"{config.name}.out"
    command = [sys.executable, "-m", "s2rl", "train", "--config", str(config_file), *overrides]
    tree = ProcessTree(command, env=dict(os.environ), log=log, cwd=Path.cwd())
    marks: dict[str, Snapshot] = {"begin": tree.snapshot()}
    conditions = {
        "ready": lambda: _READY in _text(config.run_dir / "run.log"),
        "trained": lambda: len(_trained(config, config.steps)) >= config.algorithm.groups_per_step,
        "evaluated": lambda: any(r["step"] == config.steps for r in read_lines(config.run_dir / "metrics.jsonl")),
    }
    deadline = time.monotonic() + limit_s
    while tree.process.poll() is None:
        for name, holds in conditions.items():
            if name not in marks and holds():
                marks[name] = tree.snapshot()
        if on_poll is not None:
            on_poll(tree)
        if time.monotonic() > deadline:
            tree.process.kill()
            raise subprocess.TimeoutExpired(command, limit_s)
        time.sleep(_POLL_S)
    marks["end"] = tree.snapshot()
    tree.close()
    if tree.process.returncode != 0 or len(marks) < 5:
        raise RuntimeError(f"the run ended with code {tree.process.returncode}; see {log} and {config.run_dir}")
    return TrainingRun(metrics=read_lines(config.run_dir / "metrics.jsonl"), **marks)


def _trained(config: RunConfig, step: int) -> list[dict[str, Any]]:
    return [r for r in read_lines(config.run_dir / "rollouts.jsonl") if r["step"] == step and r["fate"] == "trained"]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
