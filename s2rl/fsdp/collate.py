"""From samples to tensors: right-padded rows, or all rows one after the other in a single one.

A row holds one sample, or several of one prompt: the prompt once, then each completion (`RowLayout`). Sizes are written
as B rows, S positions of a row, N completion tokens.

For a model with a vision tower (`VisionInputs`), position ids have four rows, and a batch without any image gets a
small one in its padding: every rank then runs the tower's collectives, whatever its samples hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from s2rl.errors import ModelError
from s2rl.models.vision.inputs import VisionInputs
from s2rl.types import ImageArray, IntArray, Sample

_PADDING, _PROMPT = -1, 0
"""Owners of positions beside completions, which count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardInputs:
    """What the policy's forward takes.

    Rows of one sample each need no attention mask. Padding is on the right, and a causal model's tokens never look to
    their right, so real tokens do not see it; the hidden states of padding are never selected. Packed sequences are
    kept apart by their position ids, which start again at 0: transformers builds a block-diagonal mask (or
    variable-length kernel arguments) from that, as long as no mask is given. Where completions share a prompt,
    `model_inputs` holds the mask `attention_mask` [B, 1, S, S] bool, True where a position sees another, and each
    completion's positions go on from the prompt's.
    """

    input_ids: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64; [4, B, S] with a vision tower: these, then the temporal, height, width ones
    positions_N: Tensor  # [N] int64, into the flattened [B * S]: the position that predicts each completion token
    targets_N: Tensor  # [N] int64, the completion tokens
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenData:
    """What the loss takes, per completion token, in the order of `ForwardInputs.targets_N`."""

    rollout_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    versions: Tensor  # [N] int32
    sample_lengths: Tensor  # [N] float32, completion length of the token's sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """One row without padding."""

    input_ids: np.ndarray  # [L]
    position_ids: np.ndarray  # [L]
    image_positions: np.ndarray | None  # [3, L], of a model with a vision tower
    owners: np.ndarray  # [L], which completion a position belongs to, counted from 1; 0 for the prompt
    predictors: np.ndarray  # [N of this row], the position that predicts each completion token
    targets: np.ndarray  # [N of this row]


def _row(
    sequences: Sequence[IntArray], prompt_len: int, *, vision: VisionInputs | None, images: Sequence[ImageArray]
) -> _Row:
    """The first `prompt_len` tokens, which are the same in all sequences, once; then the rest of each."""
    if any(not 1 <= prompt_len <= len(ids) for ids in sequences):
        raise ValueError("a sequence needs at least one prompt token: the first token has nothing that predicts it")
    prompt = sequences[0][:prompt_len]
    if any(not np.array_equal(ids[:prompt_len], prompt) for ids in sequences[1:]):
        raise ValueError("sequences of one row must begin with the same prompt")
    completions = [ids[prompt_len:] for ids in sequences]
    image_positions = None
    if vision is not None:
        of_each = [vision.positions(ids, images) for ids in sequences]
        image_positions = np.concatenate([of_each[0][:, :prompt_len], *(p[:, prompt_len:] for p in of_each)], axis=1)
    elif len(images):
        raise ModelError("a sample has images, but the model has no vision tower")
    starts = prompt_len + np.cumsum([0, *(len(c) for c in completions)])
    return _Row(
        input_ids=np.concatenate([prompt, *completions]).astype(np.int64),
        position_ids=np.concatenate([np.arange(prompt_len), *(prompt_len + np.arange(len(c)) for c in completions)]),
        image_positions=image_positions,
        owners=np.repeat(np.arange(len(completions) + 1), [prompt_len, *(len(c) for c in completions)]),
        predictors=np.concatenate(
            [
                np.concatenate([[prompt_len - 1], start + np.arange(len(c) - 1)]) if len(c) else np.zeros(0, np.int64)
                for start, c in zip(starts, completions, strict=False)
            ]
        ).astype(np.int64),
        targets=np.concatenate(completions).astype(np.int64),
    )


