"""Policy losses. A variant is one pure function from per-token tensors to a per-token loss, registered by name.

All vectors are [N], float32, over the completion tokens of one micro-batch; padding is never among them, so nothing is
masked and nothing can leak through a mask. N may be 0. The mean over tokens or sequences is a weight per token that
the caller supplies, because its denominator spans micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from s2rl.algo.kl import clamp_log_ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """What a policy loss may look at."""

    logprobs: Tensor  # [N], of the policy that is being trained; carries the gradient
    learner_logprobs: Tensor  # [N], of the learner at the start of the batch
    rollout_logprobs: Tensor  # [N], of the rollout policy, per token the version that sampled it
    advantages: Tensor  # [N]

    def __post_init__(self) -> None:
        shapes = {
            tuple(t.shape) for t in (self.logprobs, self.learner_logprobs, self.rollout_logprobs, self.advantages)
        }
        if len(shapes) != 1 or self.logprobs.ndim != 1:
            raise ValueError(f"expected four vectors of the same length, got shapes {sorted(shapes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The numbers of a policy loss, from the configuration's `algorithm` section."""

    clip_low: float
    clip_high: float
    old_policy: Literal["learner", "rollout"]
    importance_cap: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """A per-token loss and what is worth plotting about it (no gradients)."""

    loss: Tensor  # [N]
    ratio: Tensor  # [N], policy / old policy
    clipped: Tensor  # [N], bool: the clip took this token's gradient away


def clipped(inputs: LossInputs, *, settings: LossSettings) -> PolicyLoss:
    """PPO's clipped surrogate per token with separate bounds, against the learner's or the rollout's policy.

    Schulman et al. 2017, eq. 7; Shao et al. 2024, eq. 3; separate bounds: Yu et al. 2025 (DAPO), eq. 10. Against the
    learner's own policy (decoupled, Hilton et al. 2022) each token is weighted by the truncated importance weight
    min(learner / rollout, cap), which corrects for the rollout policy being another one.
    """
    old_N = inputs.learner_logprobs if settings.old_policy == "learner" else inputs.rollout_logprobs
    ratio_N = clamp_log_ratio(inputs.logprobs - old_N.detach()).exp()
    bounded_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_N = torch.maximum(-ratio_N * inputs.advantages, -bounded_N * inputs.advantages)
    if settings.old_policy == "learner" and settings.importance_cap is not None:
        weight_N = importance_weights(inputs.learner_logprobs, inputs.rollout_logprobs)
        loss_N = loss_N * weight_N.clamp(max=settings.importance_cap)
    ratio_N = ratio_N.detach()
    too_high_N = (ratio_N > 1.0 + settings.clip_high) & (inputs.advantages > 0)
    too_low_N = (ratio_N < 1.0 - settings.clip_low) & (inputs.advantages < 0)
    return PolicyLoss(loss=loss_N, ratio=ratio_N, clipped=too_high_N | too_low_N)


def importance_weights(learner_logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Tensor:
    """learner / rollout per token [N], before any cap, without gradient."""
    return clamp_log_ratio(learner_logprobs_N.detach() - rollout_logprobs_N).exp()


LossFunction = Callable[..., PolicyLoss]

_LOSSES: Mapping[str, LossFunction] = MappingProxyType({"clipped": clipped})


def policy_loss(name: str) -> LossFunction:
    """The loss function that the configuration's `algorithm.loss` names."""
    return _LOSSES[name]


def token_weights(
    sample_lengths_N: Tensor,
    *,
    aggregation: Literal["token_mean", "sequence_mean"],
    num_loss_tokens: int,
    num_samples: int,
) -> Tensor:
    """Weight [N] of each token such that the weighted sum over the whole batch, all ranks, is the mean asked for.

    `sample_lengths_N` holds for each token the completion length of its sample; the counts are those of the whole
    batch. `token_mean`: 1 / tokens. `sequence_mean`: 1 / (samples x own length).
    """
    if aggregation == "token_mean":
        return torch.full_like(sample_lengths_N, 1.0 / max(1, num_loss_tokens))
    return 1.0 / (sample_lengths_N * max(1, num_samples))
