"""Small model folders: transformers and its processors read them back, and the layouts on disk are the real ones."""

import hashlib
import json

import pytest
import torch
import transformers
from safetensors import safe_open

from s2rl.errors import ModelError
from s2rl.models import read_layout
from s2rl.models.small import SMALL_FAMILIES, save_small_model

NATIVE = tuple(family for family in SMALL_FAMILIES if family != "intern_s2_preview")


def _digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", NATIVE)
def test_transformers_finds_every_tensor_of_its_class(family, tmp_path):
    made = save_small_model(tmp_path, family=family)
    model_class = getattr(transformers, made.architecture)
    _, report = model_class.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(key.startswith("mtp.") for key in report["unexpected_keys"])


@pytest.mark.parametrize("family", ["qwen3", "intern_s2_preview"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(family, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_small_model(tmp_path / name, family=family, seed=seed)
    first, again, other = (_digests(tmp_path / name) for name in "abc")
    assert first == again
    changed = {name for name in first if first[name] != other[name]}
    assert changed
    assert all(name.endswith(".safetensors") for name in changed)


def test_sizes_tell_orientations_apart_and_fused_experts_are_stored_as_on_the_hub(tmp_path):
    made = save_small_model(tmp_path, family="qwen3_vl_moe")
    text = made.config["text_config"]
    hidden, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    assert hidden not in (inner, 2 * inner)
    layout = read_layout(tmp_path)
    assert layout["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (experts, hidden, 2 * inner)
    assert layout["model.language_model.layers.0.mlp.experts.down_proj"].shape == (experts, inner, hidden)


def test_intern_s2_preview_keeps_its_mixed_layout_and_fp32_tensors(tmp_path):
    made = save_small_model(tmp_path, family="intern_s2_preview")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(made.names)
    fp32 = set()
    for name, file in index.items():
        with safe_open(tmp_path / file, framework="pt") as reader:
            if reader.get_slice(name).get_dtype() == "F32":
                fp32.add(name)
    assert {"lm_head.weight", "model.time_series.encoder_embed.pos_encoder.pe"} <= fp32
    others = fp32 - {"lm_head.weight", "model.time_series.encoder_embed.pos_encoder.pe"}
    assert all(name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) for name in others)
    assert "mtp.layers.0.mlp.experts.7.down_proj.weight" in index
    assert "model.language_model.layers.0.mlp.experts.down_proj" in index


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_moe"])
def test_the_processor_expands_an_image_into_its_placeholders(family, tmp_path):
    from PIL import Image

    made = save_small_model(tmp_path, family=family)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many shapes?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    out = processor(text=[text], images=[Image.new("RGB", (128, 96))], return_tensors="pt")
    grid = out["image_grid_thw"][0]
    placeholders = int((out["input_ids"] == made.config["image_token_id"]).sum())
    assert placeholders == int(grid.prod()) // 4
    assert len(out["pixel_values"]) == int(grid.prod())


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"qwen9.*qwen3_vl_moe"):
        save_small_model(tmp_path, family="qwen9")
    assert not list(tmp_path.iterdir())
