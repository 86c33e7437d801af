"""Weight sync: published by the learner, loaded by every worker, proven before anything goes on.

`connect` builds the one process group; `publish` streams, compares fingerprints and the probe, and only then
tells the pool
that a worker runs the version. A worker that dies meanwhile costs the group: it is rebuilt once a replacement stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from s2rl.config.schema import SyncConfig
from s2rl.errors import RunError, StalledError, SyncError, WorkerDied
from s2rl.sync.proof import check_fingerprints, check_probe
from s2rl.trainer.parts import LearnerHandle, WorkerHandle
from s2rl.trainer.pool import RolloutPool, WorkerSlot
from s2rl.trainer.waiting import Progress
from s2rl.types import LoadReport, PublishReport, SyncGroupSpec, TensorSpec

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
_LOOK_S = 0.1
# The members of a collective give up on a missing one before the calls to them do: then only the missing one is silent.
_COLLECTIVE_SHARE = 0.8
_BROKEN_S = 10.0
# How long the rest may take to answer once a member of a collective has failed.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOutcome:
    """One proven sync."""

    version: int
    seconds: float
    """Publication and proof together."""
    num_bytes: int
    stalled_s: float
    """Longest time that any worker's generation stood still."""
    probe_difference: float
    """Mean |difference| of the probe's log-probabilities, the worst worker's."""
    num_tensors: int


class _GivenUp(SyncError):
    """A worker was not waited for any longer because another member failed: it is not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A worker of the group. `handle` is remembered: by the end of a call the slot may hold a successor."""

    slot: WorkerSlot
    handle: WorkerHandle

    @property
    def is_here(self) -> bool:
        """Whether it still is the worker of its slot."""
        return self.slot.alive and self.slot.handle is self.handle


