"""The queue under random schedules, under all schedules of small sizes, and broken on purpose."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from queue_driver import BoundBroken, CountsWrong, Coverage, NothingCanMove, Schedule

from s2rl.errors import RunError
from s2rl.trainer.queue import GroupState, SampleQueue
from s2rl.types import Encoded, Prompt, RolloutGroup

NUM_SCHEDULES = 1000


def run_schedule(seed: int, queue_class: type[SampleQueue], coverage: Coverage) -> None:
    try:
        Schedule(seed, make_queue=queue_class, coverage=coverage).run()
    except AssertionError as error:
        raise type(error)(f"seed {seed}: {error}") from error


def test_no_schedule_breaks_the_bound_loses_a_prompt_or_waits_for_ever():
    coverage = Coverage()
    for seed in range(NUM_SCHEDULES):
        run_schedule(seed, SampleQueue, coverage)
    counts = coverage.counts
    assert counts["schedules"] == NUM_SCHEDULES
    assert counts["tokens"] >= 100_000
    # The test must have met what it is about.
    for event in (
        "completions over several versions",
        "takes refused",
        "batches held back for an earlier deadline",
        "late syncs",
        "dropped waiting",
        "dropped in_flight",
        "dropped finished",
        "refused",
        "deaths with groups",
        "depth changes",
        "resumes",
        "finished groups sampled again after a smaller bound",
        "oldest token 0 below the bound",
    ):
        assert counts[event] >= 20, f"{event}: {counts[event]} times only"
    assert coverage.highest["staleness"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_schedules():
    coverage = Coverage()
    for seed in range(NUM_SCHEDULES, 30 * NUM_SCHEDULES):
        run_schedule(seed, SampleQueue, coverage)
    assert coverage.counts["tokens"] >= 3_000_000


# ---- the checker is able to fail -------------------------------------------------------------------------------------


class AlwaysFeasible(SampleQueue):
    def _feasible(self, deadlines, start):
        return True


class TakesWithoutAsking(SampleQueue):
    def can_take(self, worker_version):
        return True


class HandsOutWithoutLookingAtTheRest(SampleQueue):
    def hand_out(self):
        self._feasible = lambda deadlines, start: True
        try:
            return super().hand_out()
        finally:
            del self._feasible


class DeadlineOneTooLate(SampleQueue):
    def take(self, *, worker, worker_version):
        encoded = super().take(worker=worker, worker_version=worker_version)
        if encoded is not None:
            self._entries[encoded.prompt.prompt_id].deadline += 1
        return encoded


class CountsBatchesInsteadOfUpdates(SampleQueue):
    """Forgets that a batch of E updates makes E versions."""

    def _feasible(self, deadlines, start):
        return all(
            n <= self.groups_per_step * max(0, d - start + 1)
            for n, d in enumerate(sorted(d for d in deadlines if d is not None), start=1)
        )


class ForgetsTheBatchUnderWay(SampleQueue):
    @property
    def _next_start(self):
        return self.version


class LatestDeadlineFirst(SampleQueue):
    """Hands out in the wrong order, so what is due first is left behind."""

    def hand_out(self):
        done = [e for e in self._entries.values() if e.state is GroupState.FINISHED]
        if len(done) < self.groups_per_step:
            return None
        batch = sorted(done, key=lambda e: -e.deadline)[: self.groups_per_step]
        for entry in batch:
            entry.state = GroupState.TRAINING
        return [e.group for e in batch]


class OneBatchTooCautious(SampleQueue):
    def _feasible(self, deadlines, start):
        return super()._feasible(deadlines, start + self.updates_per_batch)


class KeepsTheSlotsOfTrainedGroups(SampleQueue):
    @property
    def room(self):
        return max(0, self.depth - len(self._entries) - self._trained)


class LosesDroppedGroups(SampleQueue):
    def drop(self, group_id, reason):
        super().drop(group_id, reason)
        self._dropped[reason] -= 1


class ForgetsLostGroups(SampleQueue):
    def requeue(self, group_id):
        pass


class GivesAGroupTwice(SampleQueue):
    def step_done(self):
        entry = next(e for e in self._entries.values() if e.state is GroupState.TRAINING)
        super().step_done()
        self._entries[entry.group_id] = dataclasses.replace(entry, state=GroupState.FINISHED)
        self._trained -= 1


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (AlwaysFeasible, BoundBroken),
        (TakesWithoutAsking, BoundBroken),
        (HandsOutWithoutLookingAtTheRest, BoundBroken),
        (DeadlineOneTooLate, BoundBroken),
        (CountsBatchesInsteadOfUpdates, BoundBroken),
        (ForgetsTheBatchUnderWay, BoundBroken),
        (LatestDeadlineFirst, BoundBroken),
        (OneBatchTooCautious, NothingCanMove),
        (KeepsTheSlotsOfTrainedGroups, NothingCanMove),
        (LosesDroppedGroups, (CountsWrong, RunError)),
        (ForgetsLostGroups, CountsWrong),
        (GivesAGroupTwice, CountsWrong),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_the_schedules_find_a_queue_that_is_broken_on_purpose(broken, found):
    met = set()
    for seed in range(150):
        try:
            run_schedule(seed, broken, Coverage())
        except (AssertionError, RunError) as error:
            met.add(type(error))
            if isinstance(error, found):
                return
    pytest.fail(f"not found within 150 schedules; met {met or 'nothing'}")


# ---- every schedule of small sizes -----------------------------------------------------------------------------------


class World:
    """A queue with an endless supply of prompts, workers at versions, and a learner. Copied for each branch."""

    def __init__(self, queue: SampleQueue, *, every: int, workers: Sequence[int], published: int, num: int) -> None:
        self.queue, self.every, self.workers, self.published, self.num = queue, every, list(workers), published, num

    def copy(self) -> World:
        old = self.queue
        queue = SampleQueue(
            groups_per_step=old.groups_per_step,
            max_staleness=old.max_staleness,
            updates_per_batch=old.updates_per_batch,
            version=old.version,
        )
        queue.depth = old.depth
        queue._entries = {k: dataclasses.replace(e) for k, e in old._entries.items()}
        return World(queue, every=self.every, workers=self.workers, published=self.published, num=self.num)

    def key(self) -> tuple[object, ...]:
        """The state up to renaming and a shift of all versions; what lies beyond the bound is alike."""
        v, least = self.queue.version, -self.queue.max_staleness - 1
        entries = sorted(
            (e.state.value, -99 if e.deadline is None else e.deadline - v) for e in self.queue._entries.values()
        )
        return tuple(entries), tuple(sorted(max(w - v, least) for w in self.workers)), max(self.published - v, least)

    def fill(self) -> None:
        while self.queue.room:
            self.num += 1
            prompt = Prompt(prompt_id=str(self.num), row=0, epoch=0, text="", answer="")
            self.queue.admit(Encoded(prompt=prompt, token_ids=()))

    def successors(self) -> Iterator[tuple[bool, World]]:
        """All worlds one move away, and whether the move is progress (trouble is not)."""
        for i, version in enumerate(self.workers):
            if self.queue.can_take(version) and self.queue.counts.waiting:
                new = self.copy()
                new.queue.take(worker=i, worker_version=version)
                yield True, new
            if version != self.published:
                new = self.copy()
                new.workers[i] = self.published
                yield True, new
        training = any(e.state is GroupState.TRAINING for e in self.queue._entries.values())
        for name, entry in self.queue._entries.items():
            if entry.state is GroupState.IN_FLIGHT:
                new = self.copy()
                new.queue.finish(
                    RolloutGroup(
                        group_id=name, encoded=entry.encoded, rollouts_G=(), worker=0, taken_version=entry.taken_version
                    )
                )
                yield True, new
                new = self.copy()
                new.queue.requeue(name)
                yield False, new
            if entry.state in (GroupState.IN_FLIGHT, GroupState.FINISHED):
                new = self.copy()
                new.queue.drop(name, "trouble")
                new.fill()
                yield False, new
        new = self.copy()
        if training:
            new.queue.step_done()
            if (new.queue.version // new.queue.updates_per_batch) % self.every == 0:
                new.published = new.queue.version
            new.fill()
            yield True, new
        elif (batch := new.queue.hand_out()) is not None:
            last = new.queue.version + new.queue.updates_per_batch - 1
            assert all(last - g.taken_version <= new.queue.max_staleness for g in batch), "over the bound"
            yield True, new


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("groups_per_step", "updates", "every", "bound"),
    [
        (1, 1, 1, 0),
        (2, 1, 1, 0),
        (2, 1, 1, 1),
        (1, 1, 1, 3),
        (2, 2, 1, 1),
        (1, 2, 1, 3),
        (2, 1, 2, 1),
        (1, 1, 3, 3),
        (1, 2, 2, 3),
    ],
)
def test_in_every_reachable_state_of_a_small_run_something_can_move(
    groups_per_step, updates, every, bound, num_workers
):
    queue = SampleQueue(groups_per_step=groups_per_step, max_staleness=bound, updates_per_batch=updates)
    world = World(queue, every=every, workers=[0] * num_workers, published=0, num=0)
    world.fill()

    # The phase of `every` is part of the state: versions are shifted away in the key.
    def phase(w: World) -> int:
        return (w.queue.version // updates) % every

    seen = {(phase(world), world.key())}
    todo = deque([world])
    while todo:
        world = todo.popleft()
        moved = False
        for progress, new in world.successors():
            moved |= progress
            if (key := (phase(new), new.key())) not in seen:
                seen.add(key)
                todo.append(new)
        assert moved, f"nothing can move: {world.key()}"
    assert len(seen) > 3


def test_with_a_bound_below_what_the_sync_interval_needs_the_queue_does_stand_still():
    """The configuration check refuses this setting; here is why."""
    queue = SampleQueue(groups_per_step=1, max_staleness=0)
    prompts = [Prompt(prompt_id=str(i), row=0, epoch=0, text="", answer="") for i in range(2)]
    queue.admit(Encoded(prompt=prompts[0], token_ids=()))
    encoded = queue.take(worker=0, worker_version=0)
    assert encoded is not None
    queue.finish(RolloutGroup(group_id="0", encoded=encoded, rollouts_G=(), worker=0, taken_version=0))
    assert queue.hand_out() is not None
    queue.step_done()
    queue.admit(Encoded(prompt=prompts[1], token_ids=()))
    assert queue.take(worker=0, worker_version=0) is None  # sync.every 2: the worker is still at version 0
    assert queue.hand_out() is None


def test_a_bound_that_no_batch_can_meet_is_refused():
    with pytest.raises(ValueError, match="max_staleness must be at least 2"):
        SampleQueue(groups_per_step=1, max_staleness=1, updates_per_batch=3)
