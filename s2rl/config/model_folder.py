"""What a model folder says of itself, read without torch: config.json and the headers of the safetensors files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s2rl.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MAX_HEADER_BYTES = 100_000_000


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
    num_parameters = num_bytes = 0
    for file in _weight_files(folder):
        header = _read_header(file)
        for name, entry in header.items():
            if name != "__metadata__":
                num_parameters += math.prod(entry["shape"])
                num_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    return ModelFacts(
        model_type=model_type,
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        max_positions=None if text.get("rope_scaling") else _integer(text, "max_position_embeddings"),
        vocab_size=_integer(text, "vocab_size"),
        kv_values_per_token=_kv_values(text),
    )


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


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"model.path: {index} has no weight_map")
        files = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"model.path: {folder} lacks {', '.join(missing[:3])}, which its index names. Copy the folder anew."
        )
    if not files:
        raise ModelError(f"model.path: {folder} holds no *.safetensors weights; other weight formats are not read")
    return files


def _read_header(file: Path) -> Mapping[str, Any]:
    """The JSON header of a safetensors file, checked against the file's length."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"model.path: {file} is not a safetensors file ({error}). Copy it anew.") from None
    if 8 + length + end != size:
        raise ModelError(
            f"model.path: {file} has {size} bytes where its header promises {8 + length + end}: it is cut off or "
            "damaged. Copy it anew."
        )
    return header


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
