"""What a rollout worker does between and in engine steps. Single-threaded; `thread.py` runs it.

    consumes   groups, aborts, sequences to score, weight updates (commands, run between two steps)
    produces   completions, failures, scores
    waits for  nothing: `step` is one engine step
    woken by   commands

Every token is tagged with the version of the weights that sampled it. A weight update happens between two steps, so no
token belongs to two versions, and no sequence notices it: it goes on with its ids, its log-probabilities and what is
left of its budget.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from s2rl.errors import RunError, SyncError
from s2rl.rollout.protocol import Delta, Engine, RankLoad
from s2rl.rollout.requests import prompt_refusal, refusal, sequence_params
from s2rl.rollout.stopping import StopStrings
from s2rl.types import (
    UNKNOWN_VERSION,
    Completion,
    FailedRequest,
    FinishReason,
    FloatArray,
    GroupRequest,
    LoadReport,
    SyncGroupSpec,
    TensorSpec,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Group:
    request: GroupRequest
    ticket: int
    left: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One completion in the making."""

    sequence_id: str
    group: _Group
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopStrings | None = None


@dataclass(slots=True, kw_only=True)
class _ScoreJob:
    sequences: Sequence[Sequence[int]]
    future: Future[list[FloatArray]]
    results: dict[int, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A completion (its text still empty) or a failure, of the submission that `ticket` names."""

    ticket: int
    item: Completion | FailedRequest
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """Counters since the start; replaced as a whole, so that another thread reads a consistent one."""

    version: int
    running: int
    prompt_tokens: int
    completion_tokens: int


ClockState = Literal["idle", "busy", "stalled"]


class Clock:
    """Seconds per state. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._now: tuple[ClockState, float, dict[str, float]] = ("idle", time.monotonic(), {})

    def enter(self, state: ClockState) -> ClockState:
        """Switch; returns the state before."""
        before, since, totals = self._now
        if state != before:
            now = time.monotonic()
            self._now = (state, now, {**totals, before: totals.get(before, 0.0) + now - since})
        return before

    def seconds(self, state: ClockState) -> float:
        """Seconds spent in `state` until now."""
        current, since, totals = self._now
        return totals.get(state, 0.0) + (time.monotonic() - since if current == state else 0.0)


class RolloutLoop:
    """Sequences, versions and weight updates of one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        index: int,
        max_running: int,
        kv_on_update: Literal["recompute", "keep"],
        tokenizer: Any | None,
        deliver: Callable[[list[Finished]], None],
    ) -> None:
        """`max_running` completions decode at once; `deliver` receives what finished, after each step."""
        self.engine = engine
        self.clock = Clock()
        self.version = UNKNOWN_VERSION
        self.stats = LoopStats(version=self.version, running=0, prompt_tokens=0, completion_tokens=0)
        self._index = index
        self._max_running = max_running
        self._recompute = kv_on_update == "recompute"
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._groups: dict[str, _Group] = {}
        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._order = itertools.count()
        self._running: dict[str, _Sequence] = {}
        self._scores: dict[str, tuple[_ScoreJob, int]] = {}
        self._score_ids = itertools.count()
        self._finished: list[Finished] = []
        self._prompt_tokens = 0
        self._completion_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._running or self._waiting or self._scores or self._finished)

    # Commands ------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[tuple[int, GroupRequest]]) -> None:
        """Take groups, each with the ticket under which it is reported. A group that cannot be sampled is a failure."""
        for ticket, request in requests:
            reason = refusal(request, self.engine.limits)
            if reason is not None:
                self._fail(ticket, request.group_id, reason)
                continue
            group = _Group(request=request, ticket=ticket, left=request.num_completions)
            self._groups[request.group_id] = group
            for index in range(request.num_completions):
                sequence = _Sequence(sequence_id=f"{request.group_id}/{index}", group=group, index=index)
                if request.sampling.stop:
                    sequence.stop = StopStrings(request.sampling.stop, self._tokenizer)
                heapq.heappush(self._waiting, (request.priority, next(self._order), sequence))
        self._publish()

    def abort(self, group_ids: Sequence[str]) -> None:
        """Forget groups, wherever their sequences are."""
        groups = [g for g in (self._groups.pop(group_id, None) for group_id in group_ids) if g is not None]
        for group in groups:
            self._forget(group)
        self._publish()

    def score(self, sequences: Sequence[Sequence[int]], future: Future[list[FloatArray]]) -> None:
        """Resolve `future` with log-probabilities (temperature 1) of each sequence's tokens after the first.

        All of one call are computed with the same weights: an update in between starts them again.
        """
        job = _ScoreJob(sequences=[list(map(int, s)) for s in sequences], future=future)
        for number, token_ids in enumerate(job.sequences):
            reason = prompt_refusal(token_ids, self.engine.limits)
            if reason is not None:
                future.set_exception(ValueError(f"sequence {number} cannot be scored: {reason}"))
                return
        self._start_score(job)

    def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """Enter the weight-sync group. Nothing is sampled meanwhile."""
        before = self.clock.enter("stalled")
        try:
            self.engine.join_sync(spec, manifest)
        finally:
            self.clock.enter(before)

    def load_weights(self, version: int) -> LoadReport:
        """Receive and load `version`; sequences in flight go on under it. An error leaves the weights unknown."""
        start = time.monotonic()
        before = self.clock.enter("stalled")
        ranks = self.engine.load_weights(version)
        self.engine.drop_caches(recompute=self._recompute)
        self.version = version
        self._restart_scores()
        self.clock.enter(before)
        self._publish()
        return LoadReport(
            worker=self._index,
            version=version,
            num_bytes=ranks[0].num_bytes,
            stalled_s=time.monotonic() - start,
            fingerprints=_agreed_fingerprints(ranks, version=version, worker=self._index),
            unloaded=tuple(sorted({name for rank in ranks for name in rank.unloaded})),
        )

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    # Steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Fill free places, run one engine step, deliver what finished."""
        self._admit()
        if self._running or self._scores:
            self.clock.enter("busy")
            for delta in self.engine.step():
                if delta.sequence_id in self._scores:
                    self._scored(delta)
                elif delta.sequence_id in self._running:
                    self._advance(self._running[delta.sequence_id], delta)
        if not (self._running or self._waiting or self._scores):
            self.clock.enter("idle")
        self._publish()
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)

    def _admit(self) -> None:
        """Hand waiting sequences to the engine while it has places.

        The queue is here and not in the engine so that scored sequences find a place at once and an abort of what has
        not begun costs nothing.
        """
        while self._waiting and len(self._running) < self._max_running:
            priority, _, sequence = heapq.heappop(self._waiting)
            group = sequence.group
            params = sequence_params(group.request, index=sequence.index, limits=self.engine.limits)
            encoded = group.request.encoded
            try:
                self.engine.add(
                    sequence.sequence_id,
                    encoded.token_ids,
                    params,
                    priority=priority,
                    images=encoded.images,
                    image_spans=encoded.image_spans,
                )
            except ValueError as error:  # the engine's own refusal: one group's failure, not the worker's
                self._groups.pop(group.request.group_id, None)
                self._forget(group)
                self._fail(group.ticket, group.request.group_id, str(error))
                continue
            self._running[sequence.sequence_id] = sequence
            self._prompt_tokens += len(encoded.token_ids)

    def _advance(self, sequence: _Sequence, delta: Delta) -> None:
        finish = delta.finish_reason
        for token_id, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if sequence.stop is not None and sequence.stop.feed(token_id):
                if finish is None:
                    self.engine.abort([sequence.sequence_id])
                finish = FinishReason.STOP
                break
        if finish is FinishReason.ABORT:
            group = sequence.group
            self._groups.pop(group.request.group_id, None)
            self._forget(group)
            self._fail(group.ticket, group.request.group_id, "the engine gave the sequence up")
        elif finish is not None:
            self._complete(sequence, finish)

    def _complete(self, sequence: _Sequence, finish: FinishReason) -> None:
        del self._running[sequence.sequence_id]
        group = sequence.group
        group.left -= 1
        if not group.left:
            self._groups.pop(group.request.group_id, None)
        self._completion_tokens += len(sequence.token_ids)
        completion = Completion(
            group_id=group.request.group_id,
            index=sequence.index,
            token_ids=np.asarray(sequence.token_ids, dtype=np.int32),
            logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
            versions=np.asarray(sequence.versions, dtype=np.int32),
            finish_reason=finish,
            text="",
        )
        self._finished.append(Finished(ticket=group.ticket, item=completion, stop=group.request.sampling.stop))

    def _fail(self, ticket: int, group_id: str, reason: str) -> None:
        logger.warning("rollout worker %d: group %s is not sampled: %s", self._index, group_id, reason)
        self._finished.append(Finished(ticket=ticket, item=FailedRequest(group_id=group_id, reason=reason)))

    def _forget(self, group: _Group) -> None:
        """Remove what is left of a group."""
        gone = [s.sequence_id for s in self._running.values() if s.group is group]
        for sequence_id in gone:
            sequence = self._running.pop(sequence_id)
            self._completion_tokens += len(sequence.token_ids)
        if gone:
            self.engine.abort(gone)
        if len(gone) < group.left:
            self._waiting = [entry for entry in self._waiting if entry[2].group is not group]
            heapq.heapify(self._waiting)

    # Scores --------------------------------------------------------------------------------------------------------

    def _start_score(self, job: _ScoreJob) -> None:
        job.results.clear()
        for number, token_ids in enumerate(job.sequences):
            if len(token_ids) < 2:
                job.results[number] = np.zeros(0, dtype=np.float32)
                continue
            sequence_id = f"score/{next(self._score_ids)}"
            self._scores[sequence_id] = (job, number)
            self.engine.add_scored(sequence_id, token_ids)
        self._finish_score(job)

    def _scored(self, delta: Delta) -> None:
        job, number = self._scores.pop(delta.sequence_id)
        expected = len(job.sequences[number]) - 1
        if delta.prompt_logprobs is None or len(delta.prompt_logprobs) != expected:
            got = "none" if delta.prompt_logprobs is None else len(delta.prompt_logprobs)
            raise RunError(f"asked for the log-probabilities of {expected} tokens, the engine gave {got}")
        job.results[number] = delta.prompt_logprobs
        self._finish_score(job)

    def _finish_score(self, job: _ScoreJob) -> None:
        if len(job.results) == len(job.sequences) and not job.future.done():
            job.future.set_result([job.results[i] for i in range(len(job.sequences))])

    def _restart_scores(self) -> None:
        if not self._scores:
            return
        self.engine.abort(list(self._scores))
        jobs = {id(job): job for job, _ in self._scores.values()}
        self._scores.clear()
        for job in jobs.values():
            self._start_score(job)

    def _publish(self) -> None:
        self.stats = LoopStats(
            version=self.version,
            running=len(self._running) + len(self._waiting),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens + sum(len(s.token_ids) for s in self._running.values()),
        )


def _agreed_fingerprints(ranks: Sequence[RankLoad], *, version: int, worker: int) -> dict[str, int]:
    """The fingerprints, which all ranks of an engine must share: each receives the whole publication."""
    first = ranks[0].fingerprints
    for number, rank in enumerate(ranks[1:], start=1):
        differing = sorted(n for n in {*first, *rank.fingerprints} if first.get(n) != rank.fingerprints.get(n))
        if differing:
            raise SyncError(
                f"rollout worker {worker}, version {version}: engine ranks 0 and {number} received different bytes of "
                f"{', '.join(differing[:5])}"
            )
    return first
