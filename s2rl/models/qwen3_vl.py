"""Qwen3-VL, dense and with routed experts. The hub stores the experts fused, [E, H, 2I] and [E, I, H]: transposed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from s2rl.models.adapter import ModelAdapter, StoredPart
from s2rl.models.experts import stored_experts


class _Qwen3VLMoe(ModelAdapter):
    def stored(self, name: str, shape: Sequence[int], *, tied: bool, disk: Collection[str]) -> tuple[StoredPart, ...]:
        experts = stored_experts(name, shape, disk=disk, fused_transposed=True)
        return experts if experts is not None else super().stored(name, shape, tied=tied, disk=disk)


QWEN3_VL = ModelAdapter(
    architectures=("Qwen3VLForConditionalGeneration",),
    wrap_classes=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
)
QWEN3_VL_MOE = _Qwen3VLMoe(
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    wrap_classes=("Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock"),
)
