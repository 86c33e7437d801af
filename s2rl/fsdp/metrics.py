"""Sums, counts and maxima of a batch on one rank, and one collective that makes them means over all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Collects metrics by name; the set of names has to be the same on every rank, whatever data a rank has.

    Tensors stay on their device until `reduce`, so that collecting never waits for it. The collective runs on CPU
    tensors: float64 is not available everywhere.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, float]] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, values_N: Tensor) -> None:
        """Add values to a mean over everything added; a tensor [N] with N = 0 only makes the name known."""
        self._add(name, values_N.detach().sum(dtype=torch.float32), weight=float(values_N.numel()))

    def total(self, name: str, value: Tensor | float) -> None:
        """Add a scalar to a sum over all ranks."""
        self._add(name, value.detach() if isinstance(value, Tensor) else value, weight=math.inf)

    def maximum(self, name: str, values: Tensor | float) -> None:
        """Raise a maximum; NaN wins, so that a broken value is seen."""
        values = values.detach() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
        largest = values.max() if values.numel() else values.new_full((), -math.inf)
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def _add(self, name: str, total: Tensor | float, *, weight: float) -> None:
        old_total, old_weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + total, old_weight + weight)

    def reduce(self) -> dict[str, float]:
        """Means, sums and maxima over all ranks (collective). A mean or maximum over nothing has no entry."""
        sums, maxima = sorted(self._sums), sorted(self._maxima)
        flat = [float(x) for name in sums for x in self._sums[name]] + [float(self._maxima[name]) for name in maxima]
        own = torch.tensor(flat, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone)
        result: dict[str, float] = {}
        for index, name in enumerate(sums):
            total, weight = table[:, 2 * index].sum().item(), table[:, 2 * index + 1].sum().item()
            if weight > 0:
                result[name] = total if math.isinf(weight) else total / weight
        for index, name in enumerate(maxima, start=2 * len(sums)):
            value = table[:, index].max().item()
            if value != -math.inf:
                result[name] = value
        return result
