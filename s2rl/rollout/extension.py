"""Mixed into vLLM's worker class (`worker_extension_cls`): the weight-sync side of every rank of an engine.

vLLM imports this module in each of its worker processes before it builds the worker; repairs of vLLM that have to be
there by then are made on import. All methods run in the thread that owns the device, by `collective_rpc`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from s2rl.rollout import vllm_compat
from s2rl.rollout.protocol import RankLoad
from s2rl.sync import SyncGroup, WeightReceiver
from s2rl.types import SyncGroupSpec, TensorSpec

logger = logging.getLogger(__name__)

vllm_compat.repair()


class SyncExtension:
    """Joins the weight-sync group and loads weights in the layout that the checkpoint on disk has.

    With tensor parallelism every rank joins: `spec.rank` is that of the engine's rank 0 and `spec.world_size` counts
    all of them. Each rank receives every tensor in full and keeps its shard.
    """

    # Attributes of vLLM's worker class.
    device: torch.device
    rank: int
    model_runner: Any

    # Without a value: vLLM refuses extensions whose class attributes its worker has too.
    _s2rl_sync: tuple[SyncGroup, WeightReceiver] | None

    def s2rl_die_with(self, parent_pid: int) -> None:
        """In a process of its own: be killed when the process that owns the engine is gone, however it went."""
        if os.getpid() != parent_pid:
            vllm_compat.die_with_parent(parent_pid)

    def s2rl_join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """Enter the group; an older one is left. Collective."""
        self.s2rl_leave_sync()
        group = SyncGroup(replace(spec, rank=spec.rank + self.rank), device=str(self.device))
        self._s2rl_sync = (group, WeightReceiver(group, manifest))

    def s2rl_leave_sync(self) -> None:
        """Leave the group, if in one."""
        joined, self._s2rl_sync = getattr(self, "_s2rl_sync", None), None
        if joined is not None:
            joined[0].close()

    def s2rl_load_weights(self, version: int) -> RankLoad:
        """Receive one publication into the model. Collective."""
        joined = getattr(self, "_s2rl_sync", None)
        if joined is None:
            raise RuntimeError(f"weights of version {version} were asked for before the weight-sync group was joined")
        receiver = joined[1]
        weights = receiver.receive(version)
        unloaded = self.s2rl_reload(weights)
        for _ in weights:  # the group is of use only when every tensor was taken
            pass
        return RankLoad(
            num_bytes=receiver.num_bytes, fingerprints=dict(receiver.fingerprints), unloaded=tuple(unloaded)
        )

    def s2rl_reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Put tensors into the running model, post-processed exactly once; the engine parameters that got none."""
        return vllm_compat.reload(self.model_runner, weights)
