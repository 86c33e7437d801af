"""Pipeline depth: how many groups are outstanding, tuned below the staleness bound.

The bound says how old data may get; depth decides how old it is. Deeper than what keeps the learner from waiting only
makes data older, so the tuner goes down while batches lie finished before they are needed and up when the
learner waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class DepthTuner:
    """Additive steps in both directions, upwards faster than downwards."""

    groups_per_step: int
    max_depth: int
    depth: int
    patience: int = 3
    """Steps in a row with finished groups to spare before going down."""
    idle_share: float = 0.01
    """Learner idle share above which depth goes up."""
    _calm: int = 0

    def observe(self, *, idle_s: float, step_s: float, spare_groups: int) -> int:
        """One step is over. `spare_groups`: finished groups left when its batch was handed out. Returns the
        new depth."""
        stride = max(1, math.ceil(self.groups_per_step / 4))
        if step_s > 0 and idle_s / step_s > self.idle_share:
            self._calm = 0
            self.depth = min(self.max_depth, self.depth + stride)
        elif spare_groups >= stride:
            self._calm += 1
            if self._calm >= self.patience:
                self._calm = 0
                self.depth = max(self.groups_per_step, self.depth - min(stride, spare_groups))
        else:
            self._calm = 0
        return self.depth
