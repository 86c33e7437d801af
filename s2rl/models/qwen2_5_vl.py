"""Qwen2.5-VL: on disk the language model and the vision tower stand side by side, in the class one level deeper."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from s2rl.models.adapter import ModelAdapter, StoredPart

_PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


class _Qwen2_5VL(ModelAdapter):
    def stored(self, name: str, shape: Sequence[int], *, tied: bool, disk: Collection[str]) -> tuple[StoredPart, ...]:
        if name not in disk:  # a folder that a newer transformers wrote has the names of the class
            for in_class, on_disk in _PREFIXES:
                if name.startswith(in_class):
                    name = on_disk + name.removeprefix(in_class)
                    break
        return super().stored(name, shape, tied=tied, disk=disk)


QWEN2_5_VL = _Qwen2_5VL(
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    wrap_classes=("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
)
