"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float,
) -> float:
    """Learning rate of optimizer step `step` (0-based; skipped steps are counted too).

    Warm-up rises in equal parts from 0 and reaches the peak at step `warmup_steps - 1`, so that no step is spent at 0.
    `linear` and `cosine` then fall to `peak * min_lr_ratio` at the last step, `total_steps - 1`, and stay there.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    # The peak itself is the last step of the warm-up, or the first step where there is none.
    first = max(warmup_steps - 1, 0)
    progress = min(1.0, (step - first) / max(1, total_steps - 1 - first))
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_lr_ratio + (1.0 - min_lr_ratio) * remaining)
