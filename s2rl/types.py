"""The types that are handed from one part to the next: the list of them is the architecture.

    Prompt -> Encoded -> GroupRequest -> Completion -> Rollout -> RolloutGroup -> Sample -> MicroBatch -> StepResult

All are frozen. `version` is always the same integer: the number of completed optimizer steps. Token sequences are
numpy arrays (int32 ids, float32 log-probabilities, int32 versions) because they pickle without a copy.

Suffixes of ragged lists: `_G` one entry per completion of a group, `_T` one entry per token.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
ImageArray = NDArray[np.uint8]
"""[height, width, 3], RGB, resized: exactly what engine and learner cut into patches."""

UNKNOWN_VERSION = -1
"""Of weights that a worker took from the model folder itself, before any publication."""


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended it (end-of-sequence id or a stop condition)."""
    LENGTH = "length"
    """The token budget ended it."""
    ABORT = "abort"
    """It was aborted; it is never trained."""


class RolloutStatus(enum.StrEnum):
    """How grading of one completion went."""

    SCORED = "scored"
    GRADER_TIMEOUT = "grader_timeout"
    """The reward function outlived its limit: scored zero and counted."""
    GRADER_ERROR = "grader_error"
    """The reward function raised or its process died: scored zero and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, as in a data row's `prompt` column."""

    role: str
    content: str
    """Text; where the prompt has images, each `<image>` in it stands for the next of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An image as a data row has it. Exactly one of `data` and `path` is set."""

    data: bytes | None = None
    """A file's content: PNG, JPEG, ..."""
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One draw of a data row. Exactly one of `messages` and `text` is set."""

    prompt_id: str
    """Unique per draw: `<epoch>-<row>`; stable over resumes."""
    row: int
    epoch: int
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    images: tuple[ImageFile, ...] = ()
    """In the order of the placeholders. Empty once the prompt is encoded: `Encoded.images` holds them then."""
    answer: str
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as the engine takes it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    """With one placeholder id for each position that an image takes."""
    images: tuple[ImageArray, ...] = field(default=(), compare=False)
    image_spans: tuple[tuple[int, int], ...] = ()
    """Of each image: index of its first placeholder in `token_ids`, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How completions are sampled. `temperature` 0 means greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_new_tokens: int
    """Cumulative over every interruption of one completion."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What a rollout worker is asked for: `num_completions` samples of one prompt."""

    group_id: str
    encoded: Encoded
    num_completions: int
    sampling: SamplingSpec
    seed: int
    """Completion i is sampled with `seed + i`."""
    priority: int = 0
    """Lower first (training uses the group's deadline, evaluation a large number)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled continuation. `logprobs` are of the distribution that was sampled from (after temperature)."""

    group_id: str
    index: int
    """0 .. num_completions - 1."""
    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T]
    versions: IntArray  # [T], the weight version that sampled each token
    finish_reason: FinishReason
    text: str
    """Decoded without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A group that a worker could not sample; failure is data, the worker lives on."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward function says of one completion."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A completion with its score."""

    completion: Completion
    score: Score
    status: RolloutStatus = RolloutStatus.SCORED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """All rollouts of one prompt, ordered by index."""

    group_id: str
    encoded: Encoded
    rollouts_G: tuple[Rollout, ...]
    worker: int
    taken_version: int
    """The version that the worker ran when it took the group; no token is older."""

    @property
    def num_tokens(self) -> int:
        """Completion tokens of the whole group."""
        return sum(len(r.completion.token_ids) for r in self.rollouts_G)

    @property
    def min_version(self) -> int:
        """The oldest version that sampled any token (`taken_version` for a group without tokens)."""
        return min(
            (int(r.completion.versions.min()) for r in self.rollouts_G if len(r.completion.versions)),
            default=self.taken_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence to train on: prompt and completion, with what the loss needs per completion token."""

    group_id: str
    token_ids: IntArray  # [prompt_len + T]
    prompt_len: int
    logprobs: FloatArray  # [T], by the rollout engine
    versions: IntArray  # [T]
    advantage: float
    images: tuple[ImageArray, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that go through one forward and backward on one rank. May be empty: the rank then joins the
    collectives only."""

    rows: tuple[tuple[Sample, ...], ...]
    """Samples of one row have the same prompt, which stands in the row once, in front of all their completions."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Row by row."""
        return tuple(sample for row in self.rows for sample in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """How the learner wants samples laid out; its model and attention backend decide."""

    packed: bool = False
    """All rows of a micro-batch one after the other, without padding; else each is padded to the longest."""
    shares_prompts: bool = False
    """Whether a row may hold several completions of one prompt."""
    attention_break_even: int = 1
    """Row length (positions) at which attention costs as much as everything else in the model together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's part of a batch. Every rank has the same number of micro-batches, by construction."""

    version: int
    """Completed optimizer steps before this batch."""
    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    """Completion tokens of the whole batch over all ranks: the denominator of the token mean."""
    num_samples: int
    """Samples of the whole batch over all ranks, those left out of the computation included: the denominator of the
    sequence mean."""
    num_padding_tokens: int
    """Padding positions of this rank's micro-batches, for the `batch/padding_fraction` metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank says of one batch; means are over all ranks already."""

    version: int
    """Completed optimizer steps after this batch."""
    metrics: Mapping[str, float]
    """Keys as in docs/metrics.md (`loss/total`, `policy/...`, `optim/...`, `memory/...`)."""
    num_skipped_steps: int
    """Optimizer steps skipped because the gradient norm was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the published weights, in the layout that the checkpoint on disk has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in safetensors headers' torch names: `float32`, `bfloat16`, `float16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroupSpec:
    """How a process joins the weight-sync process group. Rank 0 is learner rank 0."""

    backend: str
    """`gloo`, `nccl` or `hccl`."""
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The sender's side of one weight sync."""

    version: int
    num_bytes: int
    seconds: float
    fingerprints: Mapping[str, int]
    """Per tensor name; computed from the learner's own tensors, before they enter a bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The receiver's side of one weight sync."""

    worker: int
    version: int
    num_bytes: int
    stalled_s: float
    """Seconds for which generation stood still."""
    fingerprints: Mapping[str, int]
    """Per tensor name; computed from what was handed to the engine's loader."""
    unloaded: tuple[str, ...] = ()
    """Engine parameters that received no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What engine and learner must agree on before the first step."""

    vocab_size: int
    """Rows of the embedding the model has."""
    tokenizer_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    digest: str
    """sha256 over the sorted (token, id) pairs of the vocabulary and the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """A rollout worker's counters since its start (monotonic, so that a lost report loses nothing)."""

    version: int
    running: int
    """Completions in the engine now."""
    busy_s: float
    idle_s: float
    """Seconds without any completion to work on."""
    stalled_s: float
    """Seconds of loading weights."""
    prompt_tokens: int
    completion_tokens: int
    rss_mb: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """Everything that happened in a worker since the last report."""

    completions: Sequence[Completion]
    failed: Sequence[FailedRequest]
    stats: WorkerStats
