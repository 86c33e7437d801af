"""From samples to tensors: one right-padded row per sample, or all samples one after the other in a single row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from s2rl.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardInputs:
    """What the policy's forward takes.

    There is no attention mask. Padding is on the right, and a causal model's tokens never look to their right, so real
    tokens do not see it; the hidden states of padding are never selected. Packed sequences are kept apart by their
    position ids, which start again at 0: transformers builds a block-diagonal mask (or variable-length kernel
    arguments) from that, as long as no mask is given.
    """

    input_ids: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64
    positions_N: Tensor  # [N] int64, into the flattened [B * S]: the position before each completion token
    targets_N: Tensor  # [N] int64, the completion tokens
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenData:
    """What the loss takes, per completion token, in the order of `ForwardInputs.targets_N`."""

    rollout_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    versions: Tensor  # [N] int32
    sample_lengths: Tensor  # [N] float32, completion length of the token's sample


def collate_forward(
    token_ids: Sequence[np.ndarray], prompt_lens: Sequence[int], *, packed: bool, device: torch.device
) -> ForwardInputs:
    """Tensors for sequences of token ids [L] whose first `prompt_lens[i]` tokens (at least 1) are not predicted.

    An empty list gives a dummy row without targets, so that a rank without work can enter the forward's collectives.
    """
    if any(not 1 <= prompt <= len(ids) for ids, prompt in zip(token_ids, prompt_lens, strict=True)):
        raise ValueError("a sequence needs at least one prompt token: the first token has nothing that predicts it")
    ids = list(token_ids) or [np.zeros(2, dtype=np.int32)]
    lengths = np.array([len(row) for row in ids])
    width = int(lengths.sum() if packed else lengths.max())
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if packed else np.arange(len(ids)) * width
    input_ids = np.zeros(width if packed else len(ids) * width, dtype=np.int64)
    for start, row in zip(starts, ids, strict=True):
        input_ids[start : start + len(row)] = row
    position_ids = np.concatenate([np.arange(n) for n in lengths]) if packed else np.tile(np.arange(width), len(ids))
    spans = [
        np.arange(start + prompt, start + len(row))
        for start, row, prompt in zip(starts, token_ids, prompt_lens, strict=False)
    ]
    predicted = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    rows = (1 if packed else len(ids), width)
    return ForwardInputs(
        input_ids=torch.from_numpy(input_ids.reshape(rows)).to(device),
        position_ids=torch.from_numpy(position_ids.reshape(rows)).to(device),
        positions_N=torch.from_numpy(predicted - 1).to(device),
        targets_N=torch.from_numpy(input_ids[predicted]).to(device),
    )


def collate_samples(
    samples: Sequence[Sample], *, packed: bool, device: torch.device
) -> tuple[ForwardInputs, TokenData]:
    """Tensors of one micro-batch; it may be empty."""
    inputs = collate_forward(
        [s.token_ids for s in samples], [s.prompt_len for s in samples], packed=packed, device=device
    )
    lengths = [len(s.token_ids) - s.prompt_len for s in samples]
    for sample, length in zip(samples, lengths, strict=True):
        if not len(sample.logprobs) == len(sample.versions) == length:
            raise ValueError(
                f"sample of group {sample.group_id}: {length} completion tokens but {len(sample.logprobs)} "
                f"log-probabilities and {len(sample.versions)} versions"
            )

    def tensor(parts: list[np.ndarray], dtype: type[np.generic]) -> Tensor:
        flat = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(flat.astype(dtype, copy=False)).to(device)

    return inputs, TokenData(
        rollout_logprobs=tensor([s.logprobs for s in samples], np.float32),
        advantages=tensor([np.full(n, s.advantage) for s, n in zip(samples, lengths, strict=True)], np.float32),
        versions=tensor([s.versions for s in samples], np.int32),
        sample_lengths=tensor([np.full(n, n) for n in lengths], np.float32),
    )
