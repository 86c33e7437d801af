"""What the loop needs of an inference engine, and what the two hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from s2rl.rollout.requests import EngineLimits, SequenceParams
from s2rl.types import FinishReason, FloatArray, ImageArray, SyncGroupSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence."""

    sequence_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the distribution that was sampled from."""
    finish_reason: FinishReason | None
    prompt_logprobs: FloatArray | None = None
    """For a sequence that is scored: one per prompt token but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One engine rank's side of a weight load."""

    num_bytes: int
    fingerprints: dict[str, int]
    unloaded: tuple[str, ...]


class Engine(Protocol):
    """What the loop needs of an inference engine. All calls come from one thread."""

    limits: EngineLimits

    def add(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        params: SequenceParams,
        *,
        priority: int,
        images: Sequence[ImageArray] = (),
        image_spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Queue one sequence; images and spans as in `Encoded`. Raises ValueError for one that it cannot take."""
        ...

    def add_scored(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Queue one sequence whose own tokens are scored at temperature 1, before everything else."""
        ...

    def abort(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences; ids that it does not know are ignored."""
        ...

    def step(self) -> list[Delta]:
        """Advance what is queued."""
        ...

    def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """All ranks enter the weight-sync group."""
        ...

    def load_weights(self, version: int) -> list[RankLoad]:
        """All ranks receive and load one publication."""
        ...

    def drop_caches(self, *, recompute: bool) -> None:
        """Forget what old weights computed; with `recompute`, the keys and values of running sequences too."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
