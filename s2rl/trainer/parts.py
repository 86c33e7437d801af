"""What the trainer needs from the processes it drives, as protocols.

`s2rl.trainer.placement` builds the real ones (Ray actors around `RolloutWorker` and `Learner`); tests and the
controller bench build fakes that sleep. Every method raises `WorkerDied` / `LearnerDied` when the process behind it
is gone and `StalledError` when it outlived its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from s2rl.types import (
    FloatArray,
    GroupRequest,
    ImageArray,
    LoadReport,
    PublishReport,
    RankBatch,
    RolloutReport,
    RowLayout,
    StepResult,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
)


class WorkerHandle(Protocol):
    """One rollout worker."""

    index: int

    async def start(self) -> TokenizerFacts:
        """Load the model from its folder; its version is unknown until the first sync."""
        ...

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand over groups; returns at once."""
        ...

    async def collect(self, max_wait_s: float) -> RolloutReport:
        """Everything that finished since the last call; waits up to `max_wait_s` for the first item."""
        ...

    async def abort(self, group_ids: Sequence[str]) -> None:
        """Forget these groups; nothing of them is reported any more."""
        ...

    async def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """Enter the sync process group (collective: all members at the same time)."""
        ...

    async def load_weights(self, version: int) -> LoadReport:
        """Receive and load one publication between two engine steps (collective with the learners' publish)."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Log-probability (temperature 1) of each token given those before it: entry i of a result belongs to
        token i + 1."""
        ...

    async def close(self) -> None:
        """Stop the engine and release everything."""
        ...


class LearnerHandle(Protocol):
    """All learner ranks together."""

    world_size: int

    async def start(self) -> TokenizerFacts:
        """Build the sharded policy; version 0."""
        ...

    async def layout(self) -> RowLayout:
        """How samples are to be laid out for `train`."""
        ...

    async def manifest(self) -> list[TensorSpec]:
        """The tensors that a publication consists of, sorted by name."""
        ...

    async def sync_endpoint(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there now."""
        ...

    async def join_sync(self, spec: SyncGroupSpec) -> None:
        """Rank 0 enters the sync process group."""
        ...

    async def publish(self, version: int) -> PublishReport:
        """Stream the weights to the sync group; `version` must be the learner's own."""
        ...

    async def train(self, batches: Sequence[RankBatch]) -> StepResult:
        """One batch: `updates_per_batch` optimizer steps. One entry per rank."""
        ...

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        images: Sequence[Sequence[ImageArray]] | None = None,
        as_sampled: bool = False,
    ) -> list[FloatArray]:
        """As `WorkerHandle.score`, by the learner, with logits divided by `temperature`.

        `images[i]` are those of sequence i; `as_sampled` leaves out the ids that are never sampled.
        """
        ...

    async def save(self, path: Path) -> None:
        """Copy weights, optimizer, schedule and RNG to host memory, then write them to `path` in the background.

        Returns when the copy is made; training may go on.
        """
        ...

    async def save_done(self) -> None:
        """Wait for the write of the last `save`; raises what it raised."""
        ...

    async def load(self, path: Path) -> int:
        """Restore what `save` wrote (any number of ranks); returns the version."""
        ...

    async def memory(self) -> Mapping[int, float]:
        """Resident memory per rank, in MiB."""
        ...

    async def close(self) -> None:
        """Leave all groups and release everything."""
        ...
