"""Drives a `SampleQueue` through one random schedule and checks everything that it promises.

The driver keeps books of its own: where each prompt is, which version the learner has, which one sampled each token.
It never asks the queue about any of this, so a queue that lies is found out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from s2rl.trainer.queue import SampleQueue
from s2rl.types import Completion, Encoded, FinishReason, Prompt, Rollout, RolloutGroup, Score

MAX_MOVES = 50_000
LOGPROBS = np.zeros(4096, dtype=np.float32)
TOKENS = np.zeros(4096, dtype=np.int32)


class BoundBroken(AssertionError):
    """A token would be trained at a version at which it is too old (or has not been sampled yet)."""


class CountsWrong(AssertionError):
    """The queue and the driver's books differ on where a prompt is."""


class NothingCanMove(AssertionError):
    """A wait without progress possible."""


@dataclass(slots=True)
class Flight:
    """A group being sampled: tokens left and versions so far, per completion."""

    encoded: Encoded
    taken_version: int
    left: list[int]
    versions: list[list[int]]

    @property
    def sampled(self) -> bool:
        return not any(self.left)


@dataclass(slots=True)
class FakeWorker:
    index: int
    version: int | None
    speed: int
    running: dict[str, Flight] = field(default_factory=dict)


@dataclass(slots=True)
class Coverage:
    """What the schedules really did, so that a test can insist that it was not vacuous."""

    counts: Counter[str] = field(default_factory=Counter)
    highest: Counter[str] = field(default_factory=Counter)


