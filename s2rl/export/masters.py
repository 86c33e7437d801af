"""The trained parameters of a checkpoint, read a few rows at a time."""

from __future__ import annotations

import io
import math
import os
import struct
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
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
_READ_BYTES = 4 << 20


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
            metadata = dcp.FileSystemReader(folder).read_metadata()
        # A damaged pickle can raise anything.
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{folder} cannot be read as a checkpoint: {type(error).__name__}: {error}"
            ) from error
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key.removeprefix(_PREFIX): tuple(entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        if not self.shapes:
            raise CheckpointError(f"{folder} holds no model parameters.")
        self._places: dict[str, list[tuple[Any, Any]]] = {}
        for index, place in metadata.storage_data.items():
            self._places.setdefault(index.fqn, []).append((index, place))
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._located: dict[str, list[_Shard]] = {}

    def values(self, name: str, part: StoredPart) -> Iterator[Tensor]:
        """What `part` of a parameter holds, float32 in the orientation of the tensor on disk, some rows at a time.

        Concatenated over dimension 0 they are the tensor. Raises CheckpointError when a file is damaged.
        """
        shards = self._shards(name)
        if part.index and isinstance(part.index[0], int):
            row = part.index[0]
            shard = next(s for s in shards if s.first_row <= row < s.first_row + s.shape[0])
            within = part.index[1] if len(part.index) > 1 else slice(None)
            assert isinstance(within, slice) and within.step is None and len(part.index) <= 2
            first, end, _ = within.indices(shard.shape[1])
            matrix = shard.read(row - shard.first_row, 1, within=(first, end))[0]
            yield matrix.transpose(-1, -2) if part.transposed else matrix
            return
        for shard in shards:
            step = max(1, _READ_BYTES // max(1, shard.row_bytes))
            for first in range(0, shard.shape[0], step):
                yield part.of(shard.read(first, min(step, shard.shape[0] - first)))

    def __enter__(self) -> Masters:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _shards(self, name: str) -> list[_Shard]:
        """The ranks' rows of a parameter, in order."""
        with self._lock:
            if name not in self._located:
                self._located[name] = self._locate(name)
            return self._located[name]

    def _locate(self, name: str) -> list[_Shard]:
        key, shape = _PREFIX + name, self.shapes[name] or (1,)
        shards = []
        for index, place in self._places[key]:
            offset = tuple(index.offset or ()) or (0,)
            meta, start = self._find(place, key)
            rows = tuple(meta.shape) or (1,)
            if any(offset[1:]) or rows[1:] != shape[1:] or meta.dtype is not torch.float32:
                raise CheckpointError(
                    f"{self._folder}: {name} is not stored as float32 rows, as the learner writes it, but as "
                    f"{meta.dtype} {list(rows)} at {list(offset)}."
                )
            shards.append(
                _Shard(descriptor=self._open(place.relative_path), start=start, first_row=offset[0], shape=rows)
            )
        shards.sort(key=lambda shard: shard.first_row)
        ends = [0, *(shard.first_row + shard.shape[0] for shard in shards)]
        if [shard.first_row for shard in shards] != ends[:-1] or ends[-1] != shape[0]:
            raise CheckpointError(f"{self._folder} is incomplete: rows of {name} are missing or stored twice.")
        return shards

    def _find(self, place: Any, key: str) -> tuple[Tensor, int]:
        """Shape and type of a stored tensor, and where in its file the values begin.

        torch writes each tensor as an archive of its own, in which the values lie uncompressed.
        """
        try:
            stream = _Window(self._open(place.relative_path), place.offset, place.length)
            meta: Tensor = torch.load(stream, map_location="meta", weights_only=True)  # type: ignore[arg-type]
            with zipfile.ZipFile(stream) as archive:
                (record,) = (r for r in archive.infolist() if "/data/" in r.filename)
            size = meta.numel() * meta.element_size()
            if record.compress_type != zipfile.ZIP_STORED or not meta.is_contiguous() or record.file_size != size:
                raise ValueError("not a plain contiguous tensor")
            stream.seek(record.header_offset + 26)  # lengths of name and extra field, behind which the data begin
            lengths = struct.unpack("<HH", stream.read(4))
        # A damaged archive can raise anything.
        except Exception as error:
            raise CheckpointError(
                f"{self._folder / place.relative_path} is damaged at {key}: {type(error).__name__}: {error}"
            ) from error
        return meta, place.offset + record.header_offset + 30 + sum(lengths)

    def _open(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(self._folder / file, os.O_RDONLY)
        return self._files[file]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """Rows of a parameter in a file."""

    descriptor: int
    start: int
    first_row: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return 4 * math.prod(self.shape[1:])

    def read(self, first: int, count: int, *, within: tuple[int, int] | None = None) -> Tensor:
        """Rows from number `first` of the shard on; with `within`, of a single row that range of dimension 1."""
        shape, position = (count, *self.shape[1:]), self.start + first * self.row_bytes
        if within is not None:
            assert count == 1
            shape = (1, within[1] - within[0], *self.shape[2:])
            position += within[0] * 4 * math.prod(self.shape[2:])
        buffer = torch.empty(shape)
        size = 4 * buffer.numel()
        view = memoryview(buffer.view(-1).view(torch.uint8).numpy()) if size else memoryview(b"")  # type: ignore[arg-type]
        while view:
            got = os.preadv(self.descriptor, [view], position)
            if not got:
                raise CheckpointError("a file of the checkpoint became shorter while it was read.")
            view, position = view[got:], position + got
        return buffer


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = max(0, min(len(buffer), self._length - self._position))
        count = os.preadv(self._descriptor, [memoryview(buffer)[:room]], self._offset + self._position) if room else 0
        self._position += count
        return count


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
