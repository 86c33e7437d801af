"""Worker extensions with a fault, for tests. Loaded by vLLM in the worker's process."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from s2rl.rollout import vllm_compat
from s2rl.rollout.extension import SyncExtension


class ForgetfulExtension(SyncExtension):
    """Leaves out the post-processing of expert weights when it loads version 1."""

    def s2rl_load_weights(self, version: int):
        self._loading = version
        return super().s2rl_load_weights(version)

    def s2rl_reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        if self._loading != 1:
            return super().s2rl_reload(weights)
        kept = vllm_compat._forget_moe_kernels
        vllm_compat._forget_moe_kernels = lambda model: None
        try:
            return super().s2rl_reload(weights)
        finally:
            vllm_compat._forget_moe_kernels = kept
