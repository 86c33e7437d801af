"""When checkpoints are taken and what of the trainer goes into them.

A checkpoint belongs to a step boundary: weights, optimizer and RNG are copied by the learner at the very
moment at which the
queue, the data cursor and the counters are taken here. The files are written while training goes on; the
complete marker
comes last, and only after the step's row stands in metrics.jsonl, so that a resumed run has no gap in its history.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from s2rl.errors import CheckpointError
from s2rl.trainer.parts import LearnerHandle
from s2rl.trainer.queue import QueuedGroup, QueueSnapshot, SampleQueue
from s2rl.trainer.waiting import within
from s2rl.types import Encoded, RolloutGroup

if TYPE_CHECKING:
    from s2rl.trainer.loop import LoopState, TrainingLoop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerState:
    """Everything that a resumed run needs besides the learner's files."""

    step: int
    counters: Mapping[str, Any]
    """Fields of `LoopState`."""
    stream: Mapping[str, int | bool | str]
    """Cursor of the prompt stream."""
    queue: QueueSnapshot
    rollouts_position: int
    """Bytes of rollouts.jsonl that belong to this history."""


class Store(Protocol):
    """Where checkpoints are kept; `s2rl.ckpt.CheckpointStore`."""

    def begin(self, step: int) -> Path:
        """A folder for the learner's files of this checkpoint, not yet complete."""
        ...

    def commit(
        self, step: int, *, state: Mapping[str, Any], outstanding: Sequence[tuple[Encoded, RolloutGroup | None]]
    ) -> Path:
        """Add the trainer's state, sync to disk, mark complete, prune older ones."""
        ...

    def discard(self, step: int) -> None:
        """Remove an incomplete checkpoint."""
        ...


class Checkpointer:
    """Takes checkpoints of one run."""

    def __init__(
        self,
        *,
        store: Store,
        learner: LearnerHandle,
        queue: SampleQueue,
        stream_state: Callable[[], Mapping[str, int | bool | str]],
        rollouts_position: Callable[[], int],
        every: int | None,
        limit_s: float,
    ) -> None:
        self._store, self._learner, self._queue = store, learner, queue
        self._stream_state, self._every, self._limit_s = stream_state, every, limit_s
        self._rollouts_position = rollouts_position
        self._writing: asyncio.Task[None] | None = None
        self._last_row = -1
        self._row = asyncio.Event()
        self.saved_step: int | None = None
        """Step of the newest complete checkpoint."""

    def resumed(self, step: int) -> None:
        """The run goes on from the complete checkpoint of this step."""
        self.saved_step = self._last_row = step

    def row_written(self, step: int) -> None:
        """The row of this step stands in metrics.jsonl."""
        self._last_row = step
        self._row.set()

    async def after_step(self, loop: TrainingLoop) -> None:
        """Take a checkpoint when one is due. Returns when the copy is made; raises what the last write raised."""
        if self._writing is not None and self._writing.done():
            await self._settle()
        if self._every is not None and loop.state.step % self._every == 0:
            await self._take(loop.state)

    async def finish(self, loop: TrainingLoop) -> None:
        """At the end: a checkpoint of the last step, unless there is one, and wait until it is complete."""
        await self._settle()
        if loop.state.step > 0 and self.saved_step != loop.state.step:
            await self._take(loop.state)
            await self._settle()

    async def _settle(self) -> None:
        if self._writing is not None:
            task, self._writing = self._writing, None
            await within(task, limit_s=self._limit_s, who="checkpoint", what="the files of the last checkpoint")

    async def _take(self, state: LoopState) -> None:
        await self._settle()
        trainer = TrainerState(
            step=state.step,
            counters=dataclasses.asdict(state),
            stream=self._stream_state(),
            queue=self._queue.snapshot(),
            rollouts_position=self._rollouts_position(),
        )
        folder = await asyncio.to_thread(self._store.begin, state.step)
        try:
            await self._learner.save(folder)
        except BaseException:
            await asyncio.to_thread(self._store.discard, state.step)
            raise
        self._writing = asyncio.create_task(self._write(trainer))

    async def _write(self, trainer: TrainerState) -> None:
        try:
            await self._learner.save_done()
            while self._last_row < trainer.step:
                self._row.clear()
                await self._row.wait()
            await asyncio.to_thread(
                self._store.commit,
                trainer.step,
                state={
                    "step": trainer.step,
                    "counters": dict(trainer.counters),
                    "stream": dict(trainer.stream),
                    "rollouts_position": trainer.rollouts_position,
                    "queue": {
                        "version": trainer.queue.version,
                        "drawn": trainer.queue.drawn,
                        "trained": trainer.queue.trained,
                        "dropped": dict(trainer.queue.dropped),
                    },
                },
                outstanding=[(q.encoded, q.group) for q in trainer.queue.outstanding],
            )
        except BaseException:
            await asyncio.to_thread(self._store.discard, trainer.step)
            raise
        self.saved_step = trainer.step
        logger.info("checkpoint of step %d is complete", trainer.step)

    async def cancel(self) -> None:
        """Give up a write under way."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None


def restore_state(state: Mapping[str, Any], outstanding: Sequence[tuple[Encoded, RolloutGroup | None]]) -> TrainerState:
    """The inverse of what `commit` was given. Raises `CheckpointError` when a field is missing."""
    try:
        queue = state["queue"]
        return TrainerState(
            step=int(state["step"]),
            counters=dict(state["counters"]),
            stream=dict(state["stream"]),
            rollouts_position=int(state["rollouts_position"]),
            queue=QueueSnapshot(
                version=int(queue["version"]),
                drawn=int(queue["drawn"]),
                trained=int(queue["trained"]),
                dropped={str(k): int(v) for k, v in queue["dropped"].items()},
                outstanding=tuple(QueuedGroup(encoded=e, group=g) for e, g in outstanding),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the trainer state of the checkpoint is not readable ({type(error).__name__}: {error}); "
            "remove this checkpoint folder to resume from the one before"
        ) from error
