"""The sample queue: where every prompt is, and the proof that no token is trained too stale.

This is a pure state machine: it does not wait, it holds no clock and no connection, so that a property test can drive
it through any schedule. The controller asks it four questions: may another prompt be admitted (`room`), may a worker
that runs version a take a group (`take`), is there a batch (`hand_out`), and where is everything (`counts`).

Staleness. A batch that is handed out at version u makes versions u+1 .. u+E (E = updates_per_batch) and so trains its
tokens at versions u .. u+E-1. A group taken by a worker at version a holds no token older than a, so all its tokens are
within the bound S exactly if its batch is handed out at u <= a + S - (E-1). We say its deadline is d = a + S.

Let B(d, v) = max(0, (d - v + 1) // E) be the number of batches that can still be handed out, starting at version v,
before a group with deadline d is too old. The queue keeps this invariant for every d:

    (groups taken and not yet handed out, with a deadline <= d)  <=  groups_per_step * B(d, v)

where v is the version at which the next batch starts. `take` refuses a group that would break it, `hand_out` gives the
earliest deadlines first and waits when what would remain breaks it at v + E. Since every deadline can be met
at any time, no
finished group is ever thrown away for its age. The invariant with a <= v implies that at most ((S+1) // E) batches are
outstanding; at S = E-1 this is strict on-policy training.

Progress. If fewer than groups_per_step groups are outstanding then a worker at the version of the last sync
can take one
more as long as S >= sync_every * E - 1 (checked with the configuration), and every group in flight ends or is dropped.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from s2rl.errors import RunError
from s2rl.types import Encoded, RolloutGroup


class GroupState(enum.StrEnum):
    """Where an outstanding group is."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    FINISHED = "finished"
    TRAINING = "training"
    """Handed out; counted as finished until its step is done."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    group_id: str
    order: int
    encoded: Encoded
    state: GroupState = GroupState.WAITING
    worker: int | None = None
    taken_version: int | None = None
    deadline: int | None = None
    group: RolloutGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """Every drawn prompt is in exactly one of these."""

    drawn: int
    waiting: int
    in_flight: int
    finished: int
    trained: int
    dropped: int

    def check(self) -> None:
        """Raise `RunError` when the counts do not add up."""
        total = self.waiting + self.in_flight + self.finished + self.trained + self.dropped
        if total != self.drawn:
            raise RunError(f"queue accounting broken: {self} adds up to {total}, not to the {self.drawn} prompts drawn")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """One outstanding group as a checkpoint stores it. `group` is set for finished groups only."""

    encoded: Encoded
    group: RolloutGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueSnapshot:
    """The queue between two steps."""

    version: int
    drawn: int
    trained: int
    dropped: Mapping[str, int]
    outstanding: Sequence[QueuedGroup]


class SampleQueue:
    """See the module docstring. `depth` (groups outstanding at once) may be lowered and raised at any time."""

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, updates_per_batch: int = 1, version: int = 0
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.updates_per_batch = updates_per_batch
        self.version = version
        self.max_depth = groups_per_step * ((max_staleness + 1) // updates_per_batch)
        if self.max_depth < groups_per_step:
            raise ValueError(
                f"max_staleness={max_staleness} with updates_per_batch={updates_per_batch} can never hand out a batch; "
                f"max_staleness must be at least {updates_per_batch - 1}"
            )
        self._depth = self.max_depth
        self._entries: dict[str, _Entry] = {}
        self._num_ordered = 0
        self._drawn = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()

    # ---- prompts come in -------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Groups that may be outstanding at once."""
        return self._depth

    @depth.setter
    def depth(self, value: int) -> None:
        self._depth = min(max(value, self.groups_per_step), self.max_depth)

    @property
    def room(self) -> int:
        """Prompts that may be admitted now."""
        return max(0, self._depth - len(self._entries))

    def admit(self, encoded: Encoded) -> str:
        """Charge a slot for a prompt; returns its group id, which is the prompt id."""
        group_id = encoded.prompt.prompt_id
        assert group_id not in self._entries, group_id
        self._drawn += 1
        self._add(encoded)
        return group_id

    def refuse(self, reason: str) -> None:
        """Count a drawn prompt that cannot be admitted (for instance one over its token budget)."""
        self._drawn += 1
        self._dropped[reason] += 1

    def _add(self, encoded: Encoded) -> _Entry:
        entry = _Entry(group_id=encoded.prompt.prompt_id, order=self._num_ordered, encoded=encoded)
        self._num_ordered += 1
        self._entries[entry.group_id] = entry
        return entry

    # ---- workers ---------------------------------------------------------------------------------------------------

    def can_take(self, worker_version: int) -> bool:
        """Whether a worker at this version may take one more group without endangering any deadline."""
        deadlines = [e.deadline for e in self._entries.values() if e.deadline is not None and not self._handed(e)]
        return self._feasible([*deadlines, worker_version + self.max_staleness], self._next_start)

    def take(self, *, worker: int, worker_version: int) -> Encoded | None:
        """The oldest waiting prompt, now in flight at `worker`; None when there is none or the deadline rule
        forbids it."""
        waiting = min(
            (e for e in self._entries.values() if e.state is GroupState.WAITING), key=lambda e: e.order, default=None
        )
        if waiting is None or not self.can_take(worker_version):
            return None
        waiting.state = GroupState.IN_FLIGHT
        waiting.worker = worker
        waiting.taken_version = worker_version
        waiting.deadline = worker_version + self.max_staleness
        return waiting.encoded

    def deadline(self, group_id: str) -> int:
        """Deadline of a taken group."""
        deadline = self._entries[group_id].deadline
        assert deadline is not None, group_id
        return deadline

    def taken_version(self, group_id: str) -> int:
        """Version of the worker when it took the group."""
        version = self._entries[group_id].taken_version
        assert version is not None, group_id
        return version

    def finish(self, group: RolloutGroup) -> None:
        """All completions of a group are sampled and graded."""
        entry = self._entries[group.group_id]
        assert entry.state is GroupState.IN_FLIGHT, (group.group_id, entry.state)
        assert entry.taken_version is not None and group.min_version >= entry.taken_version, group.group_id
        entry.state = GroupState.FINISHED
        entry.group = group

    def drop(self, group_id: str, reason: str) -> None:
        """Give up a group that is waiting, in flight or finished; its slot is free at once."""
        entry = self._entries.pop(group_id)
        assert entry.state is not GroupState.TRAINING, group_id
        self._dropped[reason] += 1

    def is_outstanding(self, group_id: str) -> bool:
        """Whether the group is neither trained nor dropped."""
        return group_id in self._entries

    def requeue(self, group_id: str) -> None:
        """Its worker is gone: the group waits again (its tokens are lost, its slot stays charged)."""
        entry = self._entries[group_id]
        assert entry.state is GroupState.IN_FLIGHT, (group_id, entry.state)
        entry.state = GroupState.WAITING
        entry.worker = entry.taken_version = entry.deadline = entry.group = None

    # ---- learner ---------------------------------------------------------------------------------------------------

    def hand_out(self) -> list[RolloutGroup] | None:
        """A batch of finished groups, earliest deadline first, or None when it must be waited for."""
        assert not any(self._handed(e) for e in self._entries.values()), "the last batch is not done"
        finished = sorted(
            (e for e in self._entries.values() if e.state is GroupState.FINISHED), key=lambda e: (e.deadline, e.order)
        )
        batch = finished[: self.groups_per_step]
        if len(batch) < self.groups_per_step:
            return None
        chosen = {e.group_id for e in batch}
        remaining = [e.deadline for e in self._entries.values() if e.deadline is not None and e.group_id not in chosen]
        if not self._feasible(remaining, self.version + self.updates_per_batch):
            return None
        for entry in batch:
            entry.state = GroupState.TRAINING
        return [e.group for e in batch if e.group is not None]

    def step_done(self) -> None:
        """The batch that was handed out is trained; its slots are free and the version moves on."""
        done = [e.group_id for e in self._entries.values() if self._handed(e)]
        assert len(done) == self.groups_per_step, len(done)
        for group_id in done:
            del self._entries[group_id]
        self._trained += len(done)
        self.version += self.updates_per_batch

    def blocking(self) -> list[str]:
        """What a hand-out waits for: groups in flight, earliest deadlines first, each with its worker. For messages."""
        flying = [e for e in self._entries.values() if e.state is GroupState.IN_FLIGHT]
        return [
            f"{e.group_id} at rollout worker {e.worker} since version {e.taken_version}"
            for e in sorted(flying, key=lambda e: (e.deadline, e.order))
        ]

    # ---- accounting ------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> QueueCounts:
        """Where every drawn prompt is."""
        states = Counter(e.state for e in self._entries.values())
        return QueueCounts(
            drawn=self._drawn,
            waiting=states[GroupState.WAITING],
            in_flight=states[GroupState.IN_FLIGHT],
            finished=states[GroupState.FINISHED] + states[GroupState.TRAINING],
            trained=self._trained,
            dropped=self._dropped.total(),
        )

    @property
    def dropped(self) -> Mapping[str, int]:
        """Dropped prompts by reason."""
        return dict(self._dropped)

    def snapshot(self) -> QueueSnapshot:
        """State between two steps, for a checkpoint."""
        entries = sorted(self._entries.values(), key=lambda e: e.order)
        assert not any(self._handed(e) for e in entries), "snapshot during a step"
        return QueueSnapshot(
            version=self.version,
            drawn=self._drawn,
            trained=self._trained,
            dropped=dict(self._dropped),
            outstanding=tuple(QueuedGroup(encoded=e.encoded, group=e.group) for e in entries),
        )

    def restore(self, snapshot: QueueSnapshot) -> None:
        """Continue from `snapshot`. Unfinished groups wait again; so does a finished one that a smaller bound
        forbids."""
        assert not self._entries and self._drawn == 0, "restore into a used queue"
        self.version = snapshot.version
        self._drawn, self._trained = snapshot.drawn, snapshot.trained
        self._dropped = Counter(snapshot.dropped)
        for queued in snapshot.outstanding:
            entry = self._add(queued.encoded)
            if queued.group is not None and self.can_take(queued.group.taken_version):
                entry.state = GroupState.FINISHED
                entry.worker, entry.group = queued.group.worker, queued.group
                entry.taken_version = queued.group.taken_version
                entry.deadline = entry.taken_version + self.max_staleness

    # ---- the rule --------------------------------------------------------------------------------------------------

    @staticmethod
    def _handed(entry: _Entry) -> bool:
        return entry.state is GroupState.TRAINING

    @property
    def _next_start(self) -> int:
        """The version at which the next batch starts."""
        training = any(self._handed(e) for e in self._entries.values())
        return self.version + (self.updates_per_batch if training else 0)

    def _feasible(self, deadlines: Sequence[int | None], start: int) -> bool:
        """Whether groups with these deadlines can all be trained in time by batches that begin at version `start`."""
        for num_due, deadline in enumerate(sorted(d for d in deadlines if d is not None), start=1):
            num_batches = max(0, (deadline - start + 1) // self.updates_per_batch)
            if num_due > self.groups_per_step * num_batches:
                return False
        return True
