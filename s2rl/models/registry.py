"""Which adapter serves which architecture. To add a family: write its adapter in a file of its own and list it here."""

from __future__ import annotations

from collections.abc import Sequence

from s2rl.errors import ModelError
from s2rl.models.adapter import ModelAdapter
from s2rl.models.llama import LLAMA
from s2rl.models.qwen2_5_vl import QWEN2_5_VL
from s2rl.models.qwen3 import QWEN2, QWEN3
from s2rl.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from s2rl.models.qwen3_moe import QWEN3_MOE
from s2rl.models.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE

_ADAPTERS: tuple[ModelAdapter, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
)


def known_architectures() -> list[str]:
    """All architectures that can be trained, sorted."""
    return sorted(name for adapter in _ADAPTERS for name in adapter.architectures)


def adapter_for(architectures: Sequence[str] | None) -> tuple[ModelAdapter, str]:
    """The adapter for config.json's `architectures`, and the entry it was chosen by.

    Raises ModelError that lists what is known.
    """
    for architecture in architectures or ():
        for adapter in _ADAPTERS:
            if architecture in adapter.architectures:
                return adapter, architecture
    raise ModelError(
        f"model.path: architecture {', '.join(architectures or ()) or '(none in config.json)'} is not known; known are "
        f"{', '.join(known_architectures())}. To add one, write a ModelAdapter in s2rl/models/ and list it in "
        "s2rl/models/registry.py."
    )
