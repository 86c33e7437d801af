"""Qwen3.5, dense and with routed experts: three gated delta net layers for each one of full attention, a vision tower.

The recurrent layers know rows, not position ids, so each sequence has a row of its own and nothing is packed or shared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from s2rl.models.adapter import ModelAdapter, StoredPart
from s2rl.models.experts import stored_experts


class _Qwen3_5Moe(ModelAdapter):
    def stored(self, name: str, shape: Sequence[int], *, tied: bool, disk: Collection[str]) -> tuple[StoredPart, ...]:
        experts = stored_experts(name, shape, disk=disk)
        return experts if experts is not None else super().stored(name, shape, tied=tied, disk=disk)


QWEN3_5 = ModelAdapter(
    architectures=("Qwen3_5ForConditionalGeneration",),
    wrap_classes=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"),
    packable=False,
)
QWEN3_5_MOE = _Qwen3_5Moe(
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    wrap_classes=("Qwen3_5MoeDecoderLayer", "Qwen3_5MoeVisionBlock"),
    packable=False,
)
