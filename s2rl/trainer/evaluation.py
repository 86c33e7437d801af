"""Held-out evaluation on the rollout workers while training goes on.

An evaluation belongs to one version: it starts right after that version is proven on the workers and the next
publication
waits for it, so that every token of it is sampled by that version. Training rollouts go on beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from s2rl.errors import RunError
from s2rl.trainer.pool import RolloutPool
from s2rl.trainer.rollouts import Grader, group_seed
from s2rl.types import Completion, Encoded, FinishReason, GroupRequest, Rollout, SamplingSpec

_PRIORITY = -1
# Before all training groups: the next publication waits for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation."""

    version: int
    accuracy: float
    """Share of completions whose score is above the threshold."""
    score_mean: float
    length_mean: float
    """Completion tokens."""
    truncated: float
    """Share of completions that the token budget ended."""
    num_samples: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/score_mean": self.score_mean,
            "eval/length_mean": self.length_mean,
            "eval/truncated": self.truncated,
            "eval/samples": float(self.num_samples),
            "eval/version": float(self.version),
            "time/eval_s": self.seconds,
        }


class Evaluation:
    """One evaluation at one version; a `Sink` of the pool."""

    def __init__(
        self,
        *,
        pool: RolloutPool,
        grader: Grader,
        prompts: Sequence[Encoded],
        sampling: SamplingSpec,
        num_samples: int,
        correct_above: float,
        seed: int,
        version: int,
    ) -> None:
        self._pool, self._grader, self._prompts = pool, grader, prompts
        self._sampling, self._num_samples = sampling, num_samples
        self._correct_above, self._seed, self.version = correct_above, seed, version
        self._completions: dict[str, list[Completion]] = {self._group_id(i): [] for i in range(len(prompts))}
        self._waiting: list[GroupRequest] = []
        self._remaining = len(prompts) * num_samples
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    def _group_id(self, index: int) -> str:
        return f"eval-{self.version}-{index}"

    async def run(self) -> tuple[EvalResult, list[Rollout]]:
        """Sample, grade, summarise. Raises `RunError` when a prompt cannot be sampled."""
        started = time.monotonic()
        self._waiting = [
            GroupRequest(
                group_id=self._group_id(index),
                encoded=encoded,
                num_completions=self._num_samples,
                sampling=self._sampling,
                seed=group_seed(self._seed, f"eval-{index}"),
                priority=_PRIORITY,
            )
            for index, encoded in enumerate(self._prompts)
        ]
        await self._submit()
        while not self._finished.done():
            await asyncio.wait([self._finished], timeout=0.5)
            self._pool.check()
            await self._submit()
        self._finished.result()
        items = [
            (completion, encoded.prompt)
            for index, encoded in enumerate(self._prompts)
            for completion in sorted(self._completions[self._group_id(index)], key=lambda c: c.index)
        ]
        rollouts = await self._grader.grade_many(items)
        return self._summarise(rollouts, time.monotonic() - started), rollouts

    async def _submit(self) -> None:
        """Give what waits to the workers that run the version, in equal shares."""
        ready = [s for s in self._pool.alive if s.version == self.version]
        if not self._waiting or not ready:
            return
        waiting, self._waiting = self._waiting, []
        shares = [(slot, waiting[i :: len(ready)]) for i, slot in enumerate(ready)]
        await asyncio.gather(*(self._pool.submit(share, slot=slot, sink=self) for slot, share in shares if share))

    def _summarise(self, rollouts: Sequence[Rollout], seconds: float) -> EvalResult:
        stale = {int(v) for r in rollouts for v in np.unique(r.completion.versions)} - {self.version}
        if stale:
            raise RunError(f"evaluation of version {self.version} holds tokens of versions {sorted(stale)}")
        scores = np.array([r.score.total for r in rollouts])
        return EvalResult(
            version=self.version,
            accuracy=float((scores > self._correct_above).mean()),
            score_mean=float(scores.mean()),
            length_mean=float(np.mean([len(r.completion.token_ids) for r in rollouts])),
            truncated=float(np.mean([r.completion.finish_reason is FinishReason.LENGTH for r in rollouts])),
            num_samples=len(rollouts),
            seconds=seconds,
        )

    # ---- Sink ------------------------------------------------------------------------------------------------------

    def completed(self, completion: Completion) -> None:
        """Keep it; the last one ends the wait."""
        self._completions[completion.group_id].append(completion)
        self._remaining -= 1
        if self._remaining == 0 and not self._finished.done():
            self._finished.set_result(None)

    def failed(self, group_id: str, reason: str) -> None:
        """An evaluation over fewer prompts would not be comparable: it ends the run."""
        if not self._finished.done():
            self._finished.set_exception(RunError(f"evaluation prompt {group_id} cannot be sampled: {reason}"))

    def lost(self, request: GroupRequest) -> None:
        """Its worker died: sampled again by another."""
        self._remaining += len(self._completions[request.group_id])
        self._completions[request.group_id] = []
        self._waiting.append(request)


class EvaluationSlot:
    """At most one evaluation under way."""

    def __init__(self) -> None:
        self._task: asyncio.Task[EvalResult] | None = None
        self.version: int | None = None
        """The version under evaluation."""

    def start(self, coroutine: Coroutine[Any, Any, EvalResult], *, version: int) -> None:
        """Begin; the last one must be taken or cancelled."""
        assert self._task is None, "the last evaluation is not settled"
        self._task, self.version = asyncio.create_task(coroutine), version

    @property
    def is_running(self) -> bool:
        """Whether there is one that is not done."""
        return self._task is not None and not self._task.done()

    async def wait(self, limit_s: float) -> None:
        """Return when it is done, or after `limit_s`."""
        assert self._task is not None
        await asyncio.wait([self._task], timeout=limit_s)

    def take(self) -> EvalResult | None:
        """The result of the one that is done, None when there is none. Raises what it raised."""
        task, self._task, self.version = self._task, None, None
        return None if task is None else task.result()

    def cancel(self) -> None:
        """Forget it."""
        if self._task is not None:
            self._task.cancel()
            self._task = self.version = None
