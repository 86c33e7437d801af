"""`Trainer(config).fit()`: builds the parts of a run, lets the loop drive them, and takes everything down again."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from s2rl.ckpt import CheckpointStore, verify
from s2rl.cluster import Cluster
from s2rl.config import RunConfig, check_files, check_machine, digest
from s2rl.data.encode import Dropped, Encoder, check_prompts
from s2rl.data.rows import PromptRows, load_rows
from s2rl.data.stream import PromptStream
from s2rl.data.tokenizer import check_vocabulary, load_tokenizer
from s2rl.device import device_spec
from s2rl.errors import DataError, Interrupted, LearnerDied, S2rlError, StalledError, UserError
from s2rl.fsdp.model import check_model
from s2rl.logs import RunLog
from s2rl.logs.run_folder import RunFolder
from s2rl.rewards.plan import RewardPlan
from s2rl.rewards.pool import GradingPool, check_functions
from s2rl.trainer.checkpointing import Checkpointer, restore_state
from s2rl.trainer.contract import check_facts, check_logprobs
from s2rl.trainer.loop import LoopState, TrainingLoop
from s2rl.trainer.parts import LearnerHandle, WorkerHandle
from s2rl.trainer.placement import RayPlacement
from s2rl.trainer.pool import RolloutPool, close_quietly
from s2rl.trainer.queue import SampleQueue
from s2rl.trainer.rollouts import TrainingRollouts
from s2rl.trainer.sampling import train_sampling
from s2rl.trainer.syncing import WeightSync
from s2rl.trainer.waiting import Progress, within
from s2rl.types import Encoded, TokenizerFacts

logger = logging.getLogger(__name__)

_CONTRACT_PROMPTS = 4
_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    run_dir: Path
    step: int
    """Batches trained."""
    version: int
    """Optimizer steps done."""
    metrics: Mapping[str, float | int | bool | None]
    """The last row of metrics.jsonl."""
    accuracy: float | None
    """The last held-out accuracy."""
    best_accuracy: float | None
    checkpoint: Path | None
    """The last complete checkpoint."""


class Placement(Protocol):
    """Builds the processes of a run."""

    def check(self) -> None:
        """Raise `ConfigError` when there are too few devices."""
        ...

    async def worker(self, index: int) -> WorkerHandle:
        """A rollout worker, not started."""
        ...

    async def learner(self) -> LearnerHandle:
        """The learner, not started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What is read and checked before any model is loaded."""

    stream: PromptStream
    encoder: Encoder
    eval_prompts: tuple[Encoded, ...]
    first_prompts: tuple[Encoded, ...]
    """For the start-up check and the probe."""


class Trainer:
    """One run. `placement` builds the processes; Ray actors when not given."""

    def __init__(
        self, config: RunConfig, *, placement: Callable[[Cluster, RunConfig], Placement] = RayPlacement
    ) -> None:
        self.config = config
        self._placement = placement

    def fit(self) -> TrainResult:
        """Train, or go on from the run folder's last complete checkpoint.

        Raises `UserError` for what the user can mend, `RunError` when going on would risk wrong results, and
        `Interrupted`
        after SIGINT or SIGTERM, when the checkpoint of the last step is complete.
        """
        config = self.config
        check_files(config)
        check_machine(config)
        RunFolder(config.run_dir).check(config)
        inputs = read_inputs(config)
        check_functions(config.rewards)
        log = RunLog(config)
        outcome: Literal["done", "interrupted", "failed", "refused"] = "failed"
        store = CheckpointStore(log.folder.checkpoints, keep=config.checkpoint.keep, config_digest=digest(config))
        cluster = Cluster(config.cluster, name=config.name, log_dir=_made(log.folder.path / "logs"))
        try:
            if (latest := store.latest()) is not None:
                verify(latest)
            log.status({"phase": "starting processes"})
            cluster.start()
            placement = self._placement(cluster, config)
            placement.check()
            run = _Run(config=config, inputs=inputs, log=log, store=store, placement=placement)
            result = asyncio.run(run.main())
            outcome = "done"
            return result
        except Interrupted:
            outcome = "interrupted"
            raise
        except S2rlError as error:
            # For run.log alone: whoever called tells it to the person.
            logger.info("the run ends with %s: %s", type(error).__name__, error)
            outcome = "refused" if isinstance(error, UserError) else "failed"
            raise
        finally:
            cluster.stop()
            latest = store.latest() if outcome in ("done", "interrupted") else None
            log.close(outcome, checkpoint=None if latest is None else latest.path)


def read_inputs(config: RunConfig) -> _Inputs:
    """Read data and tokenizer and check that every prompt can be encoded and graded, and that the model folder holds a
    model that can be trained. Loads no weights."""
    rows = load_rows(config.data.train, columns=config.data.columns)
    plan = RewardPlan(config.rewards.functions)
    plan.check(rows.data_sources)
    tokenizer = load_tokenizer(config.model)
    encoder = Encoder(tokenizer, config.data)
    check_prompts(rows, encoder)
    vocab_size = check_model(config.model, config.learner, device=config.device)
    check_vocabulary(tokenizer, config.model, vocab_size=vocab_size)
    return _Inputs(
        stream=PromptStream(rows, seed=config.seed, shuffle=config.data.shuffle),
        encoder=encoder,
        eval_prompts=_encode_held_out(config, encoder, plan) if config.eval.data else (),
        first_prompts=tuple(_first(rows, encoder, _CONTRACT_PROMPTS)),
    )


def read_eval_prompts(config: RunConfig) -> tuple[Encoded, ...]:
    """The held-out prompts alone, read and checked as `read_inputs` does."""
    return _encode_held_out(
        config, Encoder(load_tokenizer(config.model), config.data), RewardPlan(config.rewards.functions)
    )


def _encode_held_out(config: RunConfig, encoder: Encoder, plan: RewardPlan) -> tuple[Encoded, ...]:
    rows = load_rows(config.eval.data, columns=config.data.columns)
    plan.check(rows.data_sources)
    encoded = [encoder.encode(p, where=rows.where(p.row)) for p in rows.prompts(prefix="eval-")]
    kept = tuple(e for e in encoded if not isinstance(e, Dropped))
    if not kept:
        raise DataError(
            f"eval.data: every prompt is over data.max_prompt_tokens={config.data.max_prompt_tokens}; raise the budget"
        )
    if len(kept) < len(encoded):
        logger.warning("%d of %d held-out prompts are over budget and left out", len(encoded) - len(kept), len(encoded))
    return kept


def _first(rows: PromptRows, encoder: Encoder, count: int) -> list[Encoded]:
    found: list[Encoded] = []
    for prompt in rows.prompts():
        encoded = encoder.encode(prompt)
        if not isinstance(encoded, Dropped):
            found.append(encoded)
        if len(found) == count:
            break
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Run:
    """The asynchronous part of one `fit`: everything that lives in the event loop."""

    def __init__(
        self, *, config: RunConfig, inputs: _Inputs, log: RunLog, store: CheckpointStore, placement: Placement
    ) -> None:
        self._config, self._inputs, self._log, self._store, self._placement = config, inputs, log, store, placement
        self._progress = Progress(limit_s=config.limits.progress_s)
        self._interrupted: int | None = None

    async def main(self) -> TrainResult:
        """Start the processes, run the loop, stop the processes."""
        config = self._config
        grader = self._grading()
        started: list[WorkerHandle] = []
        learner: LearnerHandle | None = None
        pool: RolloutPool | None = None
        stop = asyncio.Event()
        self._catch_signals(stop)
        try:
            await grader.start()
            learner = await self._placement.learner()
            started += await asyncio.gather(*(self._placement.worker(i) for i in range(config.rollout.workers)))
            self._log.status({"phase": "loading models"})
            facts = await self._or_stop(stop, _start_all(learner, started))
            check_facts(facts[0], facts[1:])
            pool = RolloutPool(
                started,
                replace=self._replacement,
                max_restarts=config.limits.worker_restarts,
                progress=self._progress,
            )
            pool.start()
            return await self._train(learner=learner, pool=pool, grader=grader, stop=stop)
        finally:
            await self._close(grader=grader, pool=pool, started=started, learner=learner)

    def _grading(self) -> GradingPool:
        return GradingPool(self._config.rewards, log_path=self._log.folder.path / "logs" / "rewards.log")

    async def _replacement(self, index: int) -> WorkerHandle:
        worker = await self._placement.worker(index)
        try:
            await worker.start()
        except BaseException:
            await close_quietly([worker])
            raise
        return worker

    async def _train(
        self, *, learner: LearnerHandle, pool: RolloutPool, grader: GradingPool, stop: asyncio.Event
    ) -> TrainResult:
        config = self._config
        queue = SampleQueue(
            groups_per_step=config.algorithm.groups_per_step,
            max_staleness=config.staleness.max_staleness,
            updates_per_batch=config.algorithm.updates_per_batch,
        )
        if config.staleness.depth != "auto":
            queue.depth = config.staleness.depth
        checkpointer = Checkpointer(
            store=self._store,
            learner=learner,
            queue=queue,
            stream_state=self._inputs.stream.state,
            rollouts_position=lambda: self._log.rollouts_position,
            every=config.checkpoint.every,
            limit_s=config.limits.save_s,
        )
        state = await self._resume(learner=learner, queue=queue, checkpointer=checkpointer)
        sync = weight_sync(
            config, learner=learner, pool=pool, prompts=self._inputs.first_prompts, progress=self._progress
        )
        loop = TrainingLoop(
            config=config,
            queue=queue,
            pool=pool,
            learner=learner,
            sync=sync,
            grader=grader,
            eval_prompts=self._inputs.eval_prompts,
            checkpointer=checkpointer,
            log=self._log,
            progress=self._progress,
            state=state,
            layout=await self._or_stop(stop, learner.layout()),
        )
        loop.attach(
            TrainingRollouts(
                queue=queue,
                pool=pool,
                source=self._inputs.stream,
                encoder=self._inputs.encoder,
                grader=grader,
                sampling=train_sampling(config),
                group_size=config.algorithm.group_size,
                max_num_seqs=config.rollout.max_num_seqs,
                seed=config.seed,
                needed=loop.needed,
                on_finished=loop.on_finished,
                on_dropped=loop.on_dropped,
                progress=self._progress,
            )
        )
        self._log.status({"phase": "first weight sync"})
        # Also after a resume: the workers hold the weights of the model folder until the learner's have arrived.
        await self._or_stop(stop, self._first_sync(sync, learner=learner, pool=pool, version=queue.version))
        loop.stop = stop
        await self._drive(loop, checkpointer)
        return self._result(loop, version=queue.version)

    async def _drive(self, loop: TrainingLoop, checkpointer: Checkpointer) -> None:
        """Run the loop to its end; what ends it early leaves a checkpoint where one can be made."""
        try:
            await loop.run()
        except StalledError:
            await self._save_what_can_be(checkpointer, loop)
            raise
        except LearnerDied as error:
            raise LearnerDied(
                f"{error}. The last complete checkpoint is {self._store_text()}; run the same command again to "
                f"go on from it"
            ) from error
        finally:
            await checkpointer.cancel()
        if self._interrupted is not None:
            raise Interrupted(f"interrupted after step {loop.state.step}; run the same command again to go on")

    def _result(self, loop: TrainingLoop, *, version: int) -> TrainResult:
        latest = self._store.latest()
        return TrainResult(
            run_dir=self._config.run_dir,
            step=loop.state.step,
            version=version,
            metrics=loop.state.last_row,
            accuracy=loop.state.last_accuracy,
            best_accuracy=loop.state.best_accuracy,
            checkpoint=None if latest is None else latest.path,
        )

    async def _first_sync(self, sync: WeightSync, *, learner: LearnerHandle, pool: RolloutPool, version: int) -> None:
        config = self._config
        await sync.connect()
        outcome = await sync.publish(version)
        self._log.event(
            f"weights of version {version} proven on {config.rollout.workers} workers: {outcome.num_tensors} tensors, "
            f"{outcome.num_bytes / 2**20:.0f} MiB in {outcome.seconds:.2f} s"
        )
        report = await check_logprobs(
            pool=pool,
            learner=learner,
            prompts=self._inputs.first_prompts,
            sampling=train_sampling(config),
            num_tokens=config.contract.tokens,
            tolerance=config.contract.tolerance or (1e-4 if _fp32(config) else 5e-2),
            seed=config.seed,
            limit_s=config.limits.sync_s,
        )
        self._log.event(
            f"engine and learner agree on log-probabilities: mean |difference| {report.mean_difference:.1e}, largest "
            f"{report.max_difference:.1e} over {report.num_tokens} tokens"
        )

    async def _resume(self, *, learner: LearnerHandle, queue: SampleQueue, checkpointer: Checkpointer) -> LoopState:
        """State of the last complete checkpoint, restored everywhere; a fresh one when there is none."""
        self._store.clean_partial()
        latest = self._store.latest()
        if latest is None:
            self._log.restore(-1)
            return LoopState()
        state, outstanding = self._store.load_trainer_state(latest)
        saved = restore_state(state, outstanding)
        self._inputs.stream.restore(saved.stream)
        queue.restore(saved.queue)
        version = await learner.load(latest.learner_dir)
        if version != queue.version:
            raise StalledError(
                f"{latest.path}: the learner's files are of version {version}, the queue's of {queue.version}"
            )
        accuracies = self._log.restore(saved.step, rollouts=saved.rollouts_position)
        checkpointer.resumed(saved.step)
        self._log.event(f"resumed from {latest.path} at step {saved.step}")
        reached = LoopState(**saved.counters)
        if accuracies:  # the evaluation of the checkpoint's own step was still under way when it was taken
            reached.last_accuracy, reached.best_accuracy = accuracies[-1], max(accuracies)
        return reached

    async def _save_what_can_be(self, checkpointer: Checkpointer, loop: TrainingLoop) -> None:
        try:
            await checkpointer.finish(loop)
        except Exception as error:  # noqa: BLE001 - the stall is the error to report, not what it broke
            logger.warning("no checkpoint could be made of the stalled run: %s", error)

    def _store_text(self) -> str:
        latest = self._store.latest()
        return "none" if latest is None else str(latest.path)

    def _catch_signals(self, stop: asyncio.Event) -> None:
        def on_signal(number: int) -> None:
            if self._interrupted is not None:
                # A second one means now: leave at once; the reaper ends the processes.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            self._interrupted = number
            self._log.event("stopping at the next step boundary; once more to stop at once")
            stop.set()

        running = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                running.add_signal_handler(number, on_signal, number)
            except (RuntimeError, ValueError):  # fit() was called in a thread other than the main one
                return

    async def _or_stop(self, stop: asyncio.Event, work: Awaitable[Any]) -> Any:
        """Await, but give up when the run is told to stop: there is nothing to save yet."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise Interrupted("interrupted before the first step")
            return task.result()
        finally:
            stopped.cancel()

    async def _close(
        self,
        *,
        grader: GradingPool,
        pool: RolloutPool | None,
        started: Sequence[WorkerHandle],
        learner: LearnerHandle | None,
    ) -> None:
        """Take everything down; nothing here may hide the error that ended the run."""
        steps: list[Awaitable[None]] = [grader.close()]
        steps.append(pool.close() if pool is not None else close_quietly(started))
        if learner is not None:
            steps.append(learner.close())
        for result in await asyncio.gather(
            *(within(s, limit_s=_CLOSE_S, who="trainer", what="a part to close") for s in steps), return_exceptions=True
        ):
            if isinstance(result, Exception):
                logger.info("closing: %s", result)


