"""Log-probabilities of whole sequences, the work dealt over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from s2rl.fsdp.collate import collate_forward
from s2rl.fsdp.model import ShardedPolicy
from s2rl.types import FloatArray, ImageArray


def score_sequences(
    policy: ShardedPolicy,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    device: torch.device,
    images: Sequence[Sequence[ImageArray]] | None = None,
    banned_token_ids: Sequence[int] = (),
) -> list[FloatArray]:
    """Log-probability of each token given those before it (collective; every rank gets all results).

    Entry i of a result belongs to token i + 1, so a sequence of fewer than two tokens gives an empty array. All ranks
    must be called with the same sequences: each works out the same deal and takes its own share of it. `images[i]` are
    those of sequence i; `banned_token_ids` are left out of all distributions.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    micros = _split([len(s) for s in sequences], max_tokens=max_tokens)
    banned = torch.tensor(banned_token_ids, dtype=torch.int64, device=device) if banned_token_ids else None
    own: dict[int, FloatArray] = {}
    for first in range(0, len(micros), world_size):
        # A rank without a share in this round runs an empty micro-batch: the forward's collectives need everyone.
        indices = micros[first + rank] if first + rank < len(micros) else []
        rows = [np.asarray(sequences[i], dtype=np.int32) for i in indices]
        inputs = collate_forward(
            [[row] for row in rows],
            [1] * len(rows),
            packed=policy.layout.packed,
            device=device,
            vision=policy.vision,
            images=None if images is None else [images[i] for i in indices],
        )
        with torch.no_grad():
            logprobs, _ = policy.module.logprobs(inputs, temperature=temperature, banned_K=banned)
        ends = np.cumsum([len(row) - 1 for row in rows], dtype=np.int64)
        own.update(zip(indices, np.split(logprobs.float().cpu().numpy(), ends[:-1]), strict=True) if indices else ())
    shares: list[dict[int, FloatArray] | None] = [None] * world_size
    dist.all_gather_object(shares, own)
    scored = {index: values for share in shares if share for index, values in share.items()}
    return [scored.get(i, np.zeros(0, dtype=np.float32)) for i in range(len(sequences))]


def _split(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of sequences with at least two tokens, longest first, in groups of at most `max_tokens` positions."""
    micros: list[list[int]] = []
    for index in sorted((i for i, n in enumerate(lengths) if n > 1), key=lambda i: -lengths[i]):
        if micros and (len(micros[-1]) + 1) * lengths[micros[-1][0]] <= max_tokens:
            micros[-1].append(index)
        else:
            micros.append([index])
    return micros
