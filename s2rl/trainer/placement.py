"""Where the parts of a run live: Ray actors around `RolloutWorker` and `Learner`, behind the protocols of `parts`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s2rl.cluster import Actor, ActorDied, Cluster
from s2rl.config.schema import RunConfig
from s2rl.device import device_spec
from s2rl.errors import LearnerDied, StalledError, WorkerDied
from s2rl.trainer.sampling import banned_token_ids
from s2rl.types import (
    FloatArray,
    GroupRequest,
    ImageArray,
    LoadReport,
    PublishReport,
    RankBatch,
    RolloutReport,
    RowLayout,
    StepResult,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
)

_ANSWER_S = 60.0
# Calls that only put something into a queue or read a counter; an actor that takes longer is not answering.
_CLOSE_S = 20.0


def process_env(threads: int) -> dict[str, str]:
    """Environment of an actor: its thread count must stand before any library starts its own pool."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


class WorkerActor:
    """`WorkerHandle` over an actor."""

    def __init__(self, actor: Actor, *, index: int, config: RunConfig) -> None:
        self.index = index
        self.actor = actor
        self._limits = config.limits

    async def _call(self, method: str, *args: Any, limit_s: float = _ANSWER_S) -> Any:
        try:
            return await self.actor.call(method, *args, limit_s=limit_s)
        except ActorDied as error:
            raise WorkerDied(str(error)) from error

    async def start(self) -> TokenizerFacts:
        """See `WorkerHandle`."""
        facts: TokenizerFacts = await self._call("start", limit_s=self._limits.start_s)
        return facts

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `WorkerHandle`."""
        await self._call("submit", requests)

    async def collect(self, max_wait_s: float) -> RolloutReport:
        """See `WorkerHandle`."""
        report: RolloutReport = await self._call("collect", max_wait_s, limit_s=_ANSWER_S + max_wait_s)
        return report

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `WorkerHandle`."""
        await self._call("abort", group_ids, limit_s=self._limits.step_s)

    async def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """See `WorkerHandle`."""
        await self._call("join_sync", spec, manifest, limit_s=self._limits.sync_s)

    async def load_weights(self, version: int) -> LoadReport:
        """See `WorkerHandle`."""
        report: LoadReport = await self._call("load_weights", version, limit_s=self._limits.sync_s)
        return report

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """See `WorkerHandle`."""
        result: list[FloatArray] = await self._call("score", sequences, limit_s=self._limits.sync_s)
        return result

    async def close(self) -> None:
        """Ask it to stop, then end its process."""
        try:
            await self._call("close", limit_s=_CLOSE_S)
        except StalledError:
            pass  # it hangs in the engine; the process ends below
        finally:
            self.actor.kill()


class LearnerActors:
    """`LearnerHandle` over one actor per rank. A collective method is called on all ranks; rank 0's answer counts."""

    def __init__(self, actors: Sequence[Actor], *, config: RunConfig, address: str) -> None:
        self.world_size = len(actors)
        self.actors = list(actors)
        self._limits = config.limits
        self._address = address

    async def _each(
        self, method: str, argss: Sequence[tuple[Any, ...]], *, limit_s: float, lane: str = "main"
    ) -> list[Any]:
        """One call per rank. The first failure wins at once: its peers may hang in a collective for ever."""
        tasks = [
            asyncio.create_task(actor.call(method, *args, limit_s=limit_s, lane=lane))
            for actor, args in zip(self.actors, argss, strict=True)
        ]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [e for t in done if (e := t.exception()) is not None]
        if failed and pending:
            # The rank that died is the cause, its peers' broken collectives are not: give it a moment to be noticed.
            more, pending = await asyncio.wait(pending, timeout=2.0)
            failed += [e for t in more if (e := t.exception()) is not None]
        for task in pending:
            task.cancel()
        if failed:
            error = next((e for e in failed if isinstance(e, ActorDied)), failed[0])
            if isinstance(error, ActorDied):
                raise LearnerDied(str(error)) from error
            raise error
        return [t.result() for t in tasks]

    async def _all(self, method: str, *args: Any, limit_s: float, lane: str = "main") -> list[Any]:
        return await self._each(method, [args] * self.world_size, limit_s=limit_s, lane=lane)

    async def start(self) -> TokenizerFacts:
        """See `LearnerHandle`."""
        facts: TokenizerFacts = (await self._all("start", limit_s=self._limits.start_s))[0]
        return facts

    async def layout(self) -> RowLayout:
        """See `LearnerHandle`."""
        layout: RowLayout = (await self._all("layout", limit_s=_ANSWER_S))[0]
        return layout

    async def manifest(self) -> list[TensorSpec]:
        """See `LearnerHandle`."""
        specs: list[TensorSpec] = (await self._all("manifest", limit_s=_ANSWER_S))[0]
        return specs

    async def sync_endpoint(self) -> tuple[str, int]:
        """See `LearnerHandle`."""
        return self._address, await self.actors[0].free_port(limit_s=_ANSWER_S)

    async def join_sync(self, spec: SyncGroupSpec) -> None:
        """See `LearnerHandle`."""
        await self._all("join_sync", spec, limit_s=self._limits.sync_s)

    async def publish(self, version: int) -> PublishReport:
        """See `LearnerHandle`."""
        report: PublishReport = (await self._all("publish", version, limit_s=self._limits.sync_s))[0]
        return report

    async def train(self, batches: Sequence[RankBatch]) -> StepResult:
        """See `LearnerHandle`."""
        result: StepResult = (await self._each("train", [(b,) for b in batches], limit_s=self._limits.step_s))[0]
        return result

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        images: Sequence[Sequence[ImageArray]] | None = None,
        as_sampled: bool = False,
    ) -> list[FloatArray]:
        """See `LearnerHandle`."""
        arguments = (sequences, temperature, images, as_sampled)
        result: list[FloatArray] = (await self._all("score", *arguments, limit_s=self._limits.sync_s))[0]
        return result

    async def save(self, path: Path) -> None:
        """See `LearnerHandle`."""
        await self._all("save", path, limit_s=self._limits.save_s)

    async def save_done(self) -> None:
        """See `LearnerHandle`."""
        # A lane of its own: the main one goes on training while the file system works.
        await self._all("save_done", limit_s=self._limits.save_s, lane="save")

    async def load(self, path: Path) -> int:
        """See `LearnerHandle`."""
        return int((await self._all("load", path, limit_s=self._limits.save_s))[0])

    async def memory(self) -> Mapping[int, float]:
        """See `LearnerHandle`."""
        values = await self._all("memory", limit_s=_ANSWER_S, lane="stats")
        return dict(enumerate(values))

    async def close(self) -> None:
        """Ask the ranks to stop, then end their processes."""
        try:
            await self._all("close", limit_s=_CLOSE_S)
        finally:
            for actor in self.actors:
                actor.kill()


