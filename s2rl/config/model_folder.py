"""What a model folder says of itself, read without torch: config.json and the headers of the safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s2rl.config.disk import read_layout
from s2rl.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes that budgets are checked against. Numbers that config.json does not give are None."""

    model_type: str
    num_parameters: int
    num_bytes: int
    max_positions: int | None
    vocab_size: int | None
    kv_values_per_token: int | None
    """Keys and values of one token over all layers, in numbers (not bytes)."""


def inspect_model(folder: Path) -> ModelFacts:
    """Read a model folder. Raises `ModelError` when it is none, or when a weight file is missing or damaged."""
    if not folder.is_dir():
        hint = (
            "" if folder.exists() else " Weights are not downloaded here: put a Hugging Face model folder there first."
        )
        raise ModelError(f"model.path: {folder} is not a folder.{hint}")
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(
            f"model.path: {folder / 'config.json'} names no model_type; is this a Hugging Face model folder?"
        )
    layout = read_layout(folder)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    return ModelFacts(
        model_type=model_type,
        num_parameters=sum(math.prod(tensor.shape) for tensor in layout.values()),
        num_bytes=sum(file.stat().st_size for file in {tensor.file for tensor in layout.values()}),
        max_positions=None if text.get("rope_scaling") else _integer(text, "max_position_embeddings"),
        vocab_size=_integer(text, "vocab_size"),
        kv_values_per_token=_kv_values(text),
    )


def architectures_of(folder: Path) -> tuple[str, ...]:
    """Entries of `architectures` in config.json; none when it names none."""
    found = _read_json(folder / "config.json").get("architectures")
    return tuple(str(name) for name in found) if isinstance(found, list) else ()


def takes_images(folder: Path) -> bool:
    """Whether config.json describes a vision tower."""
    return (folder / "config.json").is_file() and isinstance(
        _read_json(folder / "config.json").get("vision_config"), dict
    )


def image_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that stand for positions of images and videos in prompts, and that a completion must not have."""
    if not takes_images(folder):
        return ()
    config = _read_json(folder / "config.json")
    found = (_integer(config, name) for name in ("image_token_id", "video_token_id"))
    return tuple(token_id for token_id in found if token_id is not None)


def check_tokenizer(folder: Path, *, key: str) -> None:
    """Raise `ModelError` when a folder holds no tokenizer files."""
    if not folder.is_dir():
        raise ModelError(f"{key}: {folder} is not a folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{key}: {folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Set model.tokenizer to a folder that does."
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.path: {file.parent} is not a model folder: it has no {file.name}") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"model.path: {file} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"model.path: {file} is not a JSON object")
    return data


def _integer(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _kv_values(config: Mapping[str, Any]) -> int | None:
    layers, heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    if layers is None or heads is None or hidden is None:
        return None
    kv_heads = _integer(config, "num_key_value_heads") or heads
    head_dim = _integer(config, "head_dim") or hidden // heads
    kinds = config.get("layer_types")
    if isinstance(kinds, list):  # linear-attention layers hold a state of fixed size instead
        layers = sum(1 for kind in kinds if "linear" not in str(kind))
    return 2 * layers * kv_heads * head_dim
