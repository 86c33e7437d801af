"""CPU seconds and resident memory of everything that a command starts, by process, read from /proc (Linux).

The watching process makes itself the reaper of orphans, so that daemons whose parent has ended stay below it and are
still counted. A process that lives shorter than the polling interval may be missed; its children are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_RAY_DAEMONS = (
    "gcs_server",
    "raylet",
    "log_monitor",
    "runtime_env/agent",
    "dashboard/agent",
    "dashboard/dashboard",
    "ray/autoscaler",
)
_WORKER = "ray worker"
"""A worker process of Ray without an actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One process so far."""

    label: str
    """What it is: `driver`, `learner-0`, `rollout-0`, `grader`, `ray` (a daemon), `ray worker` (without an actor),
    `other`."""
    cpu_s: float
    """User and system time of its own, without children."""
    rss_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """CPU seconds of all processes so far, those that ended included."""

    at_s: float
    """`time.monotonic()`."""
    cpu_s_by_label: Mapping[str, float]

    @property
    def cpu_s(self) -> float:
        """All processes together."""
        return sum(self.cpu_s_by_label.values())

    def since(self, earlier: Snapshot) -> dict[str, float]:
        """CPU seconds by label since `earlier`, largest first."""
        spent = {k: v - earlier.cpu_s_by_label.get(k, 0.0) for k, v in self.cpu_s_by_label.items()}
        return dict(sorted(spent.items(), key=lambda item: -item[1]))


class ProcessTree:
    """Starts a command and watches it and all its descendants in a thread of its own until `close`."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path, poll_s: float = 0.1
    ) -> None:
        """`log` receives the command's output."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._seen: dict[tuple[int, int], Usage] = {}
        self._alive: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._poll_s = poll_s
        self._foreign = set(_read_stats())
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command), env=dict(env), cwd=cwd, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self._thread = threading.Thread(target=self._watch, name="process-tree", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """Read everything once more, now."""
        self._poll()
        with self._lock:
            totals: dict[str, float] = {}
            for usage in self._seen.values():
                totals[usage.label] = totals.get(usage.label, 0.0) + usage.cpu_s
        return Snapshot(at_s=time.monotonic(), cpu_s_by_label=totals)

    def resident_mb(self) -> dict[str, float]:
        """Resident memory of the processes that live now; several with the same label get a number."""
        self._poll()
        with self._lock:
            found: dict[str, float] = {}
            for key in sorted(self._alive):
                label, number = self._seen[key].label, 2
                while label in found:
                    label, number = f"{self._seen[key].label} #{number}", number + 1
                found[label] = self._seen[key].rss_mb
        return found

    def wait(self, timeout_s: float) -> int:
        """The command's exit code; it is killed with all its descendants when it takes longer than `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def close(self) -> None:
        """Stop watching, and reap the orphans that ended."""
        self._closing.set()
        self._thread.join()
        for pid, _ in self._seen:
            if pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):  # most were reaped by their own parents
                    os.waitpid(pid, os.WNOHANG)

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_s):
            self._poll()

    def _poll(self) -> None:
        stats = _read_stats()
        members = _descendants(self.process.pid, os.getpid(), stats) - self._foreign
        with self._lock:
            self._alive = {}
            for pid in members:
                _, start, cpu_s, rss_mb = stats[pid]
                key = (pid, start)
                before = self._seen.get(key)
                # Ray starts a worker first and turns it into an actor later.
                settled = before is not None and before.label not in ("other", _WORKER)
                label = before.label if before is not None and settled else self._label(pid)
                self._seen[key] = Usage(label=label, cpu_s=cpu_s, rss_mb=rss_mb)
                self._alive[key] = pid

    def _label(self, pid: int) -> str:
        if pid == self.process.pid:
            return "driver"
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return "other"
        if "default_worker.py" in command or command.startswith("ray::"):
            return _actor_name(pid) or _WORKER
        if any(name in command for name in _RAY_DAEMONS):
            return "ray"
        return "grader" if "s2rl.rewards.worker" in command else "other"


def _actor_name(pid: int) -> str | None:
    """Actors keep their log file `RUN/logs/NAME.log` open."""
    try:
        targets = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return None
    for target in targets:
        path = Path(target)
        if path.parent.name == "logs" and path.suffix == ".log" and path.stem.startswith(("learner-", "rollout-")):
            return path.stem
    return None


def _read_stats() -> dict[int, tuple[int, int, float, float]]:
    """By process id: parent, start time, CPU seconds, resident MiB."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
        found[int(entry.name)] = (int(fields[1]), int(fields[19]), cpu_s, int(fields[21]) * _PAGE / 2**20)
    return found


def _descendants(root: int, reaper: int, stats: Mapping[int, tuple[int, int, float, float]]) -> set[int]:
    """`root`, everything below it, and the orphans that the reaper inherited."""
    children: dict[int, list[int]] = {}
    for pid, (parent, *_) in stats.items():
        children.setdefault(parent, []).append(pid)
    members: set[int] = set()
    waiting = [pid for pid in {root, *children.get(reaper, ())} if pid in stats]
    while waiting:
        pid = waiting.pop()
        if pid not in members:
            members.add(pid)
            waiting += children.get(pid, ())
    return members
