"""How the experts of mixture-of-experts models lie on disk.

In transformers 5 a layer's experts are two parameters, `gate_up_proj` [E, 2I, H] (gate rows first) and `down_proj`
[E, H, I], for E experts, expert width I and hidden size H. Folders hold them like this, transposed (Qwen3-VL-MoE), or
as three matrices for each expert. Which of these it is is read from the folder, tensor by tensor: the layers that train
and the ones beside them (multi-token prediction) may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from s2rl.models.adapter import StoredPart

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"


def stored_experts(
    name: str, shape: Sequence[int], *, disk: Collection[str], fused_transposed: bool = False
) -> tuple[StoredPart, ...] | None:
    """The tensors of an experts' parameter, or `None` when `name` is something else.

    `name` is already the name on disk of the fused form; `fused_transposed` says how this family stores that.
    """
    if not name.endswith((_GATE_UP, _DOWN)):
        return None
    if name in disk:
        return (StoredPart(name=name, transposed=fused_transposed),)
    prefix = name[: -len(_DOWN)] if name.endswith(_DOWN) else name[: -len(_GATE_UP)]
    if name.endswith(_DOWN):
        return tuple(StoredPart(name=f"{prefix}experts.{e}.down_proj.weight", index=(e,)) for e in range(shape[0]))
    half = shape[1] // 2
    return tuple(
        StoredPart(name=f"{prefix}experts.{e}.{kind}_proj.weight", index=(e, rows))
        for e in range(shape[0])
        for kind, rows in (("gate", slice(0, half)), ("up", slice(half, 2 * half)))
    )
