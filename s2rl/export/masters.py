"""The trained parameters of a checkpoint, read a few at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from s2rl.errors import CheckpointError, ModelError
from s2rl.export.source import SourceModel
from s2rl.models import StoredPart, adapter_for

_PREFIX = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Where the values of one tensor on disk come from."""

    parameter: str
    part: StoredPart


class Masters:
    """Float32 parameters by name, as the learner's ranks wrote them together; whatever their number, each is whole."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the learner's part of a checkpoint. Raises CheckpointError when it cannot be read."""
        self._folder = folder
        try:
            metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        # A damaged pickle can raise anything.
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{folder} cannot be read as a checkpoint: {type(error).__name__}: {error}"
            ) from error
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key.removeprefix(_PREFIX): tuple(entry.size)
            for key, entry in metadata.items()
            if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        if not self.shapes:
            raise CheckpointError(f"{folder} holds no model parameters.")

    def num_bytes(self, name: str) -> int:
        """Bytes of a parameter in memory."""
        return 4 * math.prod(self.shapes[name])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The parameters, float32 on the CPU. Raises CheckpointError when the files are damaged."""
        state: dict[str, Any] = {_PREFIX + name: torch.empty(self.shapes[name]) for name in names}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is asked to be
                dcp.load(state, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{self._folder} cannot be read: {type(error).__name__}: {error}") from error
        return {key.removeprefix(_PREFIX): tensor for key, tensor in state.items()}

    def batches(self, names: Sequence[str], *, max_bytes: int) -> Iterator[list[str]]:
        """`names` in groups of at most `max_bytes`; a larger parameter is a group of its own."""
        batch: list[str] = []
        used = 0
        for name in names:
            size = self.num_bytes(name)
            if batch and used + size > max_bytes:
                yield batch
                batch, used = [], 0
            batch.append(name)
            used += size
        if batch:
            yield batch


def trained_tensors(masters: Masters, source: SourceModel, *, architectures: Sequence[str]) -> dict[str, Trained]:
    """Which tensors of `source` are filled from which parameter, by name on disk.

    Raises CheckpointError when checkpoint and source do not belong together.
    """
    adapter, _ = adapter_for(architectures)
    trained: dict[str, Trained] = {}
    for name, shape in masters.shapes.items():
        # A parameter of a checkpoint is stored by itself, so it is never a tied one.
        for part in adapter.stored(name, shape, tied=False, disk=source.tensors.keys()):
            stored = source.tensors.get(part.name)
            if stored is None:
                raise CheckpointError(
                    f"the checkpoint has {name}, but {source.folder} has no {part.name}: give the model folder that "
                    "this run was trained from."
                )
            expected = tuple(part.of(torch.empty(shape, device="meta")).shape)
            if expected != stored.shape:
                raise CheckpointError(
                    f"the checkpoint's {part.name} has shape {list(expected)}, in {source.folder} it is "
                    f"{list(stored.shape)}: give the model folder that this run was trained from."
                )
            if stored.dtype not in ("float32", "bfloat16", "float16"):
                raise ModelError(f"{source.folder}: {part.name} is stored as {stored.dtype}, which cannot be written.")
            trained[part.name] = Trained(parameter=name, part=part)
    _add_tied_head(trained, source)
    return trained


def _add_tied_head(trained: dict[str, Trained], source: SourceModel) -> None:
    """A head that is tied to the embedding but stored all the same must not keep the old values.

    A head that is a parameter of its own is in the checkpoint; one that is not there was the embedding in training.
    """
    head = source.tensors.get("lm_head.weight")
    if head is None or head.name in trained:
        return
    for name, entry in list(trained.items()):
        if name.endswith("embed_tokens.weight") and source.tensors[name].shape == head.shape:
            trained[head.name] = entry
