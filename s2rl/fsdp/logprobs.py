"""Log-probabilities and entropy of chosen tokens straight from hidden states, never with all their logits at once.

Only completion tokens pass through the output head. Up to `chunk_tokens` of them their probabilities are kept for the
backward pass; beyond that, chunk by chunk, logits are computed again there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NEVER = -1e30
"""Logit of a banned id: its probability is exactly 0, and 0 times its logarithm is still a number."""


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _log_softmax(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, banned_K: Tensor | None, temperature: float
) -> Tensor:
    """[N, V] float32. The matrix product is in the head's own type, as in the model; everything after it is not."""
    logits_NV = functional.linear(hidden_NH, weight_VH, bias_V)
    if banned_K is not None:
        logits_NV.index_fill_(1, banned_K, _NEVER)
    logits_NV = logits_NV.to(_accumulator(logits_NV.dtype))
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return logits_NV.log_softmax(-1)


def _entropy(probs_NV: Tensor, logprobs_NV: Tensor) -> Tensor:
    """[N]. A probability of exactly 0 counts as 0, also where its logarithm is -inf."""
    entropy_N = -torch.linalg.vecdot(probs_NV, logprobs_NV)
    if torch.isnan(entropy_N).any():
        entropy_N = torch.special.entr(probs_NV).sum(-1)
    return entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        banned_K: Tensor | None,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulator(hidden_NH.dtype)
        logprobs_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        keep = len(targets_N) <= chunk_tokens and any(ctx.needs_input_grad[:3])
        probs_NV = None
        for start in range(0, len(targets_N), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk_NV = _log_softmax(hidden_NH[rows], weight_VH, bias_V, banned_K, temperature)
            logprobs_N[rows] = chunk_NV.gather(1, targets_N[rows, None]).squeeze(1)
            probs_NV = chunk_NV.exp()
            entropy_N[rows] = _entropy(probs_NV, chunk_NV)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, banned_K, probs_NV if keep else None)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, bias_V, targets_N, banned_K, probs_NV = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # One chunk is the whole gradient; several are summed in float32, since bfloat16 sums lose small terms.
        several = len(targets_N) > ctx.chunk_tokens
        sum_dtype = _accumulator(weight_VH.dtype) if several else weight_VH.dtype
        grad_weight_VH: Tensor | None = None
        grad_bias_V: Tensor | None = None
        for start in range(0, len(targets_N), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            probs = probs_NV
            if probs is None:
                probs = _log_softmax(hidden_NH[rows], weight_VH, bias_V, banned_K, ctx.temperature).exp_()
            scale_n1 = grad_N[rows, None] / ctx.temperature
            grad_logits_nV = probs * -scale_n1
            grad_logits_nV.scatter_add_(1, targets_N[rows, None], scale_n1)
            grad_logits_nV = grad_logits_nV.to(weight_VH.dtype)
            grad_hidden_NH[rows] = grad_logits_nV @ weight_VH
            part_VH = (grad_logits_nV.T @ hidden_NH[rows]).to(sum_dtype)
            grad_weight_VH = part_VH if grad_weight_VH is None else grad_weight_VH.add_(part_VH)
            if bias_V is not None:
                part_V = grad_logits_nV.sum(0).to(sum_dtype)
                grad_bias_V = part_V if grad_bias_V is None else grad_bias_V.add_(part_V)
        if grad_weight_VH is None:  # a rank without tokens still owes its gradient to the reduction
            grad_weight_VH = torch.zeros_like(weight_VH)
            grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), grad_bias_V, None, None, None, None


def token_logprobs(
    hidden_NH: Tensor,
    *,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    banned_K: Tensor | None = None,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each target and entropy [N] of its distribution, float32, logits divided by `temperature`.

    `hidden_NH` are the last hidden states at the positions that predict `targets_N` (int64). The entropy carries no
    gradient. The ids `banned_K` (int64) are left out of the distribution, as they were when it was sampled. At most
    `chunk_tokens` rows of logits exist at a time.
    """
    if hidden_NH.ndim != 2 or targets_N.shape != hidden_NH.shape[:1]:
        raise ValueError(f"expected hidden [N, H] and targets [N], got {hidden_NH.shape} and {targets_N.shape}")
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, banned_K, temperature, chunk_tokens)  # type: ignore[no-any-return]
