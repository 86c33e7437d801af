"""Estimators of KL(policy || reference) from tokens that the policy sampled.

Schulman 2020, "Approximating KL divergence".

With d = log policy - log reference per token, k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. All three estimate the same
number; as a loss they differ, because the gradient of an expectation is not the expectation of the gradient:

* k1 differentiated as it stands gives grad log policy, which is zero in expectation whatever the reference is. What is
  wanted is grad E[d] = E[d * grad log policy], so k1 here has the value d and that gradient.
* k2 has exactly this gradient by itself.
* k3 has the gradient (1 - exp(-d)) grad log policy: it agrees to first order in d, is bounded where the reference is
  much likelier, and is the term of GRPO (Shao et al. 2024, eq. 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probabilities are cut to +-20 before they are exponentiated: exp(20) is 5e8, far from overflow."""

KlEstimator = Literal["k1", "k2", "k3"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The log-ratio within +-20. NaN stays NaN: a broken token must not look like a good one."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_ratio_N: Tensor) -> Tensor:
    """d in value, with the gradient of E[d] (see above)."""
    value_N = log_ratio_N.detach()
    return value_N + value_N * (log_ratio_N - value_N)


def k2(log_ratio_N: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * log_ratio_N.square()


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, never negative."""
    return torch.expm1(-log_ratio_N) + log_ratio_N


_ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})


def kl_divergence(logprobs_N: Tensor, reference_N: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Estimate [N] of KL(policy || reference) per token; gradients flow into `logprobs_N` only.

    Both are log-probabilities [N] of the sampled tokens.
    """
    if logprobs_N.shape != reference_N.shape or logprobs_N.ndim != 1:
        raise ValueError(f"expected two vectors [N], got {tuple(logprobs_N.shape)} and {tuple(reference_N.shape)}")
    return _ESTIMATORS[estimator](clamp_log_ratio(logprobs_N - reference_N.detach()))
