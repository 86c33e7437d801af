"""Memory for received buckets that is used again only when nobody can see it any more.

Fresh memory costs page faults, on a CPU as much time as the transfer itself. A block goes back to the pool when the
last tensor that shares it is gone, which reference counts know: never while an engine still holds one. Accelerators'
allocators already work like this, so the pool is for the CPU.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray


class MemoryPool:
    """Hands out uint8 tensors on the CPU. Keeps at most `max_idle_bytes` of blocks that nobody uses."""

    def __init__(self, *, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[NDArray[np.uint8]] = []

    @property
    def idle_bytes(self) -> int:
        """Bytes of blocks that are kept and not in use."""
        return sum(block.nbytes for block in self._idle)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A tensor of `num_bytes` with undefined content; its block is as large as the smallest idle one that fits."""
        fitting = [i for i, block in enumerate(self._idle) if num_bytes <= block.nbytes <= 2 * num_bytes]
        if fitting:
            block = self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
        else:
            block = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        # torch keeps this view alive as long as any tensor shares the storage; its end is the end of the last of them.
        lease = block.view()
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.from_numpy(lease)[:num_bytes]

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        if self.idle_bytes + block.nbytes <= self._max_idle_bytes:
            self._idle.append(block)