class Schedule:
    """One random schedule. `run` raises one of the errors above when a promise is broken."""

    def __init__(self, seed: int, *, make_queue: Callable[..., SampleQueue], coverage: Coverage) -> None:
        rng = self.rng = random.Random(seed)
        self.make_queue, self.coverage = make_queue, coverage
        self.updates, self.every = rng.randint(1, 3), rng.randint(1, 3)
        self.least = self.every * self.updates - 1
        self.bound = self.least if rng.random() < 0.4 else rng.randint(self.least, max(self.least, 5))
        self.groups_per_step, self.group_size = rng.randint(1, 8), rng.randint(1, 3)
        self.target = rng.randint(3, 8)  # batches
        self.queue = self._new_queue(version=0)
        self.version = self.published = self.batches = 0
        self.workers = [FakeWorker(index=i, version=0, speed=rng.choice((4, 15, 60))) for i in range(rng.randint(1, 4))]
        self.grading: dict[str, RolloutGroup] = {}
        self.where: dict[str, str] = {}
        self.books: Counter[str] = Counter()
        self.training: list[RolloutGroup] | None = None
        self.num_drawn = 0
        self.tail = rng.choice((0.3, 1.0, 1.8))  # sigma of the lengths' logarithm
        moves = (self.admit, self.take, self.sample, self.grade, self.sync, self.hand_out, self.step_done)
        self.weights = dict(zip(moves, (rng.choice((0.3, 1, 3)) for _ in moves), strict=True))
        self.trouble, self.troubles_left = rng.choice((0.0, 0.02, 0.2)), 40

    def _new_queue(self, version: int) -> SampleQueue:
        return self.make_queue(
            groups_per_step=self.groups_per_step,
            max_staleness=self.bound,
            updates_per_batch=self.updates,
            version=version,
        )

    def run(self) -> None:
        for _ in range(MAX_MOVES):
            if self.batches == self.target:
                self.coverage.counts["schedules"] += 1
                return
            possible = self.possible_moves()
            if not self.can_move(possible):
                raise NothingCanMove(f"{self.queue.counts}, version {self.version}, published {self.published}")
            self.draw(possible)()
            self.check_counts()
        raise NothingCanMove(f"no end after {MAX_MOVES} moves: {self.queue.counts}")

    def draw(self, possible: list[Callable[[], None]]) -> Callable[[], None]:
        """A random move. Troubles end after a while: a run in which workers die all the time has no end."""
        if self.troubles_left and self.rng.random() < self.trouble:
            self.troubles_left -= 1
            return self.rng.choice((self.drop, self.drop, self.refuse, self.die, self.set_depth, self.resume))
        return self.rng.choices(possible, [self.weights[m] for m in possible])[0]

    def possible_moves(self) -> list[Callable[[], None]]:
        """Moves that may do something. Whether a take or a hand-out is allowed is the queue's to say."""
        moves = [self.hand_out if self.training is None else self.step_done]
        moves += [self.take] if self.books["waiting"] else []
        moves += [self.admit] if self.admissible() else []
        moves += [self.grade] if self.grading else []
        moves += [self.sample] if any(w.running for w in self.workers) else []
        moves += [self.sync] if any(w.version != self.published for w in self.workers) else []
        return moves

    def _move(self, name: str, state: str) -> None:
        if name in self.where:
            self.books[self.where[name]] -= 1
        self.where[name] = state
        self.books[state] += 1

    # ---- what must hold after every move -----------------------------------------------------------------------------

    def check_counts(self) -> None:
        counts = self.queue.counts
        counts.check()
        books = self.books
        seen = (counts.waiting, counts.in_flight, counts.finished, counts.trained, counts.dropped, counts.drawn)
        expected = (*(books[k] for k in ("waiting", "in_flight", "finished", "trained", "dropped")), self.num_drawn)
        if seen != expected:
            raise CountsWrong(f"the queue says {counts}, the books say {dict(books)} of {self.num_drawn}")

    def can_move(self, possible: list[Callable[[], None]]) -> bool:
        """Whether anything can happen besides trouble: the learner must never depend on luck."""
        if any(m not in (self.take, self.hand_out) for m in possible):
            return True
        before = dict(self.books)
        for worker in self.workers:
            self._take_at(worker)
        self.hand_out()
        return before != self.books or self.training is not None

    def outstanding(self) -> int:
        return self.books["waiting"] + self.books["in_flight"] + self.books["finished"]

    def admissible(self) -> int:
        still_needed = (self.target - self.batches) * self.groups_per_step - self.outstanding()
        return min(self.queue.room, still_needed)

    # ---- moves -------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        for _ in range(self.rng.randint(1, self.admissible())):
            name = f"{self.num_drawn}"
            self.num_drawn += 1
            self._move(name, "waiting")
            self.queue.admit(Encoded(prompt=Prompt(prompt_id=name, row=0, epoch=0, text="", answer=""), token_ids=(1,)))

    def take(self) -> None:
        self._take_at(self.rng.choice(self.workers))

    def _take_at(self, worker: FakeWorker) -> None:
        if worker.version is None:
            return
        encoded = self.queue.take(worker=worker.index, worker_version=worker.version)
        if encoded is None:
            self.coverage.counts["takes refused"] += 1
            return
        name = encoded.prompt.prompt_id
        if self.where[name] != "waiting":
            raise CountsWrong(f"{name} was taken while it was {self.where[name]}")
        self._move(name, "in_flight")
        lengths = [min(400, int(self.rng.lognormvariate(1.5, self.tail))) for _ in range(self.group_size)]
        worker.running[name] = Flight(encoded, worker.version, lengths, [[] for _ in lengths])
        self._put_aside_when_sampled(worker, name)

    def sample(self) -> None:
        worker = self.rng.choice([w for w in self.workers if w.running])
        for name in [n for n in worker.running if self.rng.random() < 0.7]:
            flight = worker.running[name]
            for i, left in enumerate(flight.left):
                count = min(left, self.rng.randint(0, worker.speed))
                flight.left[i] -= count
                flight.versions[i] += [worker.version] * count
            self._put_aside_when_sampled(worker, name)

    def _put_aside_when_sampled(self, worker: FakeWorker, name: str) -> None:
        flight = worker.running[name]
        if flight.sampled:
            del worker.running[name]
            self.grading[name] = self._group(name, flight, worker.index)

    def _group(self, name: str, flight: Flight, worker: int) -> RolloutGroup:
        rollouts = []
        for i, versions in enumerate(flight.versions):
            self.coverage.counts["completions over several versions"] += len(set(versions)) > 1
            completion = Completion(
                group_id=name,
                index=i,
                token_ids=TOKENS[: len(versions)],
                logprobs=LOGPROBS[: len(versions)],
                versions=np.array(versions, dtype=np.int32),
                finish_reason=FinishReason.STOP,
                text="",
            )
            rollouts.append(Rollout(completion=completion, score=Score(total=0.0)))
        return RolloutGroup(
            group_id=name,
            encoded=flight.encoded,
            rollouts_G=tuple(rollouts),
            worker=worker,
            taken_version=flight.taken_version,
        )

    def grade(self) -> None:
        if self.grading:
            name = self.rng.choice(list(self.grading))
            self._move(name, "finished")
            self.queue.finish(self.grading.pop(name))

    def sync(self) -> None:
        """One worker loads what was published last; the others may lag for as long as they like."""
        worker = self.rng.choice([w for w in self.workers if w.version != self.published])
        self.coverage.counts["late syncs"] += worker.version is not None and self.version - worker.version > self.least
        worker.version = self.published

    def hand_out(self) -> None:
        if self.training is not None:
            return
        batch = self.queue.hand_out()
        if batch is None:
            enough = self.books["finished"] >= self.groups_per_step
            self.coverage.counts["batches held back for an earlier deadline"] += enough
            return
        names = [g.group_id for g in batch]
        if len(set(names)) != self.groups_per_step or any(self.where[n] != "finished" for n in names):
            raise CountsWrong(f"a batch of {[(n, self.where[n]) for n in names]}")
        self.training = batch
        for group in batch:
            for rollout in group.rollouts_G:
                self._check_ages(rollout.completion.versions)

    def _check_ages(self, versions: np.ndarray) -> None:
        for update in range(self.updates):
            ages = self.version + update - versions
            if len(ages) and not 0 <= ages.min() <= ages.max() <= self.bound:
                raise BoundBroken(
                    f"ages {sorted(set(ages.tolist()))} at version {self.version + update}, bound {self.bound}"
                )
        self.coverage.counts["tokens"] += len(versions)
        if len(versions):
            slack = self.bound - int(ages.max())
            self.coverage.counts[f"oldest token {slack} below the bound" if slack < 2 else "younger"] += 1
            self.coverage.highest["staleness"] = max(self.coverage.highest["staleness"], int(ages.max()))

    def step_done(self) -> None:
        if self.training is None:
            return
        for group in self.training:
            self._move(group.group_id, "trained")
        self.training = None
        self.queue.step_done()
        self.version += self.updates
        self.batches += 1
        if self.batches % self.every == 0:
            self.published = self.version

    # ---- troubles ----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """A group that waits, is sampled, is graded or is finished is given up."""
        handed = {g.group_id for g in self.training or ()}
        names = [n for n, s in self.where.items() if s in ("waiting", "in_flight", "finished") and n not in handed]
        if names:
            name = self.rng.choice(names)
            self.coverage.counts[f"dropped {self.where[name]}"] += 1
            for worker in self.workers:
                worker.running.pop(name, None)
            self.grading.pop(name, None)
            self._move(name, "dropped")
            self.queue.drop(name, "trouble")

    def refuse(self) -> None:
        self.coverage.counts["refused"] += 1
        self.num_drawn += 1
        self.books["dropped"] += 1
        self.queue.refuse("over budget")

    def die(self) -> None:
        """A worker is gone with what it samples; what is being graded is safe. Its successor has no weights yet."""
        worker = self.rng.choice(self.workers)
        self.coverage.counts["deaths with groups"] += bool(worker.running)
        for name in worker.running:
            self._move(name, "waiting")
            self.queue.requeue(name)
        worker.running.clear()
        worker.version = None

    def set_depth(self) -> None:
        self.coverage.counts["depth changes"] += 1
        self.queue.depth = self.rng.randint(0, self.queue.max_depth + 3)

    def resume(self) -> None:
        """Checkpoint and restart: what is not finished begins again; the bound may be configured anew."""
        if self.training is not None:
            return
        self.coverage.counts["resumes"] += 1
        snapshot = self.queue.snapshot()
        smaller = False
        if self.rng.random() < 0.5:
            bound = self.rng.randint(self.least, max(self.least, 5))
            smaller, self.bound = bound < self.bound, bound
        self.queue = self._new_queue(version=0)
        self.queue.restore(snapshot)
        self.grading.clear()
        kept = {q.encoded.prompt.prompt_id for q in self.queue.snapshot().outstanding if q.group is not None}
        for name, state in self.where.items():
            if state == "in_flight" or (state == "finished" and name not in kept):
                if state == "finished" and not smaller:
                    raise CountsWrong(f"finished group {name} was lost by a resume with the same bound")
                self.coverage.counts["finished groups sampled again after a smaller bound"] += state == "finished"
                self._move(name, "waiting")
        self.published = self.version
        for worker in self.workers:
            worker.running.clear()
            worker.version = self.version  # the first act after a resume is a sync
