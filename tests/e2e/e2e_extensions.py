"""Worker extensions with a fault, loaded by vLLM in the worker's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from s2rl.rollout import vllm_compat
from s2rl.rollout.extension import SyncExtension
from s2rl.sync import WeightReceiver
from s2rl.types import SyncGroupSpec, TensorSpec

CORRUPTED = "model.layers.1.mlp.up_proj.weight"


class _FlippingReceiver(WeightReceiver):
    """One bit of one tensor changes on its way, in version 2."""

    _version = -1

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._version = version
        return super().receive(version)

    def _tensors(self, arriving: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._tensors(arriving):
            if self._version == 2 and name == CORRUPTED:
                tensor.view(torch.uint8).view(-1)[100] ^= 1
            yield name, tensor


class CorruptingExtension(SyncExtension):
    """Receives with the receiver above."""

    def s2rl_join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        super().s2rl_join_sync(spec, manifest)
        assert self._s2rl_sync is not None
        group, _ = self._s2rl_sync
        self._s2rl_sync = (group, _FlippingReceiver(group, manifest))


class ForgetfulExtension(SyncExtension):
    """Leaves out what vLLM needs after a load: the packed copy of a tied head stays that of the first weights."""

    def s2rl_reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        repack = vllm_compat._repack_tied_heads
        vllm_compat._repack_tied_heads = lambda model: None
        try:
            return super().s2rl_reload(weights)
        finally:
            vllm_compat._repack_tied_heads = repack
