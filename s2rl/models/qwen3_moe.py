"""Qwen3-MoE: dense attention, routed experts; on disk three matrices for each expert."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from s2rl.models.adapter import ModelAdapter, StoredPart
from s2rl.models.experts import stored_experts


class _Qwen3Moe(ModelAdapter):
    def stored(self, name: str, shape: Sequence[int], *, tied: bool, disk: Collection[str]) -> tuple[StoredPart, ...]:
        experts = stored_experts(name, shape, disk=disk)
        return experts if experts is not None else super().stored(name, shape, tied=tied, disk=disk)


QWEN3_MOE = _Qwen3Moe(architectures=("Qwen3MoeForCausalLM",), wrap_classes=("Qwen3MoeDecoderLayer",))
