"""The checkpoint folders of a run.

    checkpoints/step_00000012/
        learner/                  weights, optimizer, schedule, RNG: written by the learner ranks (DCP)
        trainer.json              step, counters, data cursor, queue counts
        outstanding.json          prompts drawn and not yet trained ...
        outstanding.safetensors   ... and the tokens of those that were finished
        manifest.json             size and checksum of every file, configuration digest, library versions
        COMPLETE                  checksum of the manifest; written last

A checkpoint grows in `step_N.partial`, is synced to disk, renamed, and marked. Older ones are pruned only then, so that
at any moment at least one complete checkpoint exists once there was one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from s2rl.ckpt.groups import Outstanding, load_groups, save_groups
from s2rl.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MARKER = "COMPLETE"
_MANIFEST = "manifest.json"
_TRAINER = "trainer.json"
_LEARNER = "learner"
_PARTIAL = ".partial"
_NAME = re.compile(r"^step_(\d{8,})$")
_BLOCK = 1 << 22
_PACKAGES = ("s2rl", "torch", "transformers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One complete checkpoint."""

    path: Path
    step: int

    @property
    def learner_dir(self) -> Path:
        """The learner's files."""
        return self.path / _LEARNER

    @property
    def run_dir(self) -> Path:
        """The run folder that it belongs to."""
        return self.path.parent.parent


