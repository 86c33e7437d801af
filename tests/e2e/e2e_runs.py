"""Real runs in processes of their own, as a person starts them, and what must hold of every run folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from s2rl.config import load_config
from s2rl.data.rows import load_rows
from s2rl.data.stream import PromptStream
from s2rl.reaper import marked_processes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RUN_LIMIT_S = 600.0
"""Far above what a run takes alone: the machine may be busy."""
_LEFT_OVER_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended. `code` is negative after a signal."""

    pid: int
    code: int
    out: str
    err: str
    seconds: float


class Command:
    """A command of s2rl under way, in a process group of its own, as a terminal gives it one."""

    def __init__(
        self, arguments: list[str], *, folder: Path, env: Mapping[str, str] | None = None, script: Path | None = None
    ) -> None:
        """`script` is a Python file to run instead of the command line."""
        program = [str(script)] if script is not None else ["-m", "s2rl"]
        self._out, self._err = (
            (folder / f"{time.monotonic_ns()}.{name}").open("w+", encoding="utf-8") for name in ("out", "err")
        )
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "COLUMNS": "200", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
            | dict(env or {}),
        )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def mark(self) -> str:
        """What all processes of its run carry in their environment."""
        return f"s2rl-ray-{self.pid}"

    def send(self, number: int, *, to_group: bool = False) -> None:
        (os.killpg if to_group else os.kill)(self.pid, number)

    def kill_tree(self) -> None:
        """SIGKILL for the command and every process of its run, the one that cleans up included."""
        family = {self.pid, *marked_processes(self.mark), *descendants(self.pid)}
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait(limit_s=60)

    def wait(self, *, limit_s: float = RUN_LIMIT_S) -> Ended:
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(f"did not end within {limit_s:.0f} s\n{self.text()}") from None
        seconds = time.monotonic() - self._started
        return Ended(pid=self.pid, code=code, out=_all(self._out), err=_all(self._err), seconds=seconds)

    def wait_until(self, condition: Callable[[], bool], *, limit_s: float = RUN_LIMIT_S) -> None:
        """Until `condition`, while the command runs."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.is_running, f"ended with {self._process.returncode} too early\n{self.text()}"
            assert time.monotonic() < deadline, f"nothing came within {limit_s:.0f} s\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        return _all(self._out) + _all(self._err)

    def close(self) -> None:
        if self.is_running:
            self.kill_tree()
        self._out.close()
        self._err.close()


def _all(file: Any) -> str:
    return Path(file.name).read_text(encoding="utf-8", errors="replace")


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return found


def actor_pid(run: Path, name: str) -> int:
    """Process id of the newest actor of this name: `rollout-0`, `learner-1`."""
    found = re.findall(rf"{name} is process (\d+)", (run / "run.log").read_text(encoding="utf-8"))
    assert found, f"no process of {name}"
    return int(found[-1])


def session_folder(command: Command) -> Path:
    """Temporary folder of a run's Ray session."""
    return Path(tempfile.gettempdir()) / command.mark


def check_nothing_is_left(command: Command) -> None:
    """No process of the run, no folder of its Ray session."""
    folder = session_folder(command)
    deadline = time.monotonic() + _LEFT_OVER_LIMIT_S
    while (left := marked_processes(command.mark)) or folder.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {[_name(pid) for pid in left]}, folder: {folder.exists()}")
        time.sleep(0.1)


def _name(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:200]!r}"
    except OSError:
        return str(pid)


# ---- run folders -----------------------------------------------------------------------------------------------------


