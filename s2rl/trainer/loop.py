"""The training loop: one loop for on-policy and asynchronous runs, driving parts that it knows only as protocols.

    feed        (rollouts.py)  prompts -> groups in flight         waits for room in the queue and a worker
    collect x N (pool.py)      completions -> graded -> queue      waits for a worker's report
    step        (here)         batch -> train -> publish -> log    waits for the queue, then for learner and workers
    tick        (here)         heartbeat of the learner, overdue groups, stalls

Only `step` ends by itself; its end closes the others. A failure in any of them ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from s2rl.config.schema import RunConfig
from s2rl.errors import RunError
from s2rl.trainer.batching import BatchPlan, plan_batch, samples_of
from s2rl.trainer.checkpointing import Checkpointer
from s2rl.trainer.depth import DepthTuner
from s2rl.trainer.evaluation import EvalResult, Evaluation, EvaluationSlot
from s2rl.trainer.parts import LearnerHandle
from s2rl.trainer.pool import RolloutPool
from s2rl.trainer.queue import SampleQueue
from s2rl.trainer.rollouts import Grader, TrainingRollouts
from s2rl.trainer.sampling import eval_sampling
from s2rl.trainer.syncing import SyncOutcome, WeightSync
from s2rl.trainer.waiting import Progress
from s2rl.types import Encoded, Prompt, RolloutGroup, RowLayout, Sample, StepResult

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_HEARTBEAT_TICKS = 5


class StepLog(Protocol):
    """Where the loop writes what happened."""

    def step(self, metrics: Mapping[str, float | int | bool | None]) -> None:
        """One row of metrics.jsonl."""
        ...

    def group(self, group: RolloutGroup, *, fate: str, step: int) -> None:
        """One finished group and what became of it."""
        ...

    def dropped(self, prompt: Prompt, *, reason: str, step: int) -> None:
        """One prompt that never became a group."""
        ...

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """Queue depths and the like, for the live view between steps."""
        ...


@dataclass(slots=True, kw_only=True)
class LoopState:
    """What the loop counts; stored in checkpoints."""

    step: int = 0
    """Batches trained."""
    skipped_steps: int = 0
    trained_tokens: int = 0
    rollout_tokens: int = 0
    last_accuracy: float | None = None
    best_accuracy: float | None = None
    last_row: dict[str, float | int | bool | None] = field(default_factory=dict)


class TrainingLoop:
    """See the module docstring. `stop` may be set at any time; the loop then ends at the next step boundary."""

    def __init__(
        self,
        *,
        config: RunConfig,
        queue: SampleQueue,
        pool: RolloutPool,
        learner: LearnerHandle,
        sync: WeightSync,
        grader: Grader,
        eval_prompts: Sequence[Encoded],
        checkpointer: Checkpointer,
        log: StepLog,
        progress: Progress,
        state: LoopState,
        layout: RowLayout,
    ) -> None:
        self._config, self._queue, self._pool, self._learner = config, queue, pool, learner
        self._sync, self._grader, self._eval_prompts = sync, grader, eval_prompts
        self._checkpointer, self._log, self._progress = checkpointer, log, progress
        self.state = state
        self._layout = layout
        self._tuner = DepthTuner(groups_per_step=queue.groups_per_step, max_depth=queue.max_depth, depth=queue.depth)
        self._rollouts: TrainingRollouts | None = None
        self._evaluation = EvaluationSlot()
        self._owes_evaluation = False
        self._held_row: dict[str, float | int | bool | None] | None = None
        self._changed = asyncio.Event()
        self._tick_failure: BaseException | None = None
        self.stop = asyncio.Event()
        self._totals_before = pool.totals
        self._wait_started = time.monotonic()
        pool.on_change = self._on_change

    # ---- wiring ----------------------------------------------------------------------------------------------------

    def attach(self, rollouts: TrainingRollouts) -> None:
        """The training rollouts, built with this loop's callbacks."""
        self._rollouts = rollouts

    @property
    def rollouts(self) -> TrainingRollouts:
        """The attached training rollouts."""
        assert self._rollouts is not None
        return self._rollouts

    def needed(self) -> int:
        """Prompts that the rest of the run can still use beyond those outstanding."""
        counts = self._queue.counts
        outstanding = counts.waiting + counts.in_flight + counts.finished
        return (self._config.steps - self.state.step) * self._queue.groups_per_step - outstanding

    def on_finished(self) -> None:
        """A group entered the queue."""
        self._on_change()

    def on_dropped(self, group_id: str, prompt: Prompt, reason: str) -> None:
        """A prompt was dropped."""
        self._log.dropped(prompt, reason=reason, step=self.state.step + 1)
        self._on_change()

    def _on_change(self) -> None:
        self._changed.set()
        if self._rollouts is not None:
            self._rollouts.wake.set()

    # ---- the run ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the configured steps are done, the accuracy is reached, or `stop` is set."""
        self._totals_before = self._pool.totals  # what the workers did before belongs to no step
        background = [
            asyncio.create_task(self._guard(self.rollouts.feed)),
            asyncio.create_task(self._guard(self._tick)),
        ]
        try:
            if self.state.step == 0 and self._eval_due(0) and self._config.eval.at_start:
                self._held_row = {"step": 0, "version": self._queue.version}
                self._start_evaluation()
            self.rollouts.wake.set()
            while self.state.step < self._config.steps and not self._reached():
                groups = await self._next_batch()
                if groups is None:
                    break
                await self._step(groups)
            await self._settle_evaluation()
            await self._checkpointer.finish(self)
        finally:
            self._evaluation.cancel()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.rollouts.close()

    async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except Exception as error:  # noqa: BLE001 - a background loop's failure must reach the step loop
            self._tick_failure = error
            self._on_change()

    def _check(self) -> None:
        self._pool.check()
        if self._tick_failure is not None:
            raise self._tick_failure

    def _reached(self) -> bool:
        goal, best = self._config.stop_at_accuracy, self.state.last_accuracy
        return goal is not None and best is not None and best >= goal

    async def _next_batch(self) -> list[RolloutGroup] | None:
        """Waits for the queue. None when the run is told to stop."""
        self._wait_started = time.monotonic()
        while True:
            self._check()
            if self.stop.is_set():
                return None
            if self._pool.has_newcomer:
                await self._sync.publish(self._queue.version)
                self.rollouts.wake.set()
            groups = self._queue.hand_out()
            if groups is not None:
                return groups
            self._progress.check(
                f"the learner, for a batch of {self._queue.groups_per_step} groups; the queue holds "
                f"{self._queue.counts}; "
                f"in flight with the earliest deadlines: {self._queue.blocking()[:4]}"
            )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()

    async def _step(self, groups: list[RolloutGroup]) -> None:
        started = time.monotonic()
        idle_s = started - self._wait_started
        spare = self._queue.counts.finished - len(groups)
        version = self._queue.version
        samples, plan = self._plan(groups, version)
        staleness = self._staleness(groups, version)
        result = await self._learner.train(plan.rank_batches)
        if result.version != version + self._queue.updates_per_batch:
            raise RunError(f"the learner says version {result.version} after a batch at version {version}")
        self._queue.step_done()
        self.state.step += 1
        self.state.skipped_steps += result.num_skipped_steps
        self.state.trained_tokens += sum(len(s) for s in samples)
        self._progress.moved("step")
        trained_at = time.monotonic()
        # The rollout of the next groups goes on; only the next publication waits for an evaluation still under way.
        await self._settle_evaluation()
        outcome = await self._publish_if_due(result.version)
        row = self._row(groups, samples, plan, result, staleness, outcome)
        row |= {"time/learner_idle_s": idle_s, "time/train_s": trained_at - started}
        step_s = time.monotonic() - self._wait_started
        row["time/step_s"] = step_s
        for group in groups:
            self._log.group(group, fate="trained", step=self.state.step)
        if self._config.staleness.depth == "auto":
            self._queue.depth = self._tuner.observe(idle_s=idle_s, step_s=step_s, spare_groups=spare)
        self._held_row = row
        if outcome is not None and self._eval_due(self.state.step):
            self._start_evaluation()
        else:
            self._write_row()
        await self._checkpointer.after_step(self)
        self._on_change()

    def _plan(self, groups: Sequence[RolloutGroup], version: int) -> tuple[list[Sample], BatchPlan]:
        config = self._config
        samples = [s for g in groups for s in samples_of(g, advantage=config.algorithm.advantage)]
        plan = plan_batch(
            samples,
            version=version,
            num_ranks=self._learner.world_size,
            max_tokens=config.learner.max_tokens_per_micro_batch,
            layout=self._layout,
            skip_zero_advantage=config.algorithm.kl.coefficient == 0.0,
        )
        return samples, plan

    def _staleness(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """Staleness of every token in the batch's last optimizer step; over the bound ends the run."""
        last = version + self._queue.updates_per_batch - 1
        versions = [r.completion.versions for g in groups for r in g.rollouts_G if len(r.completion.versions)]
        if not versions:
            return {"staleness/max": 0, "staleness/mean": 0.0}
        ages = last - np.concatenate(versions)
        worst = int(ages.max())
        if worst > self._queue.max_staleness or ages.min() < 0:
            raise RunError(
                f"a token of staleness {worst if worst > self._queue.max_staleness else int(ages.min())} "
                f"reached the learner at "
                f"version {version}; staleness.max_staleness is {self._queue.max_staleness}. This is a defect: "
                f"nothing was trained on it"
            )
        return {"staleness/max": worst, "staleness/mean": float(ages.mean())}

    async def _publish_if_due(self, version: int) -> SyncOutcome | None:
        step, config = self.state.step, self._config
        if (
            step % config.sync.every
            and not self._eval_due(step)
            and step != config.steps
            and not self._pool.has_newcomer
        ):
            return None
        outcome = await self._sync.publish(version)
        self.rollouts.wake.set()
        return outcome

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def _eval_due(self, step: int) -> bool:
        config = self._config.eval
        due = step % config.every == 0 or step == self._config.steps or self._owes_evaluation
        return bool(self._eval_prompts) and due

    def _start_evaluation(self) -> None:
        self._owes_evaluation = False
        self._evaluation.start(self._evaluate(self._queue.version), version=self._queue.version)

    async def _evaluate(self, version: int) -> EvalResult:
        config = self._config.eval
        result, _ = await Evaluation(
            pool=self._pool,
            grader=self._grader,
            prompts=self._eval_prompts,
            sampling=eval_sampling(self._config),
            num_samples=config.sampling.samples,
            correct_above=config.correct_above,
            seed=self._config.seed,
            version=version,
        ).run()
        self._progress.moved("evaluation")
        return result

    async def _settle_evaluation(self) -> None:
        """Wait for the evaluation under way and write the row that it belongs to."""
        while self._evaluation.is_running:
            self._check()
            version = self._evaluation.version
            if self._pool.has_newcomer and version == self._queue.version:
                await self._sync.publish(version)
            elif version != self._queue.version and not any(s.version == version for s in self._pool.alive):
                # Its last worker died, and the learner has no weights of that version to give to the next.
                logger.warning("the evaluation of version %s lost its workers; the next version is evaluated", version)
                self._evaluation.cancel()
                self._owes_evaluation = True
                break
            self._progress.check(f"the learner, for the evaluation of version {version}")
            await self._evaluation.wait(_TICK_S)
        result = self._evaluation.take()
        if result is not None:
            assert self._held_row is not None
            self._held_row |= result.metrics()
            self.state.last_accuracy = result.accuracy
            self.state.best_accuracy = max(result.accuracy, self.state.best_accuracy or 0.0)
        if self._held_row is not None:
            self._write_row()

    def _write_row(self) -> None:
        assert self._held_row is not None
        row, self._held_row = self._held_row, None
        self.state.last_row = row
        self._log.step(row)
        self._checkpointer.row_written(int(row["step"] or 0))

    # ---- metrics ---------------------------------------------------------------------------------------------------

    def _row(
        self,
        groups: Sequence[RolloutGroup],
        samples: Sequence[Sample],
        plan: BatchPlan,
        result: StepResult,
        staleness: Mapping[str, float],
        outcome: SyncOutcome | None,
    ) -> dict[str, float | int | bool | None]:
        counts = self._queue.counts
        counts.check()
        scores = np.array([[r.score.total for r in g.rollouts_G] for g in groups])
        lengths = [len(r.completion.token_ids) for g in groups for r in g.rollouts_G]
        totals, before = self._pool.totals, self._totals_before
        self._totals_before = totals
        now = time.monotonic()
        interval = max(1e-9, now - self._wait_started)
        new_tokens = totals.completion_tokens - before.completion_tokens
        self.state.rollout_tokens += new_tokens
        row: dict[str, float | int | bool | None] = {
            "step": self.state.step,
            "version": result.version,
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/mixed_groups": float((scores.std(axis=1) > 0).mean()),
            "rollout/length_mean": float(np.mean(lengths)),
            "rollout/length_max": int(max(lengths)),
            "rollout/truncated": float(
                np.mean([r.completion.finish_reason == "length" for g in groups for r in g.rollouts_G])
            ),
            "queue/drawn": counts.drawn,
            "queue/waiting": counts.waiting,
            "queue/in_flight": counts.in_flight,
            "queue/finished": counts.finished,
            "queue/trained": counts.trained,
            "queue/dropped": counts.dropped,
            "queue/depth": self._queue.depth,
            "batch/padding_fraction": plan.padding_fraction,
            "batch/micro_batches": len(plan.rank_batches[0].micro_batches),
            "batch/samples": plan.num_samples,
            "batch/skipped_samples": plan.num_skipped_samples,
            "batch/tokens": plan.num_tokens,
            "throughput/train_tokens_per_s": sum(len(s) for s in samples) / interval,
            "throughput/rollout_tokens_per_s": new_tokens / interval,
            "time/rollout_idle_s": (totals.idle_s - before.idle_s) / max(1, len(self._pool.slots)),
            "time/rollout_busy_s": (totals.busy_s - before.busy_s) / max(1, len(self._pool.slots)),
            "memory/rollout_rss_mb": max(
                (s.stats.rss_mb for s in self._pool.slots if s.stats is not None), default=0.0
            ),
            **staleness,
            **result.metrics,
        }
        graded = [r.status.value for g in groups for r in g.rollouts_G]
        row["reward/grader_timeouts"] = graded.count("grader_timeout")
        row["reward/grader_errors"] = graded.count("grader_error")
        for name in {p for g in groups for r in g.rollouts_G for p in r.score.parts}:
            values = [r.score.parts[name] for g in groups for r in g.rollouts_G if name in r.score.parts]
            row[f"reward/part/{name}"] = float(np.mean(values))
        if outcome is not None:
            row |= {
                "sync/seconds": outcome.seconds,
                "sync/bytes": outcome.num_bytes,
                "sync/stalled_s": outcome.stalled_s,
                "sync/probe_difference": outcome.probe_difference,
                "sync/verified": True,
            }
        return row

    # ---- background ------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(_TICK_S)
            ticks += 1
            await self._pool.expire(self._config.limits.group_s)
            if ticks % _HEARTBEAT_TICKS == 0:
                await self._learner.memory()
            counts = self._queue.counts
            self._log.status(
                {
                    "queue/waiting": counts.waiting,
                    "queue/in_flight": counts.in_flight,
                    "queue/finished": counts.finished,
                    "queue/trained": counts.trained,
                    "queue/dropped": counts.dropped,
                }
            )