class WeightSync:
    """See the module docstring."""

    def __init__(
        self,
        *,
        learner: LearnerHandle,
        pool: RolloutPool,
        config: SyncConfig,
        backend: str,
        limit_s: float,
        probe: Sequence[int],
        tolerance: float,
        tensor_parallel: int,
        progress: Progress,
    ) -> None:
        self._learner, self._pool, self._config, self._backend = learner, pool, config, backend
        self._limit_s, self._probe, self._tolerance = limit_s, list(probe), tolerance
        self._tensor_parallel, self._progress = tensor_parallel, progress
        self._manifest: list[TensorSpec] = []

    async def connect(self) -> None:
        """Build the process group over learner rank 0 and all living workers."""
        if not self._manifest:
            self._manifest = await self._learner.manifest()
        host, port = await self._learner.sync_endpoint()
        members = self._members()
        tp = self._tensor_parallel

        def spec(rank: int) -> SyncGroupSpec:
            return SyncGroupSpec(
                backend=self._backend,
                host=host,
                port=port,
                rank=rank,
                world_size=1 + tp * len(members),
                timeout_s=self._limit_s * _COLLECTIVE_SHARE,
                bucket_bytes=int(self._config.bucket_mb * 2**20),
            )

        self._pool.needs_rejoin = False
        joins = [m.handle.join_sync(spec(1 + i * tp), self._manifest) for i, m in enumerate(members)]
        learner, *workers = await self._all(
            self._learner.join_sync(spec(0)),
            joins,
            members=members,
            what=f"learner rank 0 and {_names(members)} to join the process group",
        )
        self._raise_unless_death(learner, workers, members)

    async def publish(self, version: int) -> SyncOutcome:
        """Bring every living worker to `version` and prove it. Repeats when a worker died under it."""
        started = time.monotonic()
        while True:
            while not self._pool.alive:
                # No limit here: the replacement has its own (limits.start_s), and `check` raises when it fails.
                self._pool.check()
                await asyncio.sleep(_LOOK_S)
            if self._pool.needs_rejoin:
                await self.connect()
                continue
            outcome = await self._publish_once(version, started)
            if outcome is not None:
                self._progress.moved("sync")
                return outcome

    def _members(self) -> list[_Member]:
        return [_Member(slot=s, handle=s.handle) for s in self._pool.alive]

    async def _all(
        self, learner: Awaitable[object], workers: Sequence[Awaitable[object]], *, members: Sequence[_Member], what: str
    ) -> list[object]:
        """Results and errors of the learner's call and of those to `members`, in this order.

        Each call has a limit of its own. But once one of them failed, its peers may sit in a collective until their
        limit: a worker that does not answer soon after is given up, so that one death does not cost minutes. When they
        failed by running out of time, the one that still does not answer is the one that they waited for.
        """
        started = time.monotonic()
        tasks = [asyncio.ensure_future(call) for call in (learner, *workers)]
        given_up: dict[asyncio.Future[object], RunError] = {}
        limit_s = self._limit_s + _GRACE_S
        done, pending = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        failure = next((e for t in done if not t.cancelled() and (e := t.exception()) is not None), None)
        if pending and failure is not None:
            timed_out = time.monotonic() - started >= 0.9 * _COLLECTIVE_SHARE * self._limit_s
            _, pending = await asyncio.wait(pending, timeout=_BROKEN_S)
            for member, task in zip(members, tasks[1:], strict=True):
                if task in pending:
                    # One that was declared dead meanwhile (its reports stopped) is a cause, too.
                    kind = StalledError if timed_out or not member.is_here else _GivenUp
                    error = kind(f"no answer {_BROKEN_S:.0f} s after {what} failed elsewhere: {failure}")
                    self._pool.died(member.slot, error, handle=member.handle, caused_by_another=not timed_out)
                    given_up[task] = error
                    task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=limit_s)
        if pending:
            for task in pending:
                task.cancel()
            raise StalledError(f"weight sync waited {limit_s:.0f} s for {what}")
        return [given_up.get(task) or task.exception() or task.result() for task in tasks]

    async def _publish_once(self, version: int, started: float) -> SyncOutcome | None:
        members = self._members()
        published, *loaded = await self._all(
            self._learner.publish(version),
            [m.handle.load_weights(version) for m in members],
            members=members,
            what=f"publication of version {version} to {_names(members)}",
        )
        self._raise_unless_death(published, loaded, members)
        reports = [r for r in loaded if isinstance(r, LoadReport)]
        if not isinstance(published, PublishReport) or len(reports) < len(members):
            return None
        for report in reports:
            check_fingerprints(published, report)
        difference = await self._prove(version, members)
        if difference is None:
            return None
        for member in members:
            if member.is_here:
                member.slot.version = version
        return SyncOutcome(
            version=version,
            seconds=time.monotonic() - started,
            num_bytes=published.num_bytes,
            stalled_s=max(r.stalled_s for r in reports),
            probe_difference=difference,
            num_tensors=len(published.fingerprints),
        )

    async def _prove(self, version: int, members: Sequence[_Member]) -> float | None:
        """Largest mean |difference| of the probe over workers; None when one died.

        Raises `SyncError` when one disagrees.
        """
        ours, *theirs = await self._all(
            self._learner.score([self._probe], 1.0),
            [m.handle.score([self._probe]) for m in members],
            members=members,
            what=f"the probe of version {version} by {_names(members)}",
        )
        self._raise_unless_death(ours, theirs, members)
        if any(isinstance(r, BaseException) for r in theirs):
            return None
        return max(
            check_probe(ours, engine, tolerance=self._tolerance, worker=member.handle.index, version=version)  # type: ignore[arg-type]
            for member, engine in zip(members, theirs, strict=True)
        )

    def _raise_unless_death(self, learner: object, workers: Sequence[object], members: Sequence[_Member]) -> None:
        """Errors caused by a worker that died or hangs are not the run's end; all others are raised.

        A worker that failed because another one died holds half-loaded weights and is replaced as well.
        """
        errors = {m.handle.index: e for m, e in zip(members, workers, strict=True) if isinstance(e, BaseException)}
        learner_error = learner if isinstance(learner, BaseException) else None
        if not errors and learner_error is None:
            return
        dead_or_hung = WorkerDied | StalledError
        given_up = [m for m in members if isinstance(errors.get(m.handle.index), _GivenUp)]
        gone = [
            m
            for m in members
            if m not in given_up and (not m.is_here or isinstance(errors.get(m.handle.index), dead_or_hung))
        ]
        if not gone:
            raise learner_error or next(iter(errors.values()))
        if learner_error is not None and not isinstance(learner_error, SyncError):
            raise learner_error
        for member in members:
            error = errors.get(member.handle.index)
            if error is not None and not isinstance(error, RunError):
                raise error
            if error is not None or member in gone:
                self._pool.died(
                    member.slot,
                    error or WorkerDied(f"rollout worker {member.handle.index} died"),
                    handle=member.handle,
                    caused_by_another=member not in gone,
                )
        # The process group lost a member: the survivors need a new one even before the replacement stands.
        self._pool.needs_rejoin = True


def _names(members: Sequence[_Member]) -> str:
    return f"workers {[m.handle.index for m in members]}"
