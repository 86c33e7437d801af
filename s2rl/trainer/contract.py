"""The start-up contract: engine and learner must mean the same thing before anything is trained.

Compared: vocabulary size, tokenizer, special ids, and the log-probabilities of completions that every worker
really sampled
with the run's own sampling parameters against the learner's at the same temperature.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from s2rl.errors import ContractError
from s2rl.trainer.parts import LearnerHandle
from s2rl.trainer.pool import RolloutPool
from s2rl.trainer.waiting import within
from s2rl.types import Completion, Encoded, GroupRequest, SamplingSpec, TokenizerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractReport:
    """What the check found."""

    num_tokens: int
    mean_difference: float
    max_difference: float


def check_facts(learner: TokenizerFacts, workers: Sequence[TokenizerFacts]) -> None:
    """Raise `ContractError` naming the first field in which a worker and the learner differ."""
    for index, worker in enumerate(workers):
        for name in (f.name for f in dataclasses.fields(TokenizerFacts)):
            ours, theirs = getattr(learner, name), getattr(worker, name)
            if ours != theirs:
                raise ContractError(
                    f"rollout worker {index} and the learner disagree on {name}: {theirs!r} and {ours!r}. "
                    "Both must load the same model and tokenizer folder (model.path, model.tokenizer)"
                )


@dataclass(slots=True)
class _Samples:
    """Sink that keeps completions until all have come."""

    expected: int
    completions: list[Completion] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def completed(self, completion: Completion) -> None:
        self.completions.append(completion)
        if len(self.completions) == self.expected and not self.done.done():
            self.done.set_result(None)

    def failed(self, group_id: str, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(ContractError(f"the start-up check could not sample {group_id}: {reason}"))

    def lost(self, request: GroupRequest) -> None:
        self.failed(request.group_id, "the rollout worker died")


async def check_logprobs(
    *,
    pool: RolloutPool,
    learner: LearnerHandle,
    prompts: Sequence[Encoded],
    sampling: SamplingSpec,
    num_tokens: int,
    tolerance: float,
    seed: int,
    limit_s: float,
) -> ContractReport:
    """Sample about `num_tokens` tokens on every worker and compare with the learner.

    Raises `ContractError` when the mean |difference| is over `tolerance` or anything is not finite.
    """
    per_prompt = max(1, num_tokens // sampling.max_new_tokens // max(1, len(prompts)))
    differences: list[np.ndarray] = []
    for slot in pool.alive:
        index = slot.handle.index
        sink = _Samples(expected=per_prompt * len(prompts))
        requests = [
            GroupRequest(
                group_id=f"contract-{index}-{i}",
                encoded=encoded,
                num_completions=per_prompt,
                sampling=sampling,
                seed=seed + 1000 * i,
            )
            for i, encoded in enumerate(prompts)
        ]
        await pool.submit(requests, slot=slot, sink=sink)
        await within(sink.done, limit_s=limit_s, who="start-up check", what=f"samples of rollout worker {index}")
        by_group = {r.group_id: r.encoded for r in requests}
        pairs = [(by_group[c.group_id], c) for c in sink.completions if len(c.token_ids)]
        scored = await learner.score(
            [[*encoded.token_ids, *c.token_ids.tolist()] for encoded, c in pairs],
            sampling.temperature,
            [encoded.images for encoded, _ in pairs],
            True,
        )
        differences += [
            np.abs(logprobs[len(encoded.token_ids) - 1 :] - c.logprobs)
            for (encoded, c), logprobs in zip(pairs, scored, strict=True)
        ]
    flat = np.concatenate(differences) if differences else np.zeros(0, dtype=np.float32)
    if flat.size == 0:
        raise ContractError("the start-up check sampled no token: every completion was empty")
    report = ContractReport(num_tokens=flat.size, mean_difference=float(flat.mean()), max_difference=float(flat.max()))
    if not np.isfinite(flat).all() or report.mean_difference > tolerance:
        raise ContractError(
            f"engine and learner disagree on log-probabilities at temperature {sampling.temperature:g}: mean "
            f"|difference| "
            f"{report.mean_difference:.2e} (allowed {tolerance:.2e}), largest {report.max_difference:.2e}, over "
            f"{flat.size} tokens. "
            "Importance ratios would be wrong. Check that rollout.dtype and learner.dtype match and that the "
            "engine supports the model; "
            "contract.tolerance sets the limit"
        )
    return report
