"""Runs that are killed and interrupted, for real: what is left, and what the next start makes of it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_runs import (
    Command,
    actor_pid,
    check_history,
    check_nothing_is_left,
    complete_checkpoints,
    last_step,
    rows,
    session_folder,
    settings,
    trained_ids,
    write_config,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 40
MANY = 150
"""So many that a worker is replaced before the others have done them all."""


class Runs:
    """Starts of one run folder, one after the other."""

    def __init__(self, start: Any, folder: Path, example: Any, **sections: Any) -> None:
        changes: dict[str, Any] = {"steps": STEPS, "eval": {"every": 7}, "checkpoint": {"every": 3}}
        changes |= sections
        self._start, self.folder, self.steps = start, folder, changes["steps"]
        self.config = write_config(folder, settings(example, **changes))
        self.run = folder / "runs" / "run"

    def start(self, *overrides: str) -> Command:
        return self._start(["train", "--config", str(self.config), *overrides], folder=self.folder)

    def start_and_reach(self, step: int) -> Command:
        command = self.start()
        command.wait_until(lambda: last_step(self.run) >= step)
        return command

    def is_past(self, step: int, command: Command) -> bool:
        """Whether this start, not the one before it, trained `step`."""
        return f"step {step}/" in command.text()

    def finish(self) -> str:
        """The same command once more, to the end; what it printed."""
        command = self.start()
        ended = command.wait()
        assert ended.code == 0, ended.out + ended.err
        check_history(self.run, steps=self.steps)
        check_nothing_is_left(command)
        return ended.out


@pytest.fixture
def runs(start: Any, tmp_path: Path, example: Any) -> Runs:
    return Runs(start, tmp_path, example)


# ---- SIGKILL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_as_a_whole_at_random_times_trains_every_prompt_once(
    start: Any, tmp_path: Path, example: Any, seed: int
) -> None:
    runs = Runs(start, tmp_path, example, learner={"ranks": 1 + seed % 2}, checkpoint={"every": 1 + seed})
    chance = random.Random(seed)
    for _ in range(4):
        before = complete_checkpoints(runs.run)
        command = runs.start()
        if chance.random() < 0.75:  # else anywhere in its start
            target = (before[-1] if before else 0) + chance.randint(1, 5)
            command.wait_until(lambda command=command, target=target: runs.is_past(target, command))
        time.sleep(chance.uniform(0, 2))
        command.kill_tree()
        after = complete_checkpoints(runs.run)
        assert not before or after[-1] >= before[-1], "a complete checkpoint was lost"
    out = runs.finish()
    assert "resumed from" in out


@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_when_the_command_alone_is_killed_the_rest_of_its_run_ends_by_itself(runs: Runs, delay: float) -> None:
    command = runs.start_and_reach(2)
    time.sleep(delay)
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    check_nothing_is_left(command)
    runs.finish()


def test_when_a_starting_command_is_killed_the_rest_ends_by_itself(runs: Runs) -> None:
    command = runs.start()
    command.wait_until(lambda: session_folder(command).exists())
    time.sleep(1.0)
    command.send(signal.SIGKILL)
    command.wait()
    check_nothing_is_left(command)


@pytest.mark.parametrize(("num_workers", "seed"), [(1, 0), (1, 1), (2, 2), (2, 3)])
def test_a_killed_rollout_worker_is_replaced_and_the_run_goes_on(
    start: Any, tmp_path: Path, example: Any, num_workers: int, seed: int
) -> None:
    steps = STEPS if num_workers == 1 else MANY
    runs = Runs(
        start, tmp_path, example, steps=steps, rollout={"workers": num_workers, "max_num_seqs": 64 // num_workers}
    )
    chance = random.Random(seed)
    command = runs.start_and_reach(chance.randint(1, 8))
    time.sleep(chance.uniform(0, 0.5))
    victim = actor_pid(runs.run, "rollout-0")
    os.kill(victim, signal.SIGKILL)
    # To start a worker takes a minute at most; survivors that wait for the dead would take as long as their limit.
    ended = command.wait(limit_s=200)
    assert ended.code == 0, ended.out + ended.err
    assert "rollout worker 0 is replaced" in ended.out, ended.out
    check_history(runs.run, steps=runs.steps)
    check_nothing_is_left(command)


@pytest.mark.parametrize(("ranks", "victim", "seed"), [(1, 0, 0), (2, 0, 1), (2, 1, 2), (2, 1, 3)])
def test_a_killed_learner_ends_the_run_with_instructions_and_the_next_start_resumes(
    start: Any, tmp_path: Path, example: Any, ranks: int, victim: int, seed: int
) -> None:
    runs = Runs(start, tmp_path, example, learner={"ranks": ranks})
    chance = random.Random(seed)
    command = runs.start_and_reach(chance.randint(4, 12))
    time.sleep(chance.uniform(0, 0.5))
    os.kill(actor_pid(runs.run, f"learner-{victim}"), signal.SIGKILL)
    killed = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - killed < 60
    assert ended.code == 1, ended.out + ended.err
    assert f"learner-{victim} died" in ended.err, ended.err
    assert f"step_{complete_checkpoints(runs.run)[-1]:08d}" in ended.err and "run the same command again" in ended.err
    assert "Traceback" not in ended.err, ended.err
    check_nothing_is_left(command)
    assert "resumed from" in runs.finish()


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "to_group", "seed"),
    [
        (signal.SIGINT, False, 0),
        (signal.SIGINT, True, 1),
        (signal.SIGINT, True, 2),
        (signal.SIGTERM, False, 3),
        (signal.SIGTERM, True, 4),
    ],
)
def test_an_interrupted_run_saves_where_it_is_and_the_next_start_goes_on_there(
    runs: Runs, number: int, to_group: bool, seed: int
) -> None:
    chance = random.Random(seed)
    command = runs.start_and_reach(chance.randint(0, 12))
    time.sleep(chance.uniform(0, 0.5))
    command.send(number, to_group=to_group)
    ended = command.wait(limit_s=120)
    assert ended.code == 130, ended.out + ended.err
    assert "Traceback" not in ended.err, ended.err
    check_nothing_is_left(command)
    reached = last_step(runs.run)
    check_history(runs.run)
    if reached > 0:
        assert complete_checkpoints(runs.run)[-1] == reached
        assert f"interrupted after step {reached}" in ended.err, ended.err
    before, ids = rows(runs.run), trained_ids(runs.run)
    runs.finish()
    assert rows(runs.run)[: len(before)] == before
    assert trained_ids(runs.run)[: len(ids)] == ids


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("phase", ["nothing yet", "starting processes", "loading models", "first weight sync"])
def test_an_interrupt_during_the_start_ends_it_soon(runs: Runs, phase: str, to_group: bool) -> None:
    command = runs.start()
    if phase == "nothing yet":
        time.sleep(1.5)
    else:
        command.wait_until(lambda: phase in command.text())
        time.sleep(0.3)
    command.send(signal.SIGINT, to_group=to_group)
    sent = time.monotonic()
    ended = command.wait(limit_s=90)
    assert ended.code == 130, ended.out + ended.err
    assert time.monotonic() - sent < 45
    assert "Traceback" not in ended.err, ended.err
    check_nothing_is_left(command)
    if phase == "first weight sync":  # it may be over when the signal arrives
        check_history(runs.run)
    else:
        assert not complete_checkpoints(runs.run)


def test_a_second_interrupt_ends_the_run_at_once(runs: Runs) -> None:
    command = runs.start_and_reach(5)
    for _ in range(2):
        command.send(signal.SIGINT, to_group=True)
        time.sleep(0.05)
    sent = time.monotonic()
    ended = command.wait(limit_s=90)
    assert ended.code == 130, ended.out + ended.err
    assert time.monotonic() - sent < 15
    assert "Traceback" not in ended.err, ended.err
    check_nothing_is_left(command)
    check_history(runs.run)
    runs.finish()


# ---- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_run_survives_everything_in_any_order(start: Any, tmp_path: Path, example: Any, seed: int) -> None:
    """One run folder, one event per start, each at a random time; then the run is finished."""
    shape = [
        {"learner": {"ranks": 2}},
        {"rollout": {"workers": 2, "max_num_seqs": 32}, "staleness": {"max_staleness": 1}},
    ][seed]
    runs = Runs(start, tmp_path, example, steps=MANY, checkpoint={"every": 2, "keep": 1}, **shape)
    chance = random.Random(seed)
    events = ["worker", "learner", "tree", "command", "interrupt", "terminate", "two interrupts", "worker and tree"]
    for event in chance.sample(events, len(events)):
        command = runs.start()
        saved = (complete_checkpoints(runs.run) or [0])[-1]
        target = saved + chance.randint(1, 12)
        command.wait_until(lambda command=command, target=target: runs.is_past(target, command))
        time.sleep(chance.uniform(0, 0.5))
        _happen(event, command, runs.run)
        if event == "worker":  # it is replaced, and then the run is interrupted
            command.wait_until(lambda command=command: "is replaced" in command.text())
            time.sleep(chance.uniform(0, 0.5))
            command.send(signal.SIGINT, to_group=True)
        ended = command.wait(limit_s=200)
        assert ended.code in (-signal.SIGKILL, 1, 130), (event, ended.out + ended.err)
        assert "Traceback" not in ended.err, (event, ended.err)
        if "tree" not in event:
            check_nothing_is_left(command)
    runs.finish()


def _happen(event: str, command: Command, run: Path) -> None:
    if "worker" in event:
        os.kill(actor_pid(run, "rollout-0"), signal.SIGKILL)
    if event == "learner":
        os.kill(actor_pid(run, "learner-0"), signal.SIGKILL)
    if event == "command":
        command.send(signal.SIGKILL)
    if event == "terminate":
        command.send(signal.SIGTERM)
    for _ in range({"interrupt": 1, "two interrupts": 2}.get(event, 0)):
        command.send(signal.SIGINT, to_group=True)
        time.sleep(0.1)
    if "tree" in event:
        command.kill_tree()
