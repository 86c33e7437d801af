"""A learner's state through torch.distributed.checkpoint: copied to host memory at once, written in the background.

Written: parameters, AdamW's moments, the number of optimizer steps and every rank's random state. The folder belongs to
the caller, who makes it, marks it complete and removes it. What was written by any number of ranks can be read by any
other number.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
        state = {**self._tensors(), "version": torch.tensor(version), f"rng.{dist.get_rank()}": rng_state(self._device)}
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
            state: dict[str, Any] = {**self._tensors(), "version": torch.tensor(0)}
            absent = sorted(key for key in state if not _is_stored(key, stored))
            if absent:
                raise CheckpointError(f"{path} was written for another model: it lacks {absent[0]}.")
            # With more ranks than at the time of writing, the new ones go on with their own fresh seeds.
            own = f"rng.{dist.get_rank()}"
            if _is_stored(own, stored):
                state[own] = rng_state(self._device)
            dcp.load(state, storage_reader=reader, process_group=self._group)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything; it becomes one error with the cause in it
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {_cause(error)}. Remove it to go on from an older one."
            ) from error
        if own in state:
            set_rng_state(state[own])
        self._policy.reshard()
        return int(state["version"])

    def _tensors(self) -> dict[str, Any]:
        return {"model": dict(self._policy.parameters), "optimizer": self._optimizer.state()}

    def _failed(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._path} could not be written: {_cause(error)}. The checkpoint before it is untouched; "
            "check that the disk has room."
        )


def _is_stored(key: str, stored: set[str]) -> bool:
    """Whether a key of the nested state is there; torch stores the leaves under dotted names."""
    return key in stored or any(name.startswith(f"{key}.") for name in stored)


def _cause(error: BaseException) -> str:
    """The first underlying reason in one line; torch's own message is a traceback per rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (reason, _) = sorted(failures.items())[0]
        return f"rank {rank}: {type(reason).__name__}: {reason}"
    return f"{type(error).__name__}: {error}"
