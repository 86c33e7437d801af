"""From the tensors of transformers' class to those on disk, and the ones that only exist on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from s2rl.models.small.families import Family

if TYPE_CHECKING:
    import torch

_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<matrix>gate_up_proj|down_proj)")


def stored_tensors(
    family: Family, *, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """All tensors of a folder by their names there, each with its dtype on disk and memory of its own.

    `weights` has the names and shapes of transformers 5's class. The tensors that the class lacks (`mtp.*`,
    `model.time_series.*`) are drawn from `seed`. A tied output head is left out.
    """
    import torch

    tied = bool(config.get("tie_word_embeddings"))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not (tied and name == "lm_head.weight"):
            stored.update(_on_disk(family, name, tensor))
    extra = torch.Generator().manual_seed(seed + 1)
    if family.mtp:
        stored.update(_mtp(config["text_config"], kind=family.mtp, generator=extra))
    if family.time_series:
        stored.update(_time_series(config["text_config"]["hidden_size"], generator=extra))
    return {
        name: tensor.detach().to(torch.float32 if name.endswith(family.fp32) else torch.bfloat16).clone().contiguous()
        for name, tensor in stored.items()
    }


def _on_disk(family: Family, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if family.layout == "qwen2_5_vl":
        name = re.sub(r"^model\.language_model\.", "model.", re.sub(r"^model\.visual\.", "visual.", name))
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is None or family.layout in ("as_is", "qwen2_5_vl"):
        yield name, tensor
    elif family.layout == "transposed":
        yield name, tensor.transpose(1, 2)
    else:
        yield from _per_expert(fused["prefix"], fused["matrix"], tensor)


def _per_expert(prefix: str, matrix: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """[E, 2I, H] or [E, H, I] as the matrices of single experts, gate rows first."""
    for n, expert in enumerate(tensor):
        if matrix == "gate_up_proj":
            gate, up = expert.chunk(2)
            yield f"{prefix}.{n}.gate_proj.weight", gate
            yield f"{prefix}.{n}.up_proj.weight", up
        else:
            yield f"{prefix}.{n}.down_proj.weight", expert


def _mtp(text: Mapping[str, Any], *, kind: str, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """One layer that predicts the token after the next one: a full-attention layer of the same sizes."""
    hidden, head = text["hidden_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * q, hidden),  # with the output gate
        "layers.0.self_attn.k_proj.weight": (kv, hidden),
        "layers.0.self_attn.v_proj.weight": (kv, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, q),
        "layers.0.self_attn.q_norm.weight": (head,),
        "layers.0.self_attn.k_norm.weight": (head,),
    }
    if kind == "dense":
        shapes |= _mlp("layers.0.mlp", hidden, text["intermediate_size"])
    else:
        shapes |= _mlp("layers.0.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
        shapes["layers.0.mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes["layers.0.mlp.gate.weight"] = (text["num_experts"], hidden)
    for name, shape in shapes.items():
        yield f"mtp.{name}", _drawn(shape, generator)
    if kind == "dense":
        return
    experts, inner = text["num_experts"], text["moe_intermediate_size"]
    for matrix, shape in (("gate_up_proj", (experts, 2 * inner, hidden)), ("down_proj", (experts, hidden, inner))):
        tensor = _drawn(shape, generator)
        if kind == "fused":
            yield f"mtp.layers.0.mlp.experts.{matrix}", tensor
        else:
            yield from _per_expert("mtp.layers.0.mlp.experts", matrix, tensor)


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _time_series(hidden: int, *, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Stands in for Intern-S2-Preview's tower for time series: never run here, only carried along.

    Of the real one's names only the prefix and that of the table of positions are known; the others are made up.
    """
    inner, ffn, positions = 48, 80, 128
    shapes: dict[str, tuple[int, ...]] = {
        "encoder_embed.pos_encoder.pe": (positions, 1, inner),
        "encoder_embed.conv1.weight": (inner, 1, 3),
        "encoder_embed.conv1.bias": (inner,),
        "layer_norm.weight": (inner,),
        "layer_norm.bias": (inner,),
        "projector.linear_1.weight": (hidden, inner),
        "projector.linear_1.bias": (hidden,),
    }
    for layer in range(2):
        prefix = f"encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (inner, inner)
        shapes[f"{prefix}.fc1.weight"] = (ffn, inner)
        shapes[f"{prefix}.fc2.weight"] = (inner, ffn)
    for name, shape in shapes.items():
        yield f"model.time_series.{name}", _drawn(shape, generator)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=generator) * 0.05