def collate_forward(
    rows: Sequence[Sequence[IntArray]],
    prompt_lens: Sequence[int],
    *,
    packed: bool,
    device: torch.device,
    vision: VisionInputs | None = None,
    images: Sequence[Sequence[ImageArray]] | None = None,
) -> ForwardInputs:
    """Tensors for rows of token sequences [L] whose first `prompt_lens[i]` tokens (at least 1) are not predicted.

    Sequences of one row share these tokens; a packed row takes one sequence only. `images[i]` are those of row i. An
    empty list gives a dummy row without targets, so that a rank without work can enter the forward's collectives.
    """
    images = images or [()] * len(rows)
    made = [
        _row(sequences, prompt_len, vision=vision, images=own)
        for sequences, prompt_len, own in zip(rows, prompt_lens, images, strict=True)
    ]
    made = made or [_row([np.zeros(2, dtype=np.int32)], 2, vision=vision, images=())]
    shown = [image for own in images for image in own]
    shared = any(len(sequences) > 1 for sequences in rows)
    if packed and shared:
        raise ValueError("packed rows cannot share prompts: nothing but position ids keeps them apart")
    lengths = np.array([len(row.input_ids) for row in made])
    # Where no sample has an image, a small one stands in padding, behind everything that is trained.
    host = -1 if packed else int(lengths.argmin())
    dummy_len = vision.num_dummy_tokens if vision is not None and not shown else 0
    width = int(lengths.sum() + dummy_len if packed else max(lengths.max(), lengths[host] + dummy_len))
    starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(len(made)) * width
    size = width if packed else len(made) * width
    input_ids, position_ids = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    owners = np.full(size, _PADDING)
    image_positions = np.zeros((3, size), dtype=np.int64)
    for start, row in zip(starts, made, strict=True):
        span = slice(start, start + len(row.input_ids))
        input_ids[span], position_ids[span], owners[span] = row.input_ids, row.position_ids, row.owners
        if not packed:  # padding goes on counting, so that no position id says that a sequence begins there
            padding = slice(start + len(row.input_ids), start + width)
            position_ids[padding] = np.arange(len(row.input_ids), width)
            image_positions[:, padding] = position_ids[padding]
        if row.image_positions is not None:
            image_positions[:, span] = row.image_positions
    if vision is not None and dummy_len:
        first = int(starts[host] + lengths[host])
        input_ids[first : first + dummy_len] = vision.image_token_id
        position_ids[first : first + dummy_len] = np.arange(dummy_len) + (0 if packed else lengths[host])
        image_positions[:, first : first + dummy_len] = position_ids[first : first + dummy_len]
        shown = [vision.dummy_image]
    shape = (1 if packed else len(made), width)
    model_inputs = {"attention_mask": _sharing_mask(owners.reshape(shape), device=device)} if shared else {}
    positions = torch.from_numpy(position_ids.reshape(shape)).to(device)
    if vision is not None:
        rows_3BS = torch.from_numpy(image_positions.reshape(3, *shape)).to(device)
        positions = torch.cat([positions[None], rows_3BS])
        model_inputs |= vision.model_inputs(shown, input_ids=input_ids.reshape(shape), device=device)
    return ForwardInputs(
        input_ids=torch.from_numpy(input_ids.reshape(shape)).to(device),
        position_ids=positions,
        positions_N=torch.from_numpy(
            np.concatenate([start + row.predictors for start, row in zip(starts, made, strict=True)])
        ).to(device),
        targets_N=torch.from_numpy(np.concatenate([row.targets for row in made])).to(device),
        model_inputs=model_inputs,
    )


def _sharing_mask(owners_BS: np.ndarray, *, device: torch.device) -> Tensor:
    """[B, 1, S, S] bool: each position sees the prompt and its own completion, up to itself.

    Padding sees the prompt, so that no position sees nothing, which would make its softmax undefined.
    """
    owners = torch.from_numpy(owners_BS).to(device)
    keys, queries = owners[:, None, :], owners[:, :, None]
    visible_BSS = (keys == _PROMPT) | (keys == queries) & (keys != _PADDING)
    causal_SS = torch.ones(owners.shape[1], owners.shape[1], dtype=torch.bool, device=device).tril()
    return (visible_BSS & causal_SS)[:, None]


def collate_samples(
    rows: Sequence[Sequence[Sample]], *, packed: bool, device: torch.device, vision: VisionInputs | None = None
) -> tuple[ForwardInputs, TokenData]:
    """Tensors of one micro-batch, its rows of samples that share a prompt; it may be empty."""
    inputs = collate_forward(
        [[s.token_ids for s in row] for row in rows],
        [row[0].prompt_len for row in rows],
        packed=packed,
        device=device,
        vision=vision,
        images=[row[0].images for row in rows],
    )
    samples = [sample for row in rows for sample in row]
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
