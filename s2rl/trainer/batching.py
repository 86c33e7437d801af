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
from s2rl.types import FinishReason, MicroBatch, RankBatch, RolloutGroup, RowLayout, Sample

Row = tuple[Sample, ...]
"""Samples of one prompt, which is computed once for all of them."""

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
    """Prompt and completion tokens that are computed; a prompt that several samples share counts once."""
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
            images=group.encoded.images,
        )
        for rollout, value in zip(group.rollouts_G, advantages_G, strict=True)
        if len(rollout.completion.token_ids) and rollout.completion.finish_reason is not FinishReason.ABORT
    ]


def plan_batch(
    samples: Sequence[Sample],
    *,
    version: int,
    num_ranks: int,
    max_tokens: int,
    layout: RowLayout,
    skip_zero_advantage: bool,
) -> BatchPlan:
    """Split samples into micro-batches within `max_tokens` positions each and deal them to the ranks.

    Raises `ValueError` when one sample alone is over `max_tokens` (the configuration check rules it out).
    """
    num_loss_tokens = sum(len(s.logprobs) for s in samples)
    active = [s for s in samples if not (skip_zero_advantage and s.advantage == 0.0)]
    over = [s for s in active if len(s) > max_tokens]
    if over:
        raise ValueError(f"sample of group {over[0].group_id} has {len(over[0])} tokens, over max_tokens={max_tokens}")
    rows = (
        _shared_rows(active, max_tokens=max_tokens, layout=layout) if layout.shares_prompts else [(s,) for s in active]
    )
    micros = _split(rows, max_tokens=max_tokens, packed=layout.packed, at_least=num_ranks)
    per_rank = _deal(micros, num_ranks)
    padding = [sum(_padding(micro, layout.packed) for micro in rank) for rank in per_rank]
    num_tokens = sum(_positions(micro) for rank in per_rank for micro in rank)
    return BatchPlan(
        rank_batches=tuple(
            RankBatch(
                version=version,
                micro_batches=tuple(MicroBatch(rows=tuple(micro)) for micro in rank),
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


def row_length(row: Sequence[Sample]) -> int:
    """Positions of a row: the prompt once, then each completion."""
    return row[0].prompt_len + sum(len(s) - s.prompt_len for s in row) if row else 0


def _positions(rows: Sequence[Row]) -> int:
    return sum(row_length(row) for row in rows)


def _shared_rows(samples: Sequence[Sample], *, max_tokens: int, layout: RowLayout) -> list[Row]:
    """Samples of a group in one row, as long as that is cheaper than a row of its own for the next one.

    Sharing saves the prompt's positions, but attention in a row covers all of its completions: a row of length n costs
    n * (1 + n / break_even), in positions of a model without attention.
    """

    def cost(length: int) -> float:
        return length * (1 + length / layout.attention_break_even)

    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.group_id, sample.prompt_len), []).append(sample)
    rows: list[Row] = []
    for group in groups.values():
        row: list[Sample] = []
        for sample in sorted(group, key=len):
            length = row_length(row)
            grown = length + len(sample) - sample.prompt_len
            if row and (grown > max_tokens or cost(grown) >= cost(length) + cost(len(sample))):
                rows.append(tuple(row))
                row = []
            row.append(sample)
        rows.append(tuple(row))
    return rows


def _split(rows: Sequence[Row], *, max_tokens: int, packed: bool, at_least: int) -> list[list[Row]]:
    """Micro-batches from the longest row down; at least `at_least` of them when there are enough rows."""
    ordered = sorted(rows, key=lambda row: (-row_length(row), row[0].group_id))
    # Fewer, fuller micro-batches are cheaper, but every rank should have work: aim at an even share of the budget.
    total = _positions(ordered)
    rounds = max(1, math.ceil(total / (max_tokens * at_least)))
    longest_of_all = row_length(ordered[0]) if ordered else 0
    target = min(max_tokens, max(math.ceil(total / (rounds * at_least)), longest_of_all))
    micros: list[list[Row]] = []
    positions = 0
    for row in ordered:
        length = row_length(row)
        longest = row_length(micros[-1][0]) if micros else 0
        grown = positions + length if packed else longest * (len(micros[-1]) + 1 if micros else 0)
        too_short = not packed and length < longest * (1 - MAX_ROW_PADDING)
        if not micros or grown > target or too_short:
            micros.append([row])
            positions = length
        else:
            micros[-1].append(row)
            positions = grown
    return micros


def _deal(micros: list[list[Row]], num_ranks: int) -> list[list[list[Row]]]:
    """The same number of micro-batches for every rank, balanced by positions; empty ones fill up."""
    rounds = max(1, math.ceil(len(micros) / num_ranks))
    # Halve the largest micro-batches rather than leave a rank idle in the last round.
    while len(micros) < rounds * num_ranks and any(_divisible(m) for m in micros):
        largest = max((m for m in micros if _divisible(m)), key=_positions)
        micros.remove(largest)
        micros += _halves(largest)
    micros = sorted(micros, key=lambda m: -_positions(m))
    micros += [[] for _ in range(rounds * num_ranks - len(micros))]
    per_rank: list[list[list[Row]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for micro in micros:
        rank = min((r for r in range(num_ranks) if len(per_rank[r]) < rounds), key=lambda r: load[r])
        per_rank[rank].append(micro)
        load[rank] += _positions(micro)
    return per_rank


def _divisible(micro: Sequence[Row]) -> bool:
    return sum(len(row) for row in micro) > 1


def _halves(micro: list[Row]) -> list[list[Row]]:
    """Between two rows, or a single row between two of its samples: that prompt is then computed twice."""
    if len(micro) > 1:
        return [micro[: len(micro) // 2], micro[len(micro) // 2 :]]
    (row,) = micro
    return [[row[: len(row) // 2]], [row[len(row) // 2 :]]]


def _padding(micro: Sequence[Row], packed: bool) -> int:
    if packed or not micro:
        return 0
    return len(micro) * max(row_length(row) for row in micro) - _positions(micro)