class CheckpointStore:
    """Checkpoints below one folder; the newest `keep` complete ones stay."""

    def __init__(self, root: Path, *, keep: int, config_digest: str) -> None:
        self.root = root
        self._keep = keep
        self._config_digest = config_digest

    # ---- writing ---------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """The learner's folder of a new, incomplete checkpoint."""
        partial = self._partial(step)
        with self._reported(partial, self._final(step)):
            if partial.exists():
                shutil.rmtree(partial)
            learner = partial / _LEARNER
            learner.mkdir(parents=True)
        return learner

    def commit(self, step: int, *, state: Mapping[str, Any], outstanding: Sequence[Outstanding]) -> Path:
        """Add the trainer's state to the begun checkpoint, make it durable, mark it complete, prune older ones.

        `state` holds JSON types. Raises `CheckpointError` when the disk does not take it; older checkpoints are
        unharmed.
        """
        partial, final = self._partial(step), self._final(step)
        with self._reported(partial, final):
            (partial / _TRAINER).write_text(json.dumps(state), encoding="ascii")
            save_groups(partial, outstanding)
            manifest = json.dumps(self._manifest(partial, step), indent=1)
            (partial / _MANIFEST).write_text(manifest, encoding="utf-8")
            for folder, _, files in os.walk(partial):
                for name in files:
                    _sync(Path(folder) / name)
                _sync(Path(folder))
            if final.exists():  # incomplete, or an older history of the same step
                _remove(final)
            partial.rename(final)
            _sync(self.root)
            _sync(self.root.parent)
            draft = final / f"{_MARKER}.draft"
            draft.write_text(xxhash.xxh3_128_hexdigest(manifest.encode()) + "\n", encoding="ascii")
            _sync(draft)
            draft.rename(final / _MARKER)  # there is never an empty marker, unless it is damaged later
            _sync(final)
        self._prune()
        return final

    def discard(self, step: int) -> None:
        """Remove an incomplete checkpoint."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def clean_partial(self) -> None:
        """Remove what killed runs left half-written."""
        if not self.root.is_dir():
            return
        for folder in self.root.iterdir():
            unmarked = _NAME.match(folder.name) and not (folder / _MARKER).exists()
            if folder.is_dir() and (folder.name.endswith(_PARTIAL) or unmarked):
                logger.info("removing the incomplete checkpoint %s", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def _prune(self) -> None:
        for info in self.complete()[: -self._keep]:
            try:
                _remove(info.path)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be removed: %s", info.path, error)

    def _manifest(self, folder: Path, step: int) -> dict[str, Any]:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return {
            "format": FORMAT_VERSION,
            "step": step,
            "config_digest": self._config_digest,
            "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
            "files": {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "xxh3_128": _checksum(p)} for p in files},
        }

    @contextmanager
    def _reported(self, partial: Path, final: Path) -> Iterator[None]:
        """Turn a failed write into a `CheckpointError` and leave nothing half-written."""
        try:
            yield
        except OSError as error:
            message = write_problem(partial, error)
            shutil.rmtree(partial, ignore_errors=True)
            if not (final / _MARKER).exists():
                shutil.rmtree(final, ignore_errors=True)
            raise CheckpointError(message) from error

    def _final(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def _partial(self, step: int) -> Path:
        return self.root / f"step_{step:08d}{_PARTIAL}"

    # ---- reading ---------------------------------------------------------------------------------------------------

    def complete(self) -> list[CheckpointInfo]:
        """All complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = [
            CheckpointInfo(path=folder, step=int(match[1]))
            for folder in self.root.iterdir()
            if (match := _NAME.match(folder.name)) and (folder / _MARKER).exists()
        ]
        return sorted(found, key=lambda info: info.step)

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint."""
        found = self.complete()
        return found[-1] if found else None

    def load_trainer_state(self, info: CheckpointInfo) -> tuple[dict[str, Any], list[Outstanding]]:
        """State and outstanding groups as `commit` was given them. Call `verify` first."""
        try:
            state = json.loads((info.path / _TRAINER).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise CheckpointError(_damaged(info.path / _TRAINER, str(error))) from error
        return state, load_groups(info.path)


def verify(info: CheckpointInfo) -> None:
    """Raise `CheckpointError` naming the first file that is missing, or not as it was written."""
    manifest_file = info.path / _MANIFEST
    try:
        text = manifest_file.read_text(encoding="utf-8")
        marked = (info.path / _MARKER).read_text(encoding="ascii").strip()
        if xxhash.xxh3_128_hexdigest(text.encode()) != marked:
            raise ValueError(f"its checksum is not the one in {_MARKER}")
        manifest = json.loads(text)
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(_damaged(manifest_file, str(error))) from error
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{info.path}: checkpoint format {manifest.get('format')!r}, this version of s2rl reads {FORMAT_VERSION}; "
            f"it was written by s2rl {manifest.get('versions', {}).get('s2rl')}"
        )
    for name, expected in files.items():
        file = info.path / name
        if not file.is_file():
            raise CheckpointError(_damaged(file, "the file is missing"))
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(_damaged(file, f"{file.stat().st_size} bytes, {expected['bytes']} were written"))
        if _checksum(file) != expected["xxh3_128"]:
            raise CheckpointError(_damaged(file, "its checksum differs from the one in the manifest"))


def find_checkpoint(path: Path) -> CheckpointInfo | None:
    """The checkpoint that a user means: a checkpoint folder, a run folder or its `checkpoints` (the newest one).

    None when `path` holds no training checkpoint (it may be a model folder). Raises `CheckpointError` for one that is
    incomplete and for a path that does not exist.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a checkpoint, a run folder or a model folder")
    path = path.absolute()
    if match := _NAME.match(path.name):
        if not (path / _MARKER).exists():
            raise CheckpointError(f"{path}: the checkpoint is not complete (no file {_MARKER}); use another one")
        return CheckpointInfo(path=path, step=int(match[1]))
    for root in (path, path / "checkpoints"):
        latest = CheckpointStore(root, keep=1, config_digest="").latest()
        if latest is not None:
            return latest
    return None


def write_problem(path: Path, error: OSError) -> str:
    """Message for a failed write below `path`."""
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB free"
    except (OSError, StopIteration):
        free = "free space unknown"
    remedy = (
        "make room or move runs_dir" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder's rights"
    )
    return (
        f"the checkpoint {path.name.removesuffix(_PARTIAL)} could not be written to {path.parent}: "
        f"{error.strerror or error} ({free}). Earlier checkpoints are unharmed; {remedy} and run the same command again"
    )


def _remove(folder: Path) -> None:
    # Unmarked first: a crash half-way through must not leave a damaged folder that says it is complete.
    (folder / _MARKER).unlink(missing_ok=True)
    _sync(folder)
    shutil.rmtree(folder)


def _damaged(file: Path, why: str) -> str:
    return f"{file} is damaged: {why}. Remove this checkpoint folder to go on from the one before, or restore the file"


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
