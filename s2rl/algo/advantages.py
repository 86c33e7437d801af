"""Group-relative advantages. numpy only: the controller computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation, so that a group of equal scores has advantages of zero and not of 0 / 0."""


def group_norm(scores_G: Scores) -> Scores:
    """(R - mean) / (std + 1e-6) over one group, with the unbiased standard deviation (ddof 1).

    GRPO with outcome supervision: Shao et al. 2024 (DeepSeekMath), section 4.1.2, below eq. 3.
    """
    centred_G = group_mean(scores_G)
    variance = np.square(centred_G).sum() / max(len(scores_G) - 1, 1)
    advantages_G: Scores = centred_G / (np.sqrt(variance) + STD_EPS)
    return advantages_G


def group_mean(scores_G: Scores) -> Scores:
    """R - mean over one group. Dr. GRPO: Liu et al. 2025, section 3.2 (no division by the standard deviation).

    Equal scores give exactly zero: the planner leaves such samples out.
    """
    if np.all(scores_G == scores_G[0]):  # a mean of equal numbers may differ from them in the last bit
        return np.zeros_like(scores_G)
    centred_G: Scores = scores_G - scores_G.mean()
    return centred_G


_KINDS: Mapping[str, Callable[[Scores], Scores]] = MappingProxyType(
    {"group_norm": group_norm, "group_mean": group_mean}
)


def group_advantages(scores_G: Scores, *, kind: str) -> Scores:
    """Advantages [G], float64, of one group's scores [G].

    `kind` is the configuration's `algorithm.advantage`. Raises ValueError for scores that are not finite: a NaN
    would spread over the group.
    """
    scores_G = np.asarray(scores_G, dtype=np.float64)
    if scores_G.ndim != 1 or len(scores_G) == 0:
        raise ValueError(f"scores must have shape [G] with G > 0, got {scores_G.shape}")
    if not np.isfinite(scores_G).all():
        raise ValueError(f"scores must be finite, got {scores_G.tolist()}")
    return _KINDS[kind](scores_G)
