"""What the grading pool keeps account of: requests, completions, calls, processes, counters."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from s2rl.rewards.process import GraderProcess
from s2rl.rewards.wire import CallMessage
from s2rl.types import Completion, RolloutStatus, Score


@dataclass(slots=True, kw_only=True)
class Counters:
    calls: int = 0
    timeouts: int = 0
    errors: int = 0
    restarts: int = 0
    seconds: float = 0.0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingStats:
    """Counters since the start of the pool."""

    calls: int = 0
    """Calls that ended, in whatever way."""
    timeouts: int = 0
    errors: int = 0
    restarts: int = 0
    """Processes that were replaced."""
    seconds: float = 0.0
    """Time spent in reward functions, over all processes."""
    waiting: int = 0
    """Calls that have not ended."""
    last_error: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One completion being graded."""

    completion: Completion
    waiting: int
    batch: Batch
    scores: dict[int, Score] = field(default_factory=dict)
    status: RolloutStatus = RolloutStatus.SCORED


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """One request to grade completions."""

    future: asyncio.Future[None]
    waiting: int


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    message: CallMessage
    job: Job
    lost: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A process and what it was given."""

    process: GraderProcess
    ready: bool = False
    began: bool = False
    """It works on its lot; the first of `calls` is the one that runs."""
    calls: deque[Call] = field(default_factory=deque)
    since: float = 0.0
    """Loop time at which the running call, or the start, began."""
    timer: asyncio.TimerHandle | None = None
