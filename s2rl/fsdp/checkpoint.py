"""A learner's state through torch.distributed.checkpoint: copied to host memory at once, written in the background.

Written: parameters, AdamW's moments, the number of optimizer steps and every rank's random state. The folder belongs to
the caller, who makes it, marks it complete and removes it. What was written by any number of ranks can be read by any
other number.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from s2rl.config.schema import Device
from s2rl.device import rng_state, set_rng_state
from s2rl.errors import CheckpointError
from s2rl.fsdp.model import ShardedPolicy
from s2rl.fsdp.optimizer import PolicyOptimizer

logger = logging.getLogger(__name__)


class LearnerCheckpoint:
    """Saves and loads one learner's state. Every rank makes one, and all ranks call its methods together."""

    def __init__(
        self, *, policy: ShardedPolicy, optimizer: PolicyOptimizer, device: Device, group: dist.ProcessGroup
    ) -> None:
        """`group` is a CPU group of all ranks that nothing else uses: its collectives run in the writing thread."""
        self._policy = policy
        self._optimizer = optimizer
        self._device: Device = device
        self._group = group
        self._writing: Future[Any] | None = None
        self._path: Path | None = None

    def save(self, path: Path, *, version: int) -> None:
        """Copy everything to host memory and start to write it to `path`; returns when the copy is made."""
        self.wait()
        state = {**self._tensors(), **self._random_states(), "version": torch.tensor(version)}
        self._path = path
        try:
            writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
            response = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        except (OSError, CheckpointException) as error:
            raise self._failed(error) from error
        assert isinstance(response, Future)
        self._writing = response

    def wait(self) -> None:
        """Wait until the last `save` is on disk. Raises CheckpointError when any rank could not write."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (OSError, CheckpointException, RuntimeError) as error:
            raise self._failed(error) from error

    def load(self, path: Path) -> int:
        """Read `path` into the live tensors; returns the version.

        Raises CheckpointError for a folder that is missing, damaged or of another model.
        """
        try:
            reader = dcp.FileSystemReader(path)
            stored = set(reader.read_metadata().state_dict_metadata)
            state = {**self._tensors(), "version": torch.tensor(0)}
            absent = sorted(state.keys() - stored)
            if absent:
                raise CheckpointError(f"{path} was written for another model: it lacks {absent[0]}.")
            # With more ranks than at the time of writing, the new ones go on with their own fresh seeds.
            random_states = {key: value for key, value in self._random_states().items() if key in stored}
            state.update(random_states)
            dcp.load(state, storage_reader=reader, process_group=self._group)
        except CheckpointError:
            raise
        # A damaged pickle can raise anything, and torch's exception is no Exception; one error carries the cause on.
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {_cause(error)}. Remove it to go on from an older one."
            ) from error
        set_rng_state({key.rpartition(".")[2]: state[key] for key in random_states})
        self._policy.reshard()
        return int(state["version"])

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors under the flat names that they are stored by."""
        moments = {
            f"optimizer.{name}.{k}": t for name, part in self._optimizer.state().items() for k, t in part.items()
        }
        return {f"model.{name}": parameter for name, parameter in self._policy.parameters.items()} | moments

    def _random_states(self) -> dict[str, Tensor]:
        return {f"rng.{dist.get_rank()}.{name}": state for name, state in rng_state(self._device).items()}

    def _failed(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._path} could not be written: {_cause(error)} ({_free(self._path)}). Earlier checkpoints "
            "are unharmed; make room or move runs_dir, and run the same command again"
        )


def _free(path: Path | None) -> str:
    """Room on the disk of `path`: torch's own writer tells a full disk by its position in the file."""
    try:
        assert path is not None
        existing = next(p for p in (path, *path.parents) if p.exists())
        return f"{shutil.disk_usage(existing).free / 2**20:,.0f} MiB free"
    except OSError:
        return "free space unknown"


def _cause(error: BaseException) -> str:
    """The first underlying reason in one line; torch's own message is a traceback per rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (reason, _) = sorted(failures.items())[0]
        return f"rank {rank}: {type(reason).__name__}: {reason}"
    return f"{type(error).__name__}: {error}"
