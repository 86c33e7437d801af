"""Weight sync: published by the learner, loaded by every worker, proven before anything goes on.

`connect` builds the one process group; `publish` streams, compares fingerprints and the probe, and only then
tells the pool
that a worker runs the version. A worker that dies meanwhile costs the group: it is rebuilt once a replacement stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from s2rl.config.schema import SyncConfig
from s2rl.errors import RunError, StalledError, SyncError, WorkerDied
from s2rl.sync.proof import check_fingerprints, check_probe
from s2rl.trainer.parts import LearnerHandle
from s2rl.trainer.pool import RolloutPool, WorkerSlot
from s2rl.trainer.waiting import Progress, within
from s2rl.types import FloatArray, LoadReport, PublishReport, SyncGroupSpec, TensorSpec

logger = logging.getLogger(__name__)


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
        slots = self._pool.alive
        tp = self._tensor_parallel

        def spec(rank: int) -> SyncGroupSpec:
            return SyncGroupSpec(
                backend=self._backend,
                host=host,
                port=port,
                rank=rank,
                world_size=1 + tp * len(slots),
                timeout_s=self._limit_s,
                bucket_bytes=int(self._config.bucket_mb * 2**20),
            )

        self._pool.needs_rejoin = False
        joins = [s.handle.join_sync(spec(1 + i * tp), self._manifest) for i, s in enumerate(slots)]
        results = await within(
            asyncio.gather(self._learner.join_sync(spec(0)), *joins, return_exceptions=True),
            limit_s=self._limit_s,
            who="weight sync",
            what=f"learner rank 0 and workers {[s.handle.index for s in slots]} to join the process group",
        )
        self._raise_unless_death(results[:1], dict(zip(map(id, slots), results[1:], strict=True)), slots)

    async def publish(self, version: int) -> SyncOutcome:
        """Bring every living worker to `version` and prove it. Repeats when a worker died under it."""
        started = time.monotonic()
        while True:
            if self._pool.needs_rejoin:
                await self.connect()
            while not self._pool.alive:
                self._pool.check()
                await within(
                    self._any_alive(),
                    limit_s=self._limit_s,
                    who="weight sync",
                    what="a replacement for a dead rollout worker",
                )
            if self._pool.needs_rejoin:
                continue
            outcome = await self._publish_once(version, started)
            if outcome is not None:
                self._progress.moved("sync")
                return outcome

    async def _any_alive(self) -> None:
        while not self._pool.alive:
            self._pool.check()
            await asyncio.sleep(0.1)

    async def _publish_once(self, version: int, started: float) -> SyncOutcome | None:
        slots = self._pool.alive
        results = await within(
            asyncio.gather(
                self._learner.publish(version), *(s.handle.load_weights(version) for s in slots), return_exceptions=True
            ),
            limit_s=self._limit_s,
            who="weight sync",
            what=f"publication of version {version} to workers {[s.handle.index for s in slots]}",
        )
        published, loaded = results[0], results[1:]
        self._raise_unless_death([published], dict(zip(map(id, slots), loaded, strict=True)), slots)
        if not isinstance(published, PublishReport) or not all(isinstance(r, LoadReport) for r in loaded):
            return None
        for report in loaded:
            assert isinstance(report, LoadReport)
            check_fingerprints(published, report)
        difference = await self._prove(version, slots)
        if difference is None:
            return None
        for slot in slots:
            slot.version = version if slot.alive else None
        return SyncOutcome(
            version=version,
            seconds=time.monotonic() - started,
            num_bytes=published.num_bytes,
            stalled_s=max(r.stalled_s for r in loaded if isinstance(r, LoadReport)),
            probe_difference=difference,
            num_tensors=len(published.fingerprints),
        )

    async def _prove(self, version: int, slots: Sequence[WorkerSlot]) -> float | None:
        """Largest mean |difference| of the probe over workers; None when one died. Raises `SyncError` when one
        disagrees."""
        results = await within(
            asyncio.gather(
                self._learner.score([self._probe], 1.0),
                *(s.handle.score([self._probe]) for s in slots),
                return_exceptions=True,
            ),
            limit_s=self._limit_s,
            who="weight sync",
            what=f"the probe of version {version} by workers {[s.handle.index for s in slots]}",
        )
        self._raise_unless_death(results[:1], dict(zip(map(id, slots), results[1:], strict=True)), slots)
        reference = results[0]
        differences: list[float] = []
        for slot, engine in zip(slots, results[1:], strict=True):
            if isinstance(engine, BaseException) or isinstance(reference, BaseException):
                return None
            differences.append(self._compare(reference, engine, slot.handle.index, version))
        return max(differences)

    def _compare(self, learner: list[FloatArray], engine: list[FloatArray], worker: int, version: int) -> float:
        return check_probe(learner, engine, tolerance=self._tolerance, worker=worker, version=version)

    def _raise_unless_death(
        self,
        learner_results: Sequence[object],
        worker_results: dict[int, object],
        slots: Sequence[WorkerSlot],
    ) -> None:
        """Errors caused by a worker's death are not the run's end; all others are.

        A worker that failed because another one died holds half-loaded weights and is replaced as well.
        """
        errors = {i: r for i, r in worker_results.items() if isinstance(r, BaseException)}
        learner_error = next((r for r in learner_results if isinstance(r, BaseException)), None)
        if not errors and learner_error is None:
            return
        dead = [s for s in slots if not s.alive or isinstance(errors.get(id(s)), WorkerDied)]
        if not dead:
            raise learner_error or next(iter(errors.values()))
        if learner_error is not None and not isinstance(learner_error, SyncError):
            raise learner_error
        for slot in slots:
            error = errors.get(id(slot))
            if error is not None and not isinstance(error, WorkerDied | SyncError | StalledError | RunError):
                raise error
            if slot in dead or error is not None:
                self._pool.died(slot, error or WorkerDied(f"rollout worker {slot.handle.index} died"))
        # The process group lost a member: the survivors need a new one even before the replacement stands.
        self._pool.needs_rejoin = True
