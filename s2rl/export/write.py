"""Writes an export: every byte from the source, except those of trained tensors.

A weight file is made as long as its source; its header and everything that was not trained are copied; each trained
tensor is written to its place, cast from the float32 master to the type that the source's header gives it. So nothing
can change keys, order, shapes, types or metadata, and a training of zero steps gives the source itself.

Files are written into a folder beside the target, which takes the target's name when all of them are on disk. A second
start finds the files that are complete and goes on with the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from s2rl.ckpt import CheckpointInfo, find_checkpoint, verify
from s2rl.config import load_config
from s2rl.config.disk import DiskTensor
from s2rl.config.model_folder import architectures_of
from s2rl.errors import CheckpointError, ConfigError, S2rlError, StorageError
from s2rl.export.masters import Masters, Trained, trained_tensors
from s2rl.export.source import SourceModel, read_source

logger = logging.getLogger(__name__)

_COPY_BYTES = 8 << 20
_CAST_BYTES = 4 << 20
"""Of float32 values that are cast and written at a time: what stays in a core's cache."""
_STATE = ".s2rl-export.json"
"""In the unfinished folder: what it is an export of."""

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all, from several threads, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """What was written."""

    out: Path
    num_files: int
    num_bytes: int
    num_trained: int
    """Tensors filled from the checkpoint."""
    num_copied: int
    """Tensors copied from the source."""
    num_kept: int
    """Files that an earlier, interrupted export had completed."""


def export_model(
    ckpt: Path,
    *,
    out: Path,
    source: Path | None = None,
    allow_nonfinite: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
) -> ExportResult:
    """Write the model of a checkpoint (or of a run's last one) to the new folder `out`, in the format of `source`.

    `source` is the folder that training began with; the run's `model.path` when not given. Needs no accelerator and
    reads a few rows at a time: its memory does not grow with the model.

    Raises CheckpointError, ModelError, ConfigError or StorageError; `out` exists afterwards only when it is complete.
    """
    checkpoint = find_checkpoint(ckpt)
    if checkpoint is None:
        raise CheckpointError(f"--ckpt {ckpt} is neither a checkpoint nor a run folder with a complete one.")
    folder = source if source is not None else load_config(checkpoint.run_dir / "config.yaml").model.path
    model = read_source(folder)
    _check_out(out, model.folder)
    verify(checkpoint)
    with Masters(checkpoint.learner_dir) as masters:
        trained = trained_tensors(masters, model, architectures=architectures_of(folder))
        partial = out.absolute().with_name(f".{out.absolute().name}.partial")
        with _reported(partial):
            kept = _prepare(partial, checkpoint, model)
            _check_room(partial, model, kept)
            job = _Job(
                model=model,
                masters=masters,
                trained=trained,
                partial=partial,
                allow_nonfinite=allow_nonfinite,
                meter=_Meter(model, progress),
            )
            job.run(kept, workers=workers)
            (partial / _STATE).unlink()
            for directory in sorted({p.parent for p in partial.rglob("*")} | {partial}):
                _sync(directory)
            if out.is_dir():
                out.rmdir()  # empty, as checked
            partial.rename(out.absolute())
            _sync(out.absolute().parent)
    return ExportResult(
        out=out,
        num_files=len(model.files),
        num_bytes=sum((model.folder / f).stat().st_size for f in model.files),
        num_trained=len(trained),
        num_copied=len(model.tensors) - len(trained),
        num_kept=len(kept),
    )


