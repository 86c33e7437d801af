"""A run that is killed before every single change that it makes on disk, one after the other, and started again.

The controller, its logs and its checkpoints are the real ones; engines and learner are simulated, on a clock that
jumps, so that a whole run takes a fraction of a second and does the same at every start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_runs import check_history, lines
from e2e_simulated import in_child, train_simulated

from bench.controller.wiring import simulated_config
from s2rl.config import RunConfig
from s2rl.logs.writers import JsonLines

STEPS = 6
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "test.append", "test.fsync"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = tmp_path / "train.jsonl"
    rows = ({"prompt": f"{i}", "reward_model": {"ground_truth": f"{i}"}} for i in range(50))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return simulated_config(
        name="run",
        runs_dir=str(tmp_path / "runs"),
        steps=STEPS,
        data__train=[{"path": str(data)}],
        eval__data=[{"path": str(data)}],
        eval__at_start=True,
        eval__every=2,
        checkpoint__every=1,
        algorithm__kl__coefficient=0.1,  # so that no sample is left out of the batches
        logging__tensorboard=False,
        logging__live="off",
    )


def killed_before_change(number: int, config: RunConfig) -> Callable[[], None]:
    """Work for a child: a run that kills itself before its `number`-th change on disk."""

    def work() -> None:
        root, changes = str(config.run_dir), 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes
            if event == "open":
                path, _, flags = arguments
                if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not str(path).startswith(root):
                    return
            elif event not in _CHANGES:
                return
            changes += 1
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def audited(function: Callable[..., Any], event: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                sys.audit(event)
                return function(*arguments)

            return call

        JsonLines.append = audited(JsonLines.append, "test.append")
        os.fsync = audited(os.fsync, "test.fsync")
        sys.addaudithook(hook)
        train_simulated(config)

    return work


def check(config: RunConfig) -> None:
    """A finished run whose weights and files tell the same history."""
    run = config.run_dir
    check_history(run, steps=STEPS)
    per_step: dict[int, list[str]] = {}
    for group in lines(run / "rollouts.jsonl"):
        if group["fate"] == "trained":
            per_step.setdefault(group["step"], []).append(group["group_id"])
    last = run / "checkpoints" / f"step_{STEPS:08d}"
    trained_on = json.loads((last / "learner" / "history").read_text())
    assert trained_on == [sorted(per_step[step]) for step in range(1, STEPS + 1)]
    assert not [folder.name for folder in (run / "checkpoints").iterdir() if folder.name.endswith(".partial")]


def runs_killed_at_every_change(config: RunConfig, *, stride: int) -> int:
    """Kill, start again, check; returns the number of kills."""
    for kills, number in enumerate(range(1, 100_000, stride)):
        once = config.model_copy(update={"name": f"run-{number}"})
        code = in_child(killed_before_change(number, once))
        if code == 0:  # it makes fewer changes than that
            return kills
        assert code == -signal.SIGKILL, f"change {number}"
        assert in_child(lambda once=once: train_simulated(once)) == 0, f"the start after a kill before change {number}"
        check(once)
    raise AssertionError("without end")


def test_a_run_killed_before_a_change_on_disk_resumes_to_one_consistent_history(config: RunConfig) -> None:
    assert runs_killed_at_every_change(config, stride=17) > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_before_any_change_on_disk_resumes_to_one_consistent_history(config: RunConfig) -> None:
    assert runs_killed_at_every_change(config, stride=1) > 200


@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_again_and_again_loses_no_checkpoint_and_no_prompt(config: RunConfig, seed: int) -> None:
    chance = random.Random(seed)
    kills = 0
    while in_child(killed_before_change(chance.randint(1, 120), config)) != 0:
        kills += 1
        assert kills < 200, "no progress"
    assert kills > 0
    check(config)


def test_a_finished_run_started_again_returns_the_accuracy_of_its_last_step(config: RunConfig) -> None:
    def twice() -> None:
        first, again = train_simulated(config), train_simulated(config)
        accuracies = [row["eval/accuracy"] for row in lines(config.run_dir / "metrics.jsonl") if "eval/accuracy" in row]
        assert accuracies[-1] != accuracies[-2], accuracies
        assert first.accuracy == again.accuracy == accuracies[-1]
        assert again.step == STEPS and again.best_accuracy == first.best_accuracy

    assert in_child(twice) == 0