class RayPlacement:
    """Builds the processes of a run on a cluster."""

    worker_options: Mapping[str, Any] = {}
    """Further keyword arguments of `RolloutWorker`, for subclasses."""

    def __init__(self, cluster: Cluster, config: RunConfig) -> None:
        self._cluster, self._config = cluster, config
        self._resource = device_spec(config.device).ray_resource

    def check(self) -> None:
        """Raise `ConfigError` when the cluster has too few devices."""
        config = self._config
        if self._resource is not None:
            devices = config.rollout.workers * config.rollout.tensor_parallel + config.learner.ranks
            self._cluster.require({self._resource: devices})

    def _claim(self, devices: int) -> dict[str, float]:
        return {} if self._resource is None else {self._resource: devices}

    async def worker(self, index: int) -> WorkerActor:
        """A rollout worker, not started."""
        config = self._config
        actor = await self._cluster.spawn(
            f"rollout-{index}",
            env=process_env(config.rollout.threads),
            resources=self._claim(config.rollout.tensor_parallel),
            limit_s=config.limits.start_s,
        )
        await actor.build(
            "s2rl.rollout.worker:RolloutWorker",
            limit_s=config.limits.start_s,
            index=index,
            model=config.model,
            config=config.rollout,
            device=config.device,
            seed=config.seed + index,
            start_limit_s=config.limits.start_s,
            **self.worker_options,
        )
        return WorkerActor(actor, index=index, config=config)

    async def learner(self) -> LearnerActors:
        """All learner ranks, not started."""
        config = self._config
        limit_s = config.limits.start_s
        actors = await asyncio.gather(
            *(
                self._cluster.spawn(
                    f"learner-{rank}",
                    env=process_env(config.learner.threads),
                    resources=self._claim(1),
                    limit_s=limit_s,
                )
                for rank in range(config.learner.ranks)
            )
        )
        address = self._cluster.host or await actors[0].address(limit_s=limit_s)
        port = await actors[0].free_port(limit_s=limit_s)
        await asyncio.gather(
            *(
                actor.build(
                    "s2rl.fsdp.learner:Learner",
                    limit_s=limit_s,
                    model=config.model,
                    learner=config.learner,
                    algorithm=config.algorithm,
                    temperature=config.rollout.sampling.temperature,
                    banned_token_ids=banned_token_ids(config),
                    rollout_dtype=config.rollout.dtype,
                    total_steps=config.steps * config.algorithm.updates_per_batch,
                    seed=config.seed,
                    device=config.device,
                    rank=rank,
                    world_size=config.learner.ranks,
                    master_host=address,
                    master_port=port,
                    timeout_s=config.limits.step_s,
                )
                for rank, actor in enumerate(actors)
            )
        )
        return LearnerActors(actors, config=config, address=address)
