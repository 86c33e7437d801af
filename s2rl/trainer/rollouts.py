"""Training rollouts: prompts in, graded groups into the queue.

Loop `feed`
    consumes: the prompt stream                produces: groups in flight at the workers
    waits for: room in the queue, a worker     woken by: `wake` (slot freed, version moved, group ended, new worker)

Completions come back through the pool's calls (`Sink`); each is graded as it arrives, and the last one of a group puts
the group into the queue as finished.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from s2rl.data.encode import Dropped
from s2rl.trainer.pool import RolloutPool, WorkerSlot
from s2rl.trainer.queue import SampleQueue
from s2rl.trainer.waiting import Progress
from s2rl.types import (
    Completion,
    Encoded,
    FinishReason,
    GroupRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingSpec,
)

logger = logging.getLogger(__name__)


class PromptSource(Protocol):
    """An endless stream of prompts."""

    def next(self) -> Prompt:
        """The next draw."""
        ...


class PromptEncoder(Protocol):
    """Prompt to token ids."""

    def encode(self, prompt: Prompt) -> Encoded | Dropped:
        """Token ids, or why the prompt cannot be used."""
        ...


class Grader(Protocol):
    """Scores completions; never raises for what a reward function does."""

    async def grade_many(self, items: Sequence[tuple[Completion, Prompt]]) -> list[Rollout]:
        """Scores in the order of `items`."""
        ...


@dataclass(slots=True, kw_only=True)
class _Open:
    """A group in flight. A lost group is opened anew, so results of the old attempt find no home."""

    encoded: Encoded
    worker: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)


def group_seed(seed: int, prompt_id: str) -> int:
    """Sampling seed of a draw: fixed by the run's seed and the prompt id, so that a resumed run draws alike.
    31 bits."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x3FFFFFFF


class TrainingRollouts:
    """Feeds the workers and collects what they return. `needed` says how many more prompts the run can use."""

    def __init__(
        self,
        *,
        queue: SampleQueue,
        pool: RolloutPool,
        source: PromptSource,
        encoder: PromptEncoder,
        grader: Grader,
        sampling: SamplingSpec,
        group_size: int,
        max_num_seqs: int,
        seed: int,
        needed: Callable[[], int],
        on_finished: Callable[[], None],
        on_dropped: Callable[[str, Prompt, str], None],
        progress: Progress,
    ) -> None:
        self._queue, self._pool, self._source, self._encoder, self._grader = queue, pool, source, encoder, grader
        self._sampling, self._group_size, self._seed = sampling, group_size, seed
        self._max_num_seqs = max_num_seqs
        self._needed, self._on_finished, self._on_dropped = needed, on_finished, on_dropped
        self._progress = progress
        self._open: dict[str, _Open] = {}
        self._ungraded: list[tuple[_Open, Completion]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.wake = asyncio.Event()
        self.paused = False

    async def feed(self) -> None:
        """The feed loop; see the module docstring."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            if not self.paused:
                self._admit()
                await self._dispatch()

    def _admit(self) -> None:
        for _ in range(min(self._queue.room, self._needed())):
            while isinstance(encoded := self._encoder.encode(prompt := self._source.next()), Dropped):
                self._queue.refuse(encoded.reason)
                self._on_dropped(prompt.prompt_id, prompt, encoded.reason)
            self._queue.admit(encoded)

    async def _dispatch(self) -> None:
        given: dict[int, tuple[WorkerSlot, list[GroupRequest]]] = {}
        ready = [s for s in self._pool.alive if s.version is not None]
        loads = {id(slot): slot.load for slot in ready}
        # A worker is given what it can decode at once: a group handed over earlier would only get an earlier deadline.
        # Completions count, not groups: a group down to its straggler leaves the room of the others.
        while ready := [s for s in ready if loads[id(s)] < self._max_num_seqs]:
            # The newest weights first: a group taken there may live longest. Then the least loaded.
            slot = min(ready, key=lambda s: (-(s.version or 0), loads[id(s)]))
            assert slot.version is not None
            encoded = self._queue.take(worker=slot.handle.index, worker_version=slot.version)
            if encoded is None:
                break
            group_id = encoded.prompt.prompt_id
            self._open[group_id] = _Open(encoded=encoded, worker=slot.handle.index)
            loads[id(slot)] += self._group_size
            given.setdefault(id(slot), (slot, []))[1].append(
                GroupRequest(
                    group_id=group_id,
                    encoded=encoded,
                    num_completions=self._group_size,
                    sampling=self._sampling,
                    seed=group_seed(self._seed, group_id),
                    priority=self._queue.deadline(group_id),
                )
            )
        await asyncio.gather(*(self._pool.submit(requests, slot=slot, sink=self) for slot, requests in given.values()))

    # ---- Sink ------------------------------------------------------------------------------------------------------

    def completed(self, completion: Completion) -> None:
        """Grade it; completions that arrive in the same report are graded together."""
        group = self._open.get(completion.group_id)
        if group is None:
            return
        if completion.finish_reason is FinishReason.ABORT:
            self._drop(completion.group_id, "aborted")
            return
        if not self._ungraded:
            asyncio.get_running_loop().call_soon(self._grade_pending)
        self._ungraded.append((group, completion))

    def failed(self, group_id: str, reason: str) -> None:
        """The worker cannot sample it: dropped, counted, replaced by another prompt."""
        self._drop(group_id, reason)

    def lost(self, request: GroupRequest) -> None:
        """Its worker died: it waits again."""
        group = self._open.pop(request.group_id, None)
        if group is not None:
            self._queue.requeue(request.group_id)
            self.wake.set()

    def _drop(self, group_id: str, reason: str) -> None:
        group = self._open.pop(group_id, None)
        if group is not None:
            self._queue.drop(group_id, reason)
            self._on_dropped(group_id, group.encoded.prompt, reason)
            self._run(self._pool.abort(group_id))
            self.wake.set()

    def _grade_pending(self) -> None:
        items, self._ungraded = self._ungraded, []
        by_group: dict[int, list[tuple[_Open, Completion]]] = {}
        for item in items:
            by_group.setdefault(id(item[0]), []).append(item)
        # One call per group: a reward function that hangs on one completion holds up no other group.
        for of_group in by_group.values():
            self._run(self._grade(of_group))

    async def _grade(self, items: list[tuple[_Open, Completion]]) -> None:
        rollouts = await self._grader.grade_many([(completion, group.encoded.prompt) for group, completion in items])
        for (group, completion), rollout in zip(items, rollouts, strict=True):
            if self._open.get(completion.group_id) is not group:
                continue  # dropped or lost while it was graded
            group.rollouts[completion.index] = rollout
            if len(group.rollouts) == self._group_size:
                self._finish(completion.group_id, group)

    def _finish(self, group_id: str, group: _Open) -> None:
        del self._open[group_id]
        self._queue.finish(
            RolloutGroup(
                group_id=group_id,
                encoded=group.encoded,
                rollouts_G=tuple(group.rollouts[i] for i in range(self._group_size)),
                worker=group.worker,
                taken_version=self._queue.taken_version(group_id),
            )
        )
        self._progress.moved("group")
        self._on_finished()
        self.wake.set()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if (
                not finished.cancelled()
                and (error := finished.exception()) is not None
                and not self._pool.failure.done()
            ):
                self._pool.failure.set_exception(error)
                self._on_finished()

        task.add_done_callback(done)

    async def close(self) -> None:
        """Cancel gradings under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