class _Meter:
    """Bytes written so far."""

    def __init__(self, model: SourceModel, progress: Progress | None) -> None:
        self._total = sum((model.folder / file).stat().st_size for file in model.files)
        self._done, self._progress, self._lock = 0, progress, threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    model: SourceModel
    masters: Masters
    trained: Mapping[str, Trained]
    partial: Path
    allow_nonfinite: bool
    meter: _Meter

    def run(self, kept: Sequence[str], *, workers: int) -> None:
        """Write every file that is not in `kept`. The first error ends all."""
        weights = set(self.model.weight_files)
        for file in kept:
            self.meter.add((self.model.folder / file).stat().st_size)
        # Largest first, so that no thread is left with a large one in the end.
        files = sorted(set(self.model.files) - set(kept), key=lambda f: -(self.model.folder / f).stat().st_size)
        stop = threading.Event()

        def write(file: str) -> None:
            if stop.is_set():
                return
            try:
                self._write(file, is_weights=file in weights, stop=stop)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            futures = [pool.submit(write, file) for file in files]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                stop.set()
                raise

    def _write(self, file: str, *, is_weights: bool, stop: threading.Event) -> None:
        target = self.partial / file
        draft = target.with_name(f"{target.name}.part")
        target.parent.mkdir(parents=True, exist_ok=True)
        with (self.model.folder / file).open("rb") as reader, draft.open("wb") as writer:
            mode = os.fstat(reader.fileno()).st_mode
            size = os.fstat(reader.fileno()).st_size
            tensors = self.model.tensors_of(file) if is_weights else []
            if size:
                os.posix_fallocate(writer.fileno(), 0, size)
            for start, end in _untouched(size, [t for t in tensors if t.name in self.trained]):
                self._copy(reader.fileno(), writer.fileno(), start, end, stop)
            self._fill(writer.fileno(), [t for t in tensors if t.name in self.trained], stop)
            if stop.is_set():  # then the loops above may have ended early: this file is not complete
                return
            os.fchmod(writer.fileno(), mode & 0o777)
            os.fsync(writer.fileno())
        draft.rename(target)

    def _copy(self, reader: int, writer: int, start: int, end: int, stop: threading.Event) -> None:
        while start < end and not stop.is_set():
            data = os.pread(reader, min(_COPY_BYTES, end - start), start)
            if not data:
                raise StorageError(f"{self.model.folder} changed while it was read: a file became shorter.")
            _write_all(writer, memoryview(data), start)
            start += len(data)
            self.meter.add(len(data))

    def _fill(self, writer: int, tensors: Sequence[DiskTensor], stop: threading.Event) -> None:
        """Write the trained tensors of one file."""
        for tensor in tensors:
            if stop.is_set():
                return
            entry = self.trained[tensor.name]
            offset = tensor.start
            for values in self.masters.values(entry.parameter, entry.part):
                offset = self._put(writer, tensor, values, offset=offset)
            assert offset == tensor.start + tensor.num_bytes

    def _put(self, writer: int, tensor: DiskTensor, values: torch.Tensor, *, offset: int) -> int:
        """Write some rows of a tensor at `offset`, a few at a time: no copy of all exists; where they end."""
        rows = values.unsqueeze(0) if values.ndim == 0 else values
        step = max(1, _CAST_BYTES * rows.shape[0] // max(1, 4 * rows.numel()))
        for first in range(0, rows.shape[0], step):
            part = rows[first : first + step].to(getattr(torch, tensor.dtype)).contiguous()
            if not self.allow_nonfinite and not _is_finite(part):
                raise CheckpointError(
                    f"{tensor.name} of the checkpoint holds values that are not finite in {tensor.dtype}: the model is "
                    "broken. Export an earlier checkpoint, or give --allow-nonfinite to write it all the same."
                )
            data = part.view(-1).view(torch.uint8).numpy().data if part.numel() else memoryview(b"")
            _write_all(writer, data, offset)
            offset += len(data)
            self.meter.add(len(data))
        return offset


def _is_finite(values: torch.Tensor) -> bool:
    """A sum passes NaN and infinities on, and takes one pass; the rest is for sums that overflow by themselves."""
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())


def _untouched(size: int, trained: Sequence[DiskTensor]) -> Iterator[tuple[int, int]]:
    """The byte ranges of a file that are copied."""
    position = 0
    for tensor in trained:
        if tensor.start > position:
            yield position, tensor.start
        position = tensor.start + tensor.num_bytes
    if position < size:
        yield position, size


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _check_out(out: Path, source: Path) -> None:
    target, original = out.resolve(), source.resolve()
    if target == original or original in target.parents or target in original.parents:
        raise ConfigError(f"--out {out}: this is the source model's own folder, or around it; give another one.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out} exists and is no folder; give another name.")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; give a new folder.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}; make it first.")


def _prepare(partial: Path, checkpoint: CheckpointInfo, model: SourceModel) -> list[str]:
    """Make the unfinished folder, or take over the one of the same export; the files that are complete in it."""
    identity = {
        "checkpoint": str(checkpoint.path.resolve()),
        "marker": (checkpoint.path / "COMPLETE").read_text(encoding="utf-8"),
        "source": str(model.folder.resolve()),
        "files": {f: [(s := (model.folder / f).stat()).st_size, s.st_mtime_ns] for f in model.files},
    }
    state = partial / _STATE
    if partial.exists():
        try:
            same = json.loads(state.read_text(encoding="utf-8")) == json.loads(json.dumps(identity))
        except (OSError, ValueError):
            same = False
        if same:
            return [f for f in model.files if (partial / f).is_file()]
        if not state.exists() and any(partial.iterdir()):
            raise ConfigError(f"{partial} holds files that no export wrote; move it away.")
        shutil.rmtree(partial)
    partial.mkdir()
    state.write_text(json.dumps(identity), encoding="utf-8")
    return []


def _check_room(partial: Path, model: SourceModel, kept: Sequence[str]) -> None:
    needed = sum((model.folder / f).stat().st_size for f in set(model.files) - set(kept))
    for leftover in partial.rglob("*.part"):
        leftover.unlink()
    free = shutil.disk_usage(partial).free
    if needed > free:
        if not kept:
            shutil.rmtree(partial)
        raise StorageError(
            f"the export takes {needed / 2**20:,.0f} MiB and {partial.parent} has {free / 2**20:,.0f} MiB free; make "
            "room, or give --out on another disk."
        )


@contextlib.contextmanager
def _reported(partial: Path) -> Iterator[None]:
    """Name the folder in errors of the file system."""
    try:
        yield
    except S2rlError:
        raise
    except OSError as error:
        what = error.filename or partial
        raise StorageError(
            f"the export could not be written: {what}: {error.strerror or error} ({_free(partial)}). What is "
            f"complete is kept in {partial}; make room or mend the folder's rights and run the same command again."
        ) from error


def _free(path: Path) -> str:
    existing = next(p for p in (path, *path.parents) if p.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB free"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
