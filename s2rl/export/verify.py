"""Compares a model folder with the one that it should have the format of, tensor by tensor and file by file."""

from __future__ import annotations

import enum
import filecmp
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from s2rl.ckpt import find_checkpoint
from s2rl.config.disk import DiskTensor, read_header
from s2rl.config.model_folder import architectures_of
from s2rl.errors import CheckpointError, ConfigError
from s2rl.export.masters import Masters, Trained, trained_tensors
from s2rl.export.source import SourceModel, read_source

_ROW_BYTES = 16 << 20


class Finding(enum.StrEnum):
    """What a tensor is in comparison with the source's."""

    IDENTICAL = "identical"
    TRAINED = "trained"
    """Other values, and nothing speaks against them."""
    MISSING = "missing"
    EXTRA = "extra"
    MOVED = "in another file"
    DTYPE = "dtype"
    SHAPE = "shape"
    ORIENTATION = "orientation suspect"
    """The last two dimensions have changed places."""
    NOT_FINITE = "not finite"
    NOT_TRAINED = "changed though not trained"
    DIFFERS = "differs from the checkpoint"

    @property
    def is_broken(self) -> bool:
        """Whether a promise of the export is broken."""
        return self not in (Finding.IDENTICAL, Finding.TRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor."""

    name: str
    finding: Finding
    detail: str = ""
    max_change: float = 0.0
    """Largest |difference| to the source."""
    mean_change: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """One comparison."""

    tensors: tuple[TensorReport, ...]
    files: Mapping[str, str]
    """Other files that break the promise, and how."""

    @property
    def is_broken(self) -> bool:
        """Whether anything is not as it should be."""
        return bool(self.files) or any(t.finding.is_broken for t in self.tensors)

    def count(self, finding: Finding) -> int:
        """Tensors with this finding."""
        return sum(t.finding is finding for t in self.tensors)


def verify_export(folder: Path, *, source: Path, ckpt: Path | None = None) -> VerifyReport:
    """Compare `folder` with `source`; with `ckpt` its trained tensors must hold exactly the checkpoint's values.

    Raises ModelError when either is no model folder or is damaged.
    """
    if folder.resolve() == source.resolve():
        raise ConfigError(f"{folder} is the source itself: give the exported folder.")
    original, found = read_source(source), read_source(folder)
    if ckpt is None:
        return _report(original, found, expected=None)
    checkpoint = find_checkpoint(ckpt)
    if checkpoint is None:
        raise CheckpointError(f"--ckpt {ckpt} is neither a checkpoint nor a run folder with a complete one.")
    with Masters(checkpoint.learner_dir) as masters:
        trained = trained_tensors(masters, original, architectures=architectures_of(source))
        return _report(original, found, expected=_Expected(masters=masters, trained=trained))


def _report(original: SourceModel, found: SourceModel, *, expected: _Expected | None) -> VerifyReport:
    names = sorted(original.tensors.keys() | found.tensors.keys())
    return VerifyReport(
        tensors=tuple(_compare(name, original, found, expected) for name in names),
        files=dict(_compare_files(original, found)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """The values that a checkpoint gives the trained tensors."""

    masters: Masters
    trained: Mapping[str, Trained]

    def holds(self, tensor: DiskTensor) -> bool:
        """Whether a tensor on disk has exactly the checkpoint's values, in its own type."""
        entry, position = self.trained[tensor.name], tensor.start
        with tensor.file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with mapped, memoryview(mapped) as view:
            for values in self.masters.values(entry.parameter, entry.part):
                rows = values.unsqueeze(0) if values.ndim == 0 else values
                step = max(1, _ROW_BYTES * rows.shape[0] // max(1, 4 * rows.numel()))
                for first in range(0, rows.shape[0], step):
                    cast = rows[first : first + step].to(getattr(torch, tensor.dtype)).contiguous()
                    wanted = cast.view(-1).view(torch.uint8).numpy()
                    with view[position : position + len(wanted)] as block:
                        if not np.array_equal(np.frombuffer(block, np.uint8), wanted):
                            return False
                    position += len(wanted)
        return position == tensor.start + tensor.num_bytes


def _compare(name: str, original: SourceModel, found: SourceModel, expected: _Expected | None) -> TensorReport:
    before, after = original.tensors.get(name), found.tensors.get(name)
    if before is None or after is None:
        return TensorReport(name=name, finding=Finding.EXTRA if before is None else Finding.MISSING)
    if before.dtype != after.dtype:
        return TensorReport(name=name, finding=Finding.DTYPE, detail=f"{before.dtype} -> {after.dtype}")
    if before.shape != after.shape:
        swapped = (*before.shape[:-2], *before.shape[:-3:-1]) == after.shape
        finding = Finding.ORIENTATION if swapped else Finding.SHAPE
        return TensorReport(name=name, finding=finding, detail=f"{list(before.shape)} -> {list(after.shape)}")
    places = [str(t.file.relative_to(m.folder)) for t, m in ((before, original), (after, found))]
    if places[0] != places[1]:
        return TensorReport(name=name, finding=Finding.MOVED, detail=" -> ".join(places))
    return _compare_values(before, after, expected)


def _compare_values(before: DiskTensor, after: DiskTensor, expected: _Expected | None) -> TensorReport:
    name = before.name
    if expected is not None and name in expected.trained and not expected.holds(after):
        return _changes(before, after, Finding.DIFFERS)
    identical = all(_same(a, b) for (_, a), (_, b) in zip(_blocks(before), _blocks(after), strict=True))
    if identical:
        return TensorReport(name=name, finding=Finding.IDENTICAL)
    if expected is not None and name not in expected.trained:
        return _changes(before, after, Finding.NOT_TRAINED)
    return _changes(before, after, Finding.TRAINED)


def _changes(before: DiskTensor, after: DiskTensor, finding: Finding) -> TensorReport:
    """The report of a tensor whose bytes differ."""
    if before.dtype not in ("float64", "float32", "bfloat16", "float16"):
        return TensorReport(name=before.name, finding=finding, detail=f"{before.dtype}, other bytes")
    dtype = getattr(torch, before.dtype)
    largest, total, count, finite = 0.0, 0.0, 0, True
    for (_, a), (_, b) in zip(_blocks(before), _blocks(after), strict=True):
        old, new = (torch.frombuffer(bytearray(x), dtype=dtype).double() for x in (a, b))
        finite &= bool(torch.isfinite(new).all())
        difference = (new - old).abs()
        largest, total, count = max(largest, float(difference.max())), total + float(difference.sum()), count + len(new)
    if not finite and finding is Finding.TRAINED:
        finding = Finding.NOT_FINITE
    return TensorReport(name=before.name, finding=finding, max_change=largest, mean_change=total / max(1, count))


def _same(first: memoryview, second: memoryview) -> bool:
    """Byte by byte; numpy compares many at once, memoryview does not."""
    return bool(np.array_equal(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)))


def _blocks(tensor: DiskTensor) -> Iterator[tuple[int, memoryview]]:
    """A tensor's bytes in blocks, each with its offset in the tensor. A block is valid until the next one."""
    if not tensor.num_bytes:
        return
    with tensor.file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped, memoryview(mapped) as view:
        for offset in range(0, tensor.num_bytes, _ROW_BYTES):
            end = min(offset + _ROW_BYTES, tensor.num_bytes)
            with view[tensor.start + offset : tensor.start + end] as block:
                yield offset, block


def _compare_files(original: SourceModel, found: SourceModel) -> Iterator[tuple[str, str]]:
    weights = set(original.weight_files)
    for file in sorted({*original.files, *found.files}):
        if file not in found.files:
            yield file, "missing"
        elif file not in original.files:
            yield file, "extra"
        elif file not in weights:
            if not filecmp.cmp(original.folder / file, found.folder / file, shallow=False):
                yield file, "other content"
        elif read_header(original.folder / file)[1].get("__metadata__") != read_header(found.folder / file)[1].get(
            "__metadata__"
        ):
            yield file, "other metadata in the header"
