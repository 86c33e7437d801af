"""A collective that one member left: the others are not waited for until their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bench.controller.clock import run_in_virtual_time
from s2rl.config.schema import SyncConfig
from s2rl.errors import SyncError, WorkerDied
from s2rl.trainer.pool import RolloutPool
from s2rl.trainer.syncing import SyncOutcome, WeightSync
from s2rl.trainer.waiting import Progress
from s2rl.types import LoadReport, PublishReport, SyncGroupSpec, TensorSpec

LIMIT_S = 600.0


class Learner:
    """Its first publication fails as soon as a receiver is gone, as gloo's sender does."""

    world_size = 1

    def __init__(self, first_error: Exception | None) -> None:
        self.first_error = first_error

    async def manifest(self) -> list[TensorSpec]:
        return [TensorSpec(name="w", shape=(1,), dtype="float32")]

    async def sync_endpoint(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def join_sync(self, spec: SyncGroupSpec) -> None: ...

    async def publish(self, version: int) -> PublishReport:
        error, self.first_error = self.first_error, None
        if error is not None:
            raise error
        return PublishReport(version=version, num_bytes=4, seconds=0.0, fingerprints={"w": 1})

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Any = None, as_sampled: bool = False
    ) -> list[np.ndarray]:
        return [np.zeros(len(s) - 1, dtype=np.float32) for s in sequences]


class Worker:
    def __init__(self, index: int, *, load: str = "works") -> None:
        self.index, self.load, self.closed = index, load, False

    async def collect(self, max_wait_s: float) -> object:
        await asyncio.sleep(10_000)
        raise AssertionError

    async def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None: ...

    async def load_weights(self, version: int) -> LoadReport:
        if self.load == "dies":
            raise WorkerDied(f"worker {self.index} died")
        if self.load == "waits for the dead":
            await asyncio.sleep(0.8 * LIMIT_S)
            raise SyncError("timed out")
        return LoadReport(worker=self.index, version=version, num_bytes=4, stalled_s=0.0, fingerprints={"w": 1})

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.zeros(len(s) - 1, dtype=np.float32) for s in sequences]

    async def close(self) -> None:
        self.closed = True


async def publish(
    workers: list[Worker], learner: Learner, *, max_restarts: int
) -> tuple[SyncOutcome, float, RolloutPool]:
    async def replace(index: int) -> Worker:
        return Worker(index)

    progress = Progress(limit_s=LIMIT_S)
    pool = RolloutPool(workers, replace=replace, max_restarts=max_restarts, progress=progress)
    pool.start()
    sync = WeightSync(
        learner=learner,
        pool=pool,
        config=SyncConfig(),
        backend="gloo",
        limit_s=LIMIT_S,
        probe=[1, 2, 3],
        tolerance=0.1,
        tensor_parallel=1,
        progress=progress,
    )
    try:
        await sync.connect()
        started = asyncio.get_running_loop().time()
        outcome = await sync.publish(5)
        return outcome, asyncio.get_running_loop().time() - started, pool
    finally:
        await pool.close()


def test_a_death_during_a_publication_costs_seconds_although_a_survivor_waits_for_the_dead_in_a_collective() -> None:
    dead, survivor = Worker(0, load="dies"), Worker(1, load="waits for the dead")
    learner = Learner(SyncError("rank 1 is gone"))
    outcome, seconds, pool = run_in_virtual_time(publish([dead, survivor], learner, max_restarts=1))
    assert outcome.version == 5
    assert [s.version for s in pool.slots] == [5, 5]
    assert seconds < 30
    # The survivor held half-loaded weights and was replaced too, without a charge on the restarts (there was one).
    assert dead.closed and survivor.closed


def test_an_error_that_no_death_explains_ends_the_run_even_when_a_worker_had_to_be_given_up() -> None:
    waiting = Worker(0, load="waits for the dead")
    learner = Learner(SyncError("the stream differs from the manifest"))
    with pytest.raises(SyncError, match="differs from the manifest"):
        run_in_virtual_time(publish([waiting], learner, max_restarts=3))
