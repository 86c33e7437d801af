"""The rollout workers of a run: who has which group, what came back, and replacing the dead.

Owns the worker handles and the assignment of groups to them. Knows nothing of training or evaluation: each submission
names a `Sink` that is told of every completion, failure and loss.

Loop (one per worker)
    consumes: the worker's reports           produces: calls to sinks
    waits for: the worker, at most `_POLL_S`     woken by: completions, the worker's death
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from s2rl.errors import RunError, StalledError, WorkerDied
from s2rl.trainer.parts import WorkerHandle
from s2rl.trainer.waiting import Progress
from s2rl.types import Completion, GroupRequest, WorkerStats

logger = logging.getLogger(__name__)

_POLL_S = 1.0
# Long enough that an idle worker costs nothing, short enough that a stop is prompt.


class Sink(Protocol):
    """Receives what becomes of submitted groups. Called in the event loop; must not block."""

    def completed(self, completion: Completion) -> None:
        """One completion of a group is sampled."""
        ...

    def failed(self, group_id: str, reason: str) -> None:
        """The worker cannot sample this group; nothing more of it comes."""
        ...

    def lost(self, request: GroupRequest) -> None:
        """The worker died with this group; completions reported so far no longer count."""
        ...


@dataclass(slots=True, kw_only=True)
class _Assignment:
    request: GroupRequest
    sink: Sink
    remaining: int
    since: float


@dataclass(slots=True, kw_only=True)
class WorkerSlot:
    """One worker and what the trainer knows of it."""

    handle: WorkerHandle
    version: int | None = None
    """Proven weight version; None before the first sync: takes no groups."""
    assigned: dict[str, _Assignment] = field(default_factory=dict)
    stats: WorkerStats | None = None
    alive: bool = True

    @property
    def load(self) -> int:
        """Completions not yet reported."""
        return sum(a.remaining for a in self.assigned.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTotals:
    """Sums over all workers that ever lived, monotonic."""

    completion_tokens: int
    prompt_tokens: int
    idle_s: float
    busy_s: float
    stalled_s: float
    cpu_s: float


class RolloutPool:
    """See the module docstring.

    `replace(index)` builds a started replacement for a dead worker; it has no weights yet (`has_newcomer`) and takes
    groups only after a publication.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        *,
        replace: Callable[[int], Awaitable[WorkerHandle]],
        max_restarts: int,
        progress: Progress,
    ) -> None:
        self.slots = [WorkerSlot(handle=w) for w in workers]
        self._replace = replace
        self._restarts_left = max_restarts
        self._progress = progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired = PoolTotals(completion_tokens=0, prompt_tokens=0, idle_s=0, busy_s=0, stalled_s=0, cpu_s=0)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.needs_rejoin = False
        """The sync group lost a member or lacks one: it must be built anew before the next publication."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after anything that may let another part go on."""

    def start(self) -> None:
        """Start the collect loops."""
        for slot in self.slots:
            self._spawn(self._collect_loop(slot))

    def _spawn(self, loop: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await loop
            except Exception as error:  # noqa: BLE001 - a background loop's failure must reach the one who waits
                if not self.failure.done():
                    self.failure.set_exception(error)
                self.on_change()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def alive(self) -> list[WorkerSlot]:
        """Workers that can be called."""
        return [s for s in self.slots if s.alive]

    @property
    def has_newcomer(self) -> bool:
        """Whether a worker waits for its first weights."""
        return any(s.alive and s.version is None for s in self.slots)

    def check(self) -> None:
        """Raise what ended a background loop."""
        if self.failure.done():
            self.failure.result()

    async def submit(self, requests: Sequence[GroupRequest], *, slot: WorkerSlot, sink: Sink) -> None:
        """Hand groups to one worker. They are assigned before the call, so that its death finds them.

        Groups meant for a worker that is gone by now are lost at once; its successor may hold other weights.
        """
        if not slot.alive or slot.version is None:
            for request in requests:
                sink.lost(request)
            return
        handle, now = slot.handle, time.monotonic()
        for request in requests:
            slot.assigned[request.group_id] = _Assignment(
                request=request, sink=sink, remaining=request.num_completions, since=now
            )
        try:
            await handle.submit(requests)
        except (WorkerDied, StalledError) as error:
            self.died(slot, error, handle=handle)

    async def abort(self, group_id: str) -> None:
        """Forget a group wherever it is."""
        for slot in self.alive:
            if slot.assigned.pop(group_id, None) is not None:
                handle = slot.handle
                try:
                    await handle.abort([group_id])
                except (WorkerDied, StalledError) as error:
                    self.died(slot, error, handle=handle)

    async def expire(self, limit_s: float) -> None:
        """Give up groups that were handed over longer ago than `limit_s`; their sinks are told that they failed."""
        now = time.monotonic()
        for slot in self.slots:
            for group_id, assignment in list(slot.assigned.items()):
                # It may have ended, or begun anew, while the one before was aborted.
                if now - assignment.since > limit_s and slot.assigned.get(group_id) is assignment:
                    await self.abort(group_id)
                    assignment.sink.failed(group_id, "timeout")

    async def _collect_loop(self, slot: WorkerSlot) -> None:
        handle = slot.handle
        while slot.alive and slot.handle is handle:
            try:
                report = await handle.collect(_POLL_S)
            except (WorkerDied, StalledError) as error:
                self.died(slot, error, handle=handle)
                return
            if not slot.alive or slot.handle is not handle:
                return  # declared dead while the report was on its way: its groups are with others
            slot.stats = report.stats
            for completion in report.completions:
                assignment = slot.assigned.get(completion.group_id)
                if assignment is None:
                    continue  # aborted while the report was on its way
                assignment.remaining -= 1
                if assignment.remaining == 0:
                    del slot.assigned[completion.group_id]
                assignment.sink.completed(completion)
            for failed in report.failed:
                assignment = slot.assigned.pop(failed.group_id, None)
                if assignment is not None:
                    assignment.sink.failed(failed.group_id, failed.reason)
            if report.completions or report.failed:
                self._progress.moved("completion")
                self.on_change()

    def died(
        self, slot: WorkerSlot, error: BaseException, *, handle: WorkerHandle, caused_by_another: bool = False
    ) -> None:
        """Give a dead worker's groups back and start its replacement. Safe to call twice.

        `handle` is the process that the error came from: it may have been replaced since. What died because another one
        did is replaced without a charge on the restarts.
        """
        if not slot.alive or slot.handle is not handle:
            return
        slot.alive = False
        slot.version = None
        self.needs_rejoin = True
        self._progress.failed(f"rollout worker {slot.handle.index}", error)
        logger.warning(
            "rollout worker %d is gone (%s); %d groups go to others", slot.handle.index, error, len(slot.assigned)
        )
        lost = list(slot.assigned.values())
        slot.assigned.clear()
        for assignment in lost:
            assignment.sink.lost(assignment.request)
        self._spawn(self._replacement(slot, error, charged=not caused_by_another))
        self.on_change()

    async def _replacement(self, slot: WorkerSlot, error: BaseException, *, charged: bool) -> None:
        index = slot.handle.index
        # It is dead or half-dead: whatever is left of it must not load weights or answer later.
        await close_quietly([slot.handle])
        if slot.stats is not None:
            self._retired = _add(self._retired, slot.stats)
            slot.stats = None
        while True:
            if charged and self._restarts_left == 0:
                raise RunError(
                    f"rollout worker {index} died and limits.worker_restarts are used up; its last error: {error}"
                ) from error
            self._restarts_left -= charged
            try:
                handle = await self._replace(index)
                break
            except (WorkerDied, StalledError) as failure:
                error, charged = failure, True
                self._progress.failed(f"rollout worker {index}", failure)
        slot.handle = handle
        slot.alive = True
        self.needs_rejoin = True
        self._progress.moved("worker replaced")
        logger.warning("rollout worker %d is replaced", index)
        self._spawn(self._collect_loop(slot))
        self.on_change()

    @property
    def totals(self) -> PoolTotals:
        """Counters over all workers, the dead included."""
        total = self._retired
        for slot in self.slots:
            if slot.stats is not None:
                total = _add(total, slot.stats)
        return total

    async def close(self) -> None:
        """Stop the loops and the workers."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await close_quietly([s.handle for s in self.slots])
        if self.failure.done():
            self.failure.exception()  # retrieved, so that asyncio does not report it again
        else:
            self.failure.cancel()


async def close_quietly(handles: Iterable[WorkerHandle]) -> None:
    """Close workers; one that is dead already is no error."""
    results = await asyncio.gather(*(h.close() for h in handles), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, WorkerDied):
            logger.warning("closing a rollout worker: %s", result)


def _add(total: PoolTotals, stats: WorkerStats) -> PoolTotals:
    return PoolTotals(
        completion_tokens=total.completion_tokens + stats.completion_tokens,
        prompt_tokens=total.prompt_tokens + stats.prompt_tokens,
        idle_s=total.idle_s + stats.idle_s,
        busy_s=total.busy_s + stats.busy_s,
        stalled_s=total.stalled_s + stats.stalled_s,
        cpu_s=total.cpu_s + stats.cpu_s,
    )
