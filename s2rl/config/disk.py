"""What a model folder's safetensors files hold, read from their headers alone: no tensor is loaded, no torch needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s2rl.errors import ModelError

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTensor:
    """One tensor in a safetensors file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """torch's name: `float32`, `bfloat16`, `float16`; the header's own name for types that weights do not have."""
    start: int
    """First byte of its data in the file."""
    num_bytes: int


def read_header(file: Path) -> tuple[int, Mapping[str, Any]]:
    """Length in bytes of everything before the data, and the parsed header of a safetensors file.

    Raises ModelError when the file cannot be read, is none, or is not as long as its header says.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, file.stat().st_size):
                raise ValueError(f"header length {length}")
            header: dict[str, Any] = json.loads(stream.read(length))
        end = max((int(e["data_offsets"][1]) for n, e in header.items() if n != "__metadata__"), default=0)
    except OSError as error:
        raise ModelError(f"model.path: cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"model.path: {file} is not a safetensors file or is damaged ({error}); download it again."
        ) from error
    if file.stat().st_size != 8 + length + end:
        raise ModelError(
            f"model.path: {file} is damaged: {file.stat().st_size} bytes, {8 + length + end} expected. Copy it anew."
        )
    return 8 + length, header


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Files to read, each with the names that the index expects in it (`None`: all that it has)."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ModelError(
                f"model.path: {folder} holds neither {_SINGLE} nor {_INDEX}; give a folder with safetensors weights, "
                "as `save_pretrained` writes it."
            )
        return {single: None}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str] | None] = {folder / str(file): set() for file in weight_map.values()}
        for name, file in weight_map.items():
            names = files[folder / str(file)]
            assert names is not None
            names.add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model.path: {index} cannot be read as a weight index ({error}).") from error
    return files


def read_layout(folder: Path) -> dict[str, DiskTensor]:
    """Every tensor of a model folder by name.

    Raises ModelError when weights are missing, damaged or cut short.
    """
    layout: dict[str, DiskTensor] = {}
    for file, expected in sorted(_files(folder).items()):
        data, header = read_header(file)
        absent = (expected or set()) - header.keys()
        if absent:
            raise ModelError(f"model.path: {file} lacks {sorted(absent)[0]}, which {_INDEX} puts there.")
        for name, entry in header.items():
            if name == "__metadata__" or (expected is not None and name not in expected):
                continue
            dtype = str(entry["dtype"])
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            layout[name] = DiskTensor(
                name=name,
                file=file,
                shape=shape,
                dtype=_TORCH_NAMES.get(dtype, dtype),
                start=data + begin,
                num_bytes=end - begin,
            )
    return layout
