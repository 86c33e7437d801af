"""The folder that training began with, as the contract of an export."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from s2rl.config.disk import DiskTensor, read_header, read_layout
from s2rl.errors import ModelError

logger = logging.getLogger(__name__)

_NOT_PART = (".git", ".cache", "__pycache__")
"""Folders beside a model that version control and downloaders make for themselves."""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """What a model folder holds."""

    folder: Path
    tensors: Mapping[str, DiskTensor]
    """By name, of the files that the index names (or of the single file)."""
    files: tuple[str, ...]
    """Every file, relative to the folder, sorted. Links are followed: a downloader's cache holds nothing else."""

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Those of `files` that `tensors` are in."""
        return tuple(sorted({str(t.file.relative_to(self.folder)) for t in self.tensors.values()}))

    def tensors_of(self, file: str) -> list[DiskTensor]:
        """The tensors of one weight file, in the order of their bytes."""
        path = self.folder / file
        return sorted((t for t in self.tensors.values() if t.file == path), key=lambda t: t.start)


def read_source(folder: Path) -> SourceModel:
    """Read the headers of a model folder. Raises ModelError when it is none, damaged, or ambiguous."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give the model folder that training began with.")
    tensors = read_layout(folder)
    files = tuple(sorted(_walk(folder, "")))
    source = SourceModel(folder=folder, tensors=tensors, files=files)
    for file in source.weight_files:
        _check_gaps(source, file)
    for file in set(files) - set(source.weight_files):
        if file.endswith(".safetensors"):
            twice = sorted(read_header(folder / file)[1].keys() & tensors.keys())
            if twice:
                raise ModelError(
                    f"{folder / file} holds {twice[0]}, and {tensors[twice[0]].file.name} does too: which of them "
                    "is the model's cannot be told. Remove the file that does not belong there."
                )
        elif file.endswith(_OTHER_WEIGHTS):
            logger.warning("%s is copied as it is: if it holds weights of this model, they are not trained ones", file)
    return source


def _walk(folder: Path, prefix: str) -> list[str]:
    found: list[str] = []
    for entry in sorted((folder / prefix).iterdir()):
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            if entry.name not in _NOT_PART:
                found += _walk(folder, f"{name}/")
        elif entry.exists():
            found.append(name)
        else:
            raise ModelError(f"{entry} is a link to a file that is not there; download the model again.")
    return found


def _check_gaps(source: SourceModel, file: str) -> None:
    """Tensors of a file neither overlap nor disagree with their shapes."""
    end = 0
    for tensor in source.tensors_of(file):
        if tensor.start < end:
            raise ModelError(f"{source.folder / file} is damaged: {tensor.name} overlaps the tensor before it.")
        end = tensor.start + tensor.num_bytes
