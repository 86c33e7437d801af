"""Worker extensions with a fault, for tests. Loaded by vLLM in the worker's process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from s2rl.rollout import vllm_compat
from s2rl.rollout.extension import SyncExtension


class ForgetfulExtension(SyncExtension):
    """Leaves out post-processing: of expert weights in version 1, of the tied output head in version 2."""

    def s2rl_load_weights(self, version: int) -> Any:
        self._loading = version
        return super().s2rl_load_weights(version)

    def s2rl_reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        left_out = {1: "_forget_moe_kernels", 2: "_repack_tied_heads"}.get(self._loading)
        if left_out is None:
            return super().s2rl_reload(weights)
        kept = getattr(vllm_compat, left_out)
        setattr(vllm_compat, left_out, lambda model: None)
        try:
            return super().s2rl_reload(weights)
        finally:
            setattr(vllm_compat, left_out, kept)
