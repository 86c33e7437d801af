"""From finished groups to the micro-batches of every rank.

Pure and free of torch: the controller plans for all ranks at once, so that every rank has the same number of
micro-batches by construction and no rank ever waits in a collective that another does not enter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from s2rl.algo.advantages import group_advantages
from s2rl.types import FinishReason, MicroBatch, RankBatch, RolloutGroup, Sample

MAX_ROW_PADDING = 0.12
"""A row joins a micro-batch of longer rows only while less than this share of it would be padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One optimizer batch over all ranks."""

    rank_batches: tuple[RankBatch, ...]
    num_samples: int
    num_skipped_samples: int
    """Samples without effect on the gradient (advantage exactly zero, no KL term): counted in every
    denominator, not computed."""
    num_tokens: int
    """Prompt and completion tokens that are computed."""
    padding_fraction: float
    """Padding positions over all positions computed."""


def samples_of(group: RolloutGroup, *, advantage: str) -> list[Sample]:
    """Samples of one group with their advantages. Completions without tokens and aborted ones carry no sample."""
    scores = np.array([r.score.total for r in group.rollouts_G], dtype=np.float64)
    advantages_G = group_advantages(scores, kind=advantage)
    prompt = np.array(group.encoded.token_ids, dtype=np.int32)
    return [
        Sample(
            group_id=group.group_id,
            token_ids=np.concatenate([prompt, rollout.completion.token_ids]),
            prompt_len=len(prompt),
            logprobs=rollout.completion.logprobs,
            versions=rollout.completion.versions,
            advantage=float(value),
            model_inputs=group.encoded.model_inputs,
        )
        for rollout, value in zip(group.rollouts_G, advantages_G, strict=True)
        if len(rollout.completion.token_ids) and rollout.completion.finish_reason is not FinishReason.ABORT
    ]


def plan_batch(
    samples: Sequence[Sample], *, version: int, num_ranks: int, max_tokens: int, packed: bool, skip_zero_advantage: bool
) -> BatchPlan:
    """Split samples into micro-batches within `max_tokens` positions each and deal them to the ranks.

    Raises `ValueError` when one sample alone is over `max_tokens` (the configuration check rules it out).
    """
    num_loss_tokens = sum(len(s.logprobs) for s in samples)
    active = [s for s in samples if not (skip_zero_advantage and s.advantage == 0.0)]
    over = [s for s in active if len(s) > max_tokens]
    if over:
        raise ValueError(f"sample of group {over[0].group_id} has {len(over[0])} tokens, over max_tokens={max_tokens}")
    per_rank = _deal(_split(active, max_tokens=max_tokens, packed=packed, at_least=num_ranks), num_ranks)
    padding = [sum(_padding(micro, packed) for micro in rank) for rank in per_rank]
    num_tokens = sum(len(s) for s in active)
    return BatchPlan(
        rank_batches=tuple(
            RankBatch(
                version=version,
                micro_batches=tuple(MicroBatch(samples=tuple(micro)) for micro in rank),
                num_loss_tokens=num_loss_tokens,
                num_samples=len(samples),
                num_padding_tokens=padding[index],
            )
            for index, rank in enumerate(per_rank)
        ),
        num_samples=len(samples),
        num_skipped_samples=len(samples) - len(active),
        num_tokens=num_tokens,
        padding_fraction=sum(padding) / max(1, num_tokens + sum(padding)),
    )


def _split(samples: Sequence[Sample], *, max_tokens: int, packed: bool, at_least: int) -> list[list[Sample]]:
    """Micro-batches from the longest sample down; at least `at_least` of them when there are enough samples."""
    ordered = sorted(samples, key=lambda s: (-len(s), s.group_id))
    # Fewer, fuller micro-batches are cheaper, but every rank should have work: aim at an even share of the budget.
    total = sum(len(s) for s in ordered)
    rounds = max(1, math.ceil(total / (max_tokens * at_least)))
    target = min(max_tokens, max(math.ceil(total / (rounds * at_least)), len(ordered[0]) if ordered else 0))
    micros: list[list[Sample]] = []
    positions = 0
    for sample in ordered:
        longest = len(micros[-1][0]) if micros else 0
        grown = positions + len(sample) if packed else longest * (len(micros[-1]) + 1 if micros else 0)
        too_short = not packed and len(sample) < longest * (1 - MAX_ROW_PADDING)
        if not micros or grown > target or too_short:
            micros.append([sample])
            positions = len(sample)
        else:
            micros[-1].append(sample)
            positions = grown
    return micros


def _deal(micros: list[list[Sample]], num_ranks: int) -> list[list[list[Sample]]]:
    """The same number of micro-batches for every rank, balanced by tokens; empty ones fill up."""
    rounds = max(1, math.ceil(len(micros) / num_ranks))
    # Halve the largest micro-batches rather than leave a rank idle in the last round.
    while len(micros) < rounds * num_ranks and any(len(m) > 1 for m in micros):
        largest = max((m for m in micros if len(m) > 1), key=lambda m: sum(len(s) for s in m))
        micros.remove(largest)
        micros += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    micros = sorted(micros, key=lambda m: -sum(len(s) for s in m))
    micros += [[] for _ in range(rounds * num_ranks - len(micros))]
    per_rank: list[list[list[Sample]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for micro in micros:
        rank = min((r for r in range(num_ranks) if len(per_rank[r]) < rounds), key=lambda r: load[r])
        per_rank[rank].append(micro)
        load[rank] += sum(len(s) for s in micro)
    return per_rank


def _padding(micro: Sequence[Sample], packed: bool) -> int:
    if packed or not micro:
        return 0
    return len(micro) * max(len(s) for s in micro) - sum(len(s) for s in micro)
