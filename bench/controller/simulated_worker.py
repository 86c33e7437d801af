"""A rollout worker that sleeps instead of decoding; see `simulated`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.controller.simulated import (
    FACTS,
    MANIFEST,
    NUM_BYTES,
    Costs,
    Faults,
    Network,
    SyncGroup,
    fingerprints,
    log_probabilities,
)
from s2rl.errors import StalledError, WorkerDied
from s2rl.types import (
    Completion,
    FailedRequest,
    FinishReason,
    FloatArray,
    GroupRequest,
    LoadReport,
    RolloutReport,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
    WorkerStats,
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    request: GroupRequest
    index: int
    length: int
    started: float = 0.0
    """Engine seconds."""
    alive: bool = True


class SimulatedWorker:
    """One rollout worker. `length(group_id, index)` decides how long each completion is."""

    def __init__(
        self,
        index: int,
        *,
        network: Network,
        costs: Costs,
        length: Callable[[str, int], int],
        max_num_seqs: int,
        faults: Faults | None = None,
    ) -> None:
        self.index = index
        self.faults = faults or Faults()
        self.dead = self.dead_before_close = self.closed = False
        self.calls: Counter[str] = Counter()
        self._network, self._costs, self._length, self._slots = network, costs, length, max_num_seqs
        self._loop = asyncio.get_running_loop()
        self._version = -1
        self._updates: list[tuple[float, int]] = []
        """(engine seconds, version) of each load."""
        self._running: list[tuple[float, int, _Job]] = []
        self._waiting: list[tuple[int, int, _Job]] = []
        self._by_group: dict[str, list[_Job]] = {}
        self._order = itertools.count()
        self._finished: deque[Completion] = deque()
        self._failed: deque[FailedRequest] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._group: SyncGroup | None = None
        self._rank = 0
        self._stalled_since: float | None = None
        self._stalled_s = self._busy_s = self._idle_s = 0.0
        self._clock_at = self._loop.time()
        self._tokens = 0
        if self.faults.die_at is not None:
            self._loop.call_at(self.faults.die_at, self.die)
        if self.faults.hang_at is not None:
            self._loop.call_at(self.faults.hang_at, self._pump)

    # ---- WorkerHandle ----------------------------------------------------------------------------------------------

    async def start(self) -> TokenizerFacts:
        """See `WorkerHandle`."""
        await self._enter("start")
        await asyncio.sleep(self._costs.start_s)
        self._check()
        return FACTS

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `WorkerHandle`."""
        await self._enter("submit")
        for request in requests:
            assert request.group_id not in self._by_group, f"{request.group_id} was submitted twice"
            if (reason := self.faults.fail(request.group_id)) is not None:
                self._failed.append(FailedRequest(group_id=request.group_id, reason=reason))
                self._wake.set()
                continue
            limit = request.sampling.max_new_tokens
            jobs = [
                _Job(request=request, index=i, length=min(limit, self._length(request.group_id, i)))
                for i in range(request.num_completions)
            ]
            if self.faults.stuck(request.group_id):
                jobs[-1].length = 1 << 40
            self._by_group[request.group_id] = jobs
            for job in jobs:
                heapq.heappush(self._waiting, (request.priority, next(self._order), job))
        self._pump()

    async def collect(self, max_wait_s: float) -> RolloutReport:
        """See `WorkerHandle`."""
        await self._enter("collect")
        if not self._finished and not self._failed:
            self._wake.clear()
            # A timer of its own is cheaper than `asyncio.wait_for`, and this is the most frequent call.
            timer = self._loop.call_later(max_wait_s, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            await self._enter("collect, waiting")
        completions, failed = list(self._finished), list(self._failed)
        self._finished.clear()
        self._failed.clear()
        return RolloutReport(completions=completions, failed=failed, stats=self._stats())

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `WorkerHandle`."""
        await self._enter("abort")
        for group_id in group_ids:
            for job in self._by_group.pop(group_id, ()):
                job.alive = False
        self._running = [entry for entry in self._running if entry[2].alive]
        heapq.heapify(self._running)
        self._finished = deque(c for c in self._finished if c.group_id not in group_ids)
        self._pump()

    async def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """See `WorkerHandle`."""
        assert list(manifest) == MANIFEST
        self._group, self._rank = self._network.group(spec), spec.rank
        await self._enter("join_sync")
        await self._meet("joining")

    async def load_weights(self, version: int) -> LoadReport:
        """See `WorkerHandle`."""
        self._pump()
        self._stall(begin=True)
        try:
            await self._enter("load_weights")
            await self._meet(f"publication of version {version}")
            await asyncio.sleep(self._costs.load_s)
            self._check()
            self._version = version
            self._updates.append((self._engine_s(), version))
        finally:
            stalled_s = self._stall(begin=False)
        prints = fingerprints(version)
        if version in self.faults.corrupt:
            prints[self.faults.corrupt[version]] ^= 1
        return LoadReport(
            worker=self.index, version=version, num_bytes=NUM_BYTES, stalled_s=stalled_s, fingerprints=prints
        )

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """See `WorkerHandle`."""
        await self._enter("score")
        await asyncio.sleep(self._costs.score_s)
        self._check()
        off = np.float32(self.faults.probe_off.get(self._version, 0.0))
        return [
            log_probabilities(np.array(s[1:], dtype=np.int32), self._version, temperature=1.0) + off for s in sequences
        ]

    async def close(self) -> None:
        """See `WorkerHandle`."""
        self.closed = True
        self.dead_before_close = self.dead_before_close or self.dead
        self.die()

    # ---- faults ----------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """The process is gone: its peers' collectives break and its own calls raise `WorkerDied`."""
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        if self._group is not None:
            self._group.leave()
        self._wake.set()

    def _check(self) -> None:
        if self.dead:
            raise WorkerDied(f"rollout worker {self.index} is gone")

    async def _enter(self, method: str) -> None:
        self.calls[method] += 1
        if self.faults.die_in == (method, self.calls[method]):
            self.die()
        self._check()
        if self._hangs() or self.faults.hang_in == (method, self.calls[method]):
            await asyncio.sleep(self._costs.answer_s)
            raise StalledError(
                f"waited {self._costs.answer_s:.0f} s for rollout worker {self.index} to answer {method}()"
            )

    def _hangs(self) -> bool:
        return self.faults.hang_at is not None and self._loop.time() >= self.faults.hang_at

    async def _meet(self, what: str) -> None:
        assert self._group is not None
        try:
            await self._group.meet(self._rank, what)
        finally:
            self._check()

    # ---- the engine ------------------------------------------------------------------------------------------------

    def _engine_s(self) -> float:
        """The engine's own clock: it stands still while weights are loaded."""
        return (self._stalled_since or self._loop.time()) - self._stalled_s

    def _stall(self, *, begin: bool) -> float:
        """Stop or start the engine; returns for how long it stood."""
        self._count_time()
        now = self._loop.time()
        if begin:
            self._stalled_since = now
            return 0.0
        assert self._stalled_since is not None
        stood = now - self._stalled_since
        self._stalled_since = None
        self._stalled_s += stood
        self._pump()
        return stood

    def _count_time(self) -> None:
        now = self._loop.time()
        if self._stalled_since is None:
            if self._running:
                self._busy_s += now - self._clock_at
            else:
                self._idle_s += now - self._clock_at
        self._clock_at = now

    def _pump(self) -> None:
        """Finish what is due, start what waits, set the timer for the next end."""
        self._count_time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.dead or self._hangs() or self._stalled_since is not None:
            return
        now = self._engine_s()
        # Half a token of tolerance: a timer may fire a little early, and ends are multiples of tokens.
        due = now + self._costs.token_s / 2
        while self._running and self._running[0][0] <= due:
            self._finish(heapq.heappop(self._running)[2])
        while self._waiting and len(self._running) < self._slots:
            job = heapq.heappop(self._waiting)[2]
            if job.alive:
                job.started = now
                heapq.heappush(self._running, (now + job.length * self._costs.token_s, next(self._order), job))
        if self._running:
            wait_s = max(0.0, self._running[0][0] - now)
            self._timer = self._loop.call_later(wait_s, self._pump)

    def _finish(self, job: _Job) -> None:
        request = job.request
        jobs = self._by_group[request.group_id]
        jobs.remove(job)
        if not jobs:
            del self._by_group[request.group_id]
        # Token j exists at started + (j + 1) * token_s, sampled by the last version loaded before.
        loads = np.array([at for at, _ in self._updates])
        ends = job.started + np.arange(1, job.length + 1) * self._costs.token_s
        chosen = np.searchsorted(loads, ends - 0.5 * self._costs.token_s, side="right") - 1
        versions = np.array([v for _, v in self._updates], dtype=np.int32)[np.maximum(chosen, 0)]
        tokens = (np.arange(job.length, dtype=np.int32) + request.seed + job.index) % FACTS.vocab_size
        temperature = self.faults.temperature or request.sampling.temperature or 1.0
        self._tokens += job.length
        self._finished.append(
            Completion(
                group_id=request.group_id,
                index=job.index,
                token_ids=tokens.astype(np.int32),
                logprobs=log_probabilities(tokens, versions, temperature=temperature),
                versions=versions,
                finish_reason=FinishReason.LENGTH
                if job.length == request.sampling.max_new_tokens
                else FinishReason.STOP,
                text="42" if zlib.crc32(f"{request.group_id}/{job.index}".encode()) >> 16 & 1 else "41",
            )
        )
        self._wake.set()

    def _stats(self) -> WorkerStats:
        self._count_time()
        return WorkerStats(
            version=self._version,
            running=len(self._running),
            busy_s=self._busy_s,
            idle_s=self._idle_s,
            stalled_s=self._stalled_s,
            prompt_tokens=0,
            completion_tokens=self._tokens,
            rss_mb=1.0,
            cpu_s=0.0,
        )