async def _start_all(learner: LearnerHandle, workers: Sequence[WorkerHandle]) -> list[TokenizerFacts]:
    return list(await asyncio.gather(learner.start(), *(w.start() for w in workers)))


def weight_sync(
    config: RunConfig, *, learner: LearnerHandle, pool: RolloutPool, prompts: Sequence[Encoded], progress: Progress
) -> WeightSync:
    """The weight sync of a run, with a probe made of `prompts`."""
    return WeightSync(
        learner=learner,
        pool=pool,
        config=config.sync,
        backend=device_spec(config.device).collective,
        limit_s=config.limits.sync_s,
        probe=probe_sequence(prompts, config.sync.probe_tokens),
        tolerance=config.sync.probe_tolerance or (1e-3 if _fp32(config) else 5e-2),
        tensor_parallel=config.rollout.tensor_parallel,
        progress=progress,
    )


def probe_sequence(prompts: Sequence[Encoded], num_tokens: int) -> list[int]:
    """Token ids of the first prompts, one after the other, cut to `num_tokens`: text that the model finds natural."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        for prompt in prompts:
            tokens += prompt.token_ids
    return tokens[:num_tokens]


def _fp32(config: RunConfig) -> bool:
    return config.rollout.dtype == "float32" and config.learner.dtype == "float32"
