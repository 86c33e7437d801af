"""Pipeline depth: how many groups are outstanding, tuned below the staleness bound.

The bound says how old data may get; depth decides how old it is. Deeper than what keeps the learner from waiting only
makes data older, so the tuner goes down while batches lie finished before they are needed and up when the learner
waits.

Going down is a guess, and a wrong one costs idle time some steps later, when the pipeline has drained. So each guess
that the learner had to pay for doubles the number of calm steps before the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class DepthTuner:
    """Down by at most a quarter of a batch after `patience` calm steps, up by a whole batch when the learner waits."""

    groups_per_step: int
    max_depth: int
    depth: int
    patience: int = 4
    """Steps in a row with finished groups to spare before going down."""
    max_patience: int = 64
    idle_share: float = 0.01
    """Learner idle share above which depth goes up."""
    _calm: int = 0
    _went_down: bool = False
    """Since the learner waited last."""

    def observe(self, *, idle_s: float, step_s: float, spare_groups: int) -> int:
        """One step is over; returns the new depth. `spare_groups`: finished groups left at its hand-out."""
        stride = max(1, math.ceil(self.groups_per_step / 4))
        if step_s > 0 and idle_s / step_s > self.idle_share:
            if self._went_down:
                self.patience = min(self.max_patience, 2 * self.patience)
            self._went_down = False
            self._calm = 0
            self.depth = min(self.max_depth, self.depth + self.groups_per_step)
        elif spare_groups < stride:
            self._calm = 0
        else:
            self._calm += 1
            if self._calm >= self.patience and self.depth > self.groups_per_step:
                self._calm = 0
                self._went_down = True
                self.depth = max(self.groups_per_step, self.depth - min(stride, spare_groups))
        return self.depth
