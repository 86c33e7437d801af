"""Small model folders in the layouts of published models, and checkpoints of them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from s2rl.ckpt import CheckpointStore

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}


def tied(folder: Path) -> None:
    """One file, bfloat16."""
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder)


def tied_and_stored(folder: Path) -> None:
    """The head is the embedding and in the file all the same."""
    tied(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def untied(folder: Path) -> None:
    """Head in float32 in a bfloat16 model, files that end anywhere, metadata of its own."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)
    model.lm_head.float()
    model.save_pretrained(folder, max_shard_size="20KB")
    for file in folder.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt", "made by": "a test", "file": file.name})


def per_expert(folder: Path) -> None:
    """Three matrices for each expert, over several files; one dense layer."""
    config = Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False, mlp_only_layers=[0])
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="15KB")


def fused_with_extras(folder: Path) -> None:
    """Fused experts; beside them what is never trained: per-expert prediction layers and a float32 table, in a file of
    their own that the index names, a file that it does not name, and files that are no weights."""
    config = Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    main = {n: t.contiguous() for n, t in model.state_dict().items()}
    extra = {f"mtp.layers.0.mlp.experts.{e}.up_proj.weight": torch.randn(24, 32).bfloat16() for e in range(5)}
    extra["model.time_series.encoder_embed.pos_encoder.pe"] = torch.randn(9, 4)
    save_file(main, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    save_file(extra, folder / "mtp.safetensors")
    save_file({"unnamed": torch.ones(3)}, folder / "adapter.safetensors")
    index = dict.fromkeys(main, "model-00001-of-00001.safetensors") | dict.fromkeys(extra, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    )
    (folder / "code").mkdir()
    (folder / "code" / "modeling_own.py").write_text("raise RuntimeError\n")
    (folder / "empty.txt").touch()


LAYOUTS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (tied, tied_and_stored, untied, per_expert, fused_with_extras)
}


def save_model(folder: Path, layout: str) -> Path:
    torch.manual_seed(3)
    folder.mkdir(parents=True)
    LAYOUTS[layout](folder)
    return folder


def masters_of(folder: Path) -> dict[str, torch.Tensor]:
    """What a learner would hold after loading: float32, by the model's own names, a tied head once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every parameter moved a little, as by training."""
    torch.manual_seed(8)
    return {name: p + 0.05 * torch.randn_like(p) for name, p in masters.items()}


def save_checkpoint(run: Path, masters: Mapping[str, torch.Tensor], *, step: int = 4) -> Path:
    """A complete checkpoint as the trainer leaves it."""
    store = CheckpointStore(run / "checkpoints", keep=2, config_digest="d")
    folder = store.begin(step)
    state: dict[str, Any] = {f"model.{n}": t for n, t in masters.items()} | {"version": torch.tensor(step)}
    state |= {f"optimizer.{n}.exp_avg": torch.zeros_like(t) for n, t in masters.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return store.commit(step, state={}, outstanding=())


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.is_file()
    }
