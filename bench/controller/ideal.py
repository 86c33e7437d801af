"""Lower bounds on the learner's idle time, without a controller.

`ideal_run` is a discrete-event simulation of the queue's rules with nothing in the way: every decision is taken at the
very moment at which it becomes possible and costs nothing, grading is instant, depth is the most that the bound
permits. It shares with the real run the queue (the rules themselves), the lengths and the costs, and none of the code
that waits, calls, polls or reports.

`any_policy_bound` holds for every controller that keeps the staleness bound, even one that knows all lengths before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.controller.simulated import Costs
from bench.controller.wiring import SimulatedStream
from s2rl.config import RunConfig
from s2rl.trainer.queue import SampleQueue
from s2rl.types import Encoded, Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """What a run of zero overhead comes to."""

    seconds: float
    idle_s: float
    busy_s: float
    mean_take_age: float
    """Mean versions between the take of a group and its training."""

    @property
    def idle_share(self) -> float:
        """Of the run's time."""
        return self.idle_s / self.seconds


@dataclass(slots=True)
class _Engine:
    """A worker's slots. `running` holds ends on the engines' clock, which stands still during loads."""

    waiting: list[tuple[int, int, str, int]] = field(default_factory=list)
    running: list[tuple[float, int, str]] = field(default_factory=list)
    load: int = 0


class _IdealRun:
    def __init__(self, config: RunConfig, costs: Costs, length: Callable[[str, int], int]) -> None:
        self.config, self.costs, self.length = config, costs, length
        self.queue = SampleQueue(
            groups_per_step=config.algorithm.groups_per_step, max_staleness=config.staleness.max_staleness
        )
        self.stream = SimulatedStream()
        self.engines = [_Engine() for _ in range(config.rollout.workers)]
        self.left: dict[str, int] = {}
        self.order = itertools.count()
        self.now = self.stood_s = 0.0
        self.published = self.step = 0

    def run(self) -> Ideal:
        """Until the last step is published."""
        idle_s = busy_s = age = idle_since = 0.0
        groups = self.config.steps * self.queue.groups_per_step
        learner: tuple[float, str] | None = None
        self.dispatch()
        while self.step < self.config.steps or learner is not None:
            if learner is None and (batch := self.queue.hand_out()) is not None:
                idle_s += self.now - idle_since
                age += sum(self.queue.version - g.taken_version for g in batch)
                learner = (self.now + self.costs.train_s, "train")
            engine = min((e for e in self.engines if e.running), key=lambda e: e.running[0][0], default=None)
            ends_at = math.inf if engine is None else engine.running[0][0] + self.stood_s
            if learner is None or ends_at < learner[0]:
                assert engine is not None, "nothing runs"
                self.now = ends_at
                self.finish(engine)
                continue
            self.now, what = learner
            if what == "train":
                self.queue.step_done()
                self.step += 1
                self.stood_s += self.costs.load_s
                publish_s = self.costs.load_s + self.costs.score_s
                busy_s += self.costs.train_s + publish_s
                learner = (self.now + publish_s, "publish")
            else:
                self.published, learner, idle_since = self.queue.version, None, self.now
                self.dispatch()
        return Ideal(seconds=idle_s + busy_s, idle_s=idle_s, busy_s=busy_s, mean_take_age=age / groups)

    def dispatch(self) -> None:
        """Admit and hand over all that the rules allow."""
        config, counts = self.config, self.queue.counts
        outstanding = counts.waiting + counts.in_flight + counts.finished
        needed = (config.steps - self.step) * self.queue.groups_per_step - outstanding
        for _ in range(min(self.queue.room, needed)):
            self.queue.admit(Encoded(prompt=self.stream.next(), token_ids=()))
        while (engine := min(self.engines, key=lambda e: e.load)).load < config.rollout.max_num_seqs:
            encoded = self.queue.take(worker=self.engines.index(engine), worker_version=self.published)
            if encoded is None:
                return
            name, size = encoded.prompt.prompt_id, config.algorithm.group_size
            self.left[name] = size
            engine.load += size
            for i in range(size):
                tokens = min(config.rollout.sampling.max_new_tokens, self.length(name, i))
                heapq.heappush(engine.waiting, (self.queue.deadline(name), next(self.order), name, tokens))
            self.fill(engine)

    def fill(self, engine: _Engine) -> None:
        """Start what waits in free slots."""
        while engine.waiting and len(engine.running) < self.config.rollout.max_num_seqs:
            _, _, name, tokens = heapq.heappop(engine.waiting)
            end = self.now - self.stood_s + tokens * self.costs.token_s
            heapq.heappush(engine.running, (end, next(self.order), name))

    def finish(self, engine: _Engine) -> None:
        """The next completion of this engine ends now."""
        _, _, name = heapq.heappop(engine.running)
        engine.load -= 1
        self.left[name] -= 1
        if self.left[name] == 0:
            encoded = Encoded(prompt=Prompt(prompt_id=name, row=0, epoch=0, text="", answer=""), token_ids=())
            self.queue.finish(
                RolloutGroup(
                    group_id=name,
                    encoded=encoded,
                    rollouts_G=(),
                    worker=0,
                    taken_version=self.queue.taken_version(name),
                )
            )
        self.fill(engine)
        self.dispatch()


def ideal_run(config: RunConfig, costs: Costs, length: Callable[[str, int], int]) -> Ideal:
    """Simulate. One update per batch, one publication per step."""
    return _IdealRun(config, costs, length).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Least idle share of the learner under any controller that keeps the staleness bound, by what it knows."""

    clairvoyant: float
    """It knows every length before and chooses which groups share a batch: strict."""
    blind: float
    """It does not, so that long groups fall into batches by chance: an expectation, taken over the drawn order."""


def any_policy_bounds(config: RunConfig, costs: Costs, length: Callable[[str, int], int]) -> Bounds:
    """Three limits on the time of a run of N batches, of which the largest counts.

    The learner: its own work, after the first batch can be ready at all. The slots: all tokens over all slots, then the
    last batch. Stragglers: a group trained in batch b was taken after batch b - S - 1 was published, so the ends of the
    batches b - S - 1 and b are at least its duration and a step apart; that is summed over every (S + 1)-th batch and
    averaged over the S + 1 ways to begin.
    """
    gps, size, steps = config.algorithm.groups_per_step, config.algorithm.group_size, config.steps
    window = config.staleness.max_staleness + 1
    longest = config.rollout.sampling.max_new_tokens
    tokens = [[min(longest, length(f"0-{n}", i)) for i in range(size)] for n in range(steps * gps)]
    durations = [max(t) * costs.token_s for t in tokens]
    step_s = costs.train_s + costs.load_s + costs.score_s
    by_learner = sorted(durations[: window * gps])[gps - 1] + steps * step_s
    slots = config.rollout.workers * config.rollout.max_num_seqs
    by_slots = sum(map(sum, tokens)) * costs.token_s / slots + (steps - 1) * costs.load_s + step_s

    def idle_share(ordered: Sequence[float]) -> float:
        batches = [max(ordered[b * gps : (b + 1) * gps]) for b in range(steps)]
        by_stragglers = sum(step_s + longest_s for longest_s in batches) / window
        return 1 - steps * step_s / max(by_learner, by_slots, by_stragglers)

    return Bounds(clairvoyant=idle_share(sorted(durations)), blind=idle_share(durations))