def lines(file: Path) -> list[dict[str, Any]]:
    """All complete lines of a JSONL file, also while it is written."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as text:
        return [json.loads(line) for line in text if line.endswith("\n")]


def rows(run: Path) -> list[dict[str, Any]]:
    return lines(run / "metrics.jsonl")


def last_step(run: Path) -> int:
    return max((row["step"] for row in rows(run)), default=-1)


def trained_ids(run: Path) -> list[str]:
    return [group["group_id"] for group in lines(run / "rollouts.jsonl") if group["fate"] == "trained"]


def complete_checkpoints(run: Path) -> list[int]:
    return sorted(int(file.parent.name.removeprefix("step_")) for file in run.glob("checkpoints/step_*/COMPLETE"))


def check_history(run: Path, *, steps: int | None = None) -> None:
    """What must hold of the surviving history of every run, however often it was killed.

    With `steps`, the run is also finished: nothing is outstanding.
    """
    config = load_config(run / "config.yaml")
    history = rows(run)
    first = 0 if config.eval.data and config.eval.at_start else 1
    assert [row["step"] for row in history] == list(range(first, len(history) + first)), "steps are not contiguous"
    steps_done = [row for row in history if row["step"] > 0]
    updates, size = config.algorithm.updates_per_batch, config.algorithm.groups_per_step
    for row in steps_done:
        where = f"step {row['step']}"
        counts = {name: row[f"queue/{name}"] for name in ("waiting", "in_flight", "finished", "trained", "dropped")}
        assert sum(counts.values()) == row["queue/drawn"], (where, counts)
        assert counts["trained"] == size * row["step"], where
        assert row["version"] == updates * row["step"], where
        assert 0 <= row["staleness/max"] <= config.staleness.max_staleness, where
        assert "sync/seconds" not in row or row["sync/verified"] is True, where

    groups = lines(run / "rollouts.jsonl")
    trained = [group for group in groups if group["fate"] == "trained"]
    dropped = [group for group in groups if group["fate"].startswith("dropped:")]
    assert len(trained) + len(dropped) == len(groups)
    repeated = [name for name, count in Counter(group["group_id"] for group in groups).items() if count > 1]
    assert not repeated, f"groups with two fates: {repeated[:5]}"
    per_step = Counter(group["step"] for group in trained)
    for row in steps_done:
        assert per_step[row["step"]] == size, f"step {row['step']} trained {per_step[row['step']]} groups"
    _check_versions(trained, updates=updates, bound=config.staleness.max_staleness)
    if steps is not None:
        assert len(steps_done) == steps
        assert set(per_step) == set(range(1, steps + 1))
        last = steps_done[-1]
        assert last["queue/waiting"] == last["queue/in_flight"] == last["queue/finished"] == 0
        assert last["queue/dropped"] == len(dropped)
        # Every prompt that was drawn has one fate, and what was drawn is where the stream begins.
        stream = PromptStream(
            load_rows(config.data.train, columns=config.data.columns), seed=config.seed, shuffle=config.data.shuffle
        )
        drawn = {stream.next().prompt_id for _ in range(last["queue/drawn"])}
        assert {group["group_id"] for group in groups} == drawn


def _check_versions(trained: list[dict[str, Any]], *, updates: int, bound: int) -> None:
    """The bound once more, from the versions of every completion."""
    for group in trained:
        oldest = min((r["version_min"] for r in group["rollouts"] if r["version_min"] is not None), default=None)
        newest = max((r["version_max"] for r in group["rollouts"] if r["version_max"] is not None), default=None)
        if oldest is not None and newest is not None:
            assert updates * group["step"] - 1 - oldest <= bound, group["group_id"]
            assert newest <= updates * (group["step"] - 1), group["group_id"]
            assert group["taken_version"] <= oldest, group["group_id"]


# ---- configurations --------------------------------------------------------------------------------------------------


def settings(example: Any, **sections: Any) -> dict[str, Any]:
    """A configuration on the tiny example that starts fast; `sections` are merged over it, key by key."""
    base: dict[str, Any] = {
        "name": "run",
        "runs_dir": "runs",
        "steps": 40,
        "model": {"path": str(example.model)},
        "data": {"train": [{"path": str(example.train)}], "max_prompt_tokens": 16},
        "rewards": {"functions": [{"function": "exact_match"}]},
        "rollout": {
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_batched_tokens": 512,
            "kv_cache_gb": 0.05,
            "sampling": {"max_new_tokens": 8},
        },
        "learner": {"dtype": "float32", "optimizer": {"lr": 1e-4}},
        "algorithm": {"group_size": 8, "groups_per_step": 8},
        "staleness": {"max_staleness": 2},
        "eval": {"data": [{"path": str(example.heldout)}], "every": 10},
    }
    return _merged(base, sections)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def write_config(folder: Path, values: Mapping[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return file


class mounted:
    """A small file system in memory."""

    def __init__(self, folder: Path, options: str) -> None:
        folder.mkdir()
        self.folder, self._options = folder, options

    def __enter__(self) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", self._options, "tmpfs", str(self.folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no right to mount a file system")
        return self.folder

    @staticmethod
    def resize(folder: Path, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
