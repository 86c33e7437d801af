"""A whole run on simulated processes: the trainer's own wiring, with everything outside the controller replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.controller.simulated import Costs, Faults, Network, SimulatedLearner, lognormal_length
from bench.controller.simulated_worker import SimulatedWorker
from s2rl.config import RunConfig, config_from_dict
from s2rl.data.encode import Dropped
from s2rl.trainer import trainer
from s2rl.trainer.trainer import TrainResult
from s2rl.types import Completion, Encoded, Prompt, Rollout, RolloutGroup, Score

Row = Mapping[str, float | int | bool | None]


def simulated_config(**overrides: Any) -> RunConfig:
    """A configuration for simulated processes. Overrides are dotted keys with `__` for the dots."""
    values: dict[str, Any] = {
        "name": "simulated",
        "steps": 10,
        "model": {"path": "none"},
        "data": {"train": [{"path": "none.jsonl"}], "max_prompt_tokens": 16},
        "rewards": {"functions": [{"function": "exact_match"}]},
        "rollout": {"workers": 2, "dtype": "float32", "max_num_seqs": 16, "sampling": {"max_new_tokens": 256}},
        "learner": {"dtype": "float32"},
        "algorithm": {"group_size": 4, "groups_per_step": 4},
        "staleness": {"max_staleness": 2},
        "eval": {"at_start": False},
    }
    for dotted, value in overrides.items():
        *path, last = dotted.split("__")
        section = values
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return config_from_dict(values)


class SimulatedStream:
    """Prompts 0-0, 0-1, ... with a cursor."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> Prompt:
        """The next draw."""
        prompt = Prompt(prompt_id=f"0-{self.drawn}", row=self.drawn, epoch=0, text="?", answer="42")
        self.drawn += 1
        return prompt

    def state(self) -> Mapping[str, int | bool | str]:
        """The cursor."""
        return {"drawn": self.drawn}

    def restore(self, state: Mapping[str, int | bool | str]) -> None:
        """Go on from a cursor."""
        self.drawn = int(state["drawn"])


class SimulatedEncoder:
    """Every prompt is the same eight tokens; those that `overlong` names are over budget."""

    def __init__(self, overlong: Callable[[str], bool]) -> None:
        self._overlong = overlong

    def encode(self, prompt: Prompt) -> Encoded | Dropped:
        """Token ids, or why not."""
        if self._overlong(prompt.prompt_id):
            return Dropped(prompt=prompt, reason="prompt over budget", num_tokens=99)
        return Encoded(prompt=prompt, token_ids=(1, 2, 3, 4, 5, 6, 7, 8))


class SimulatedGrader:
    """Scores 1 where the text is the answer, else 0; `seconds` tells how long one call takes."""

    def __init__(self, seconds: Callable[[str], float] = lambda group_id: 0.0) -> None:
        self._seconds = seconds
        self.graded = 0

    async def start(self) -> None:
        """See `GradingPool`."""

    async def close(self) -> None:
        """See `GradingPool`."""

    async def grade_many(self, items: Sequence[tuple[Completion, Prompt]]) -> list[Rollout]:
        """See `Grader`."""
        if (wait_s := max((self._seconds(c.group_id) for c, _ in items), default=0.0)) > 0:
            await asyncio.sleep(wait_s)
        self.graded += len(items)
        return [Rollout(completion=c, score=Score(total=float(c.text == prompt.answer))) for c, prompt in items]


@dataclass(slots=True)
class MemoryLog:
    """What the run wrote, in lists."""

    rows: list[Row] = field(default_factory=list)
    groups: list[tuple[RolloutGroup, int]] = field(default_factory=list)
    drops: list[tuple[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    rollouts_position: int = 0
    restored: int | None = None

    def step(self, metrics: Row) -> None:
        """See `StepLog`."""
        self.rows.append(dict(metrics))

    def group(self, group: RolloutGroup, *, fate: str, step: int) -> None:
        """See `StepLog`."""
        assert fate == "trained"
        self.groups.append((group, step))

    def dropped(self, prompt: Prompt, *, reason: str, step: int) -> None:
        """See `StepLog`."""
        self.drops.append((prompt.prompt_id, reason))

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """See `StepLog`."""

    def event(self, text: str) -> None:
        """See `RunLog`."""
        self.events.append(text)

    def restore(self, step: int, *, rollouts: int = 0) -> Sequence[float]:
        """See `RunLog`."""
        self.restored = step
        return ()


class NoStore:
    """Checkpoints that are not kept."""

    def begin(self, step: int) -> Path:
        """See `CheckpointStore`."""
        return Path("nowhere/step")

    def commit(self, step: int, **what: Any) -> Path:
        """See `CheckpointStore`."""
        return Path("nowhere/step")

    def discard(self, step: int) -> None:
        """See `CheckpointStore`."""

    def clean_partial(self) -> None:
        """See `CheckpointStore`."""

    def latest(self) -> None:
        """See `CheckpointStore`."""
        return None


class _Run(trainer._Run):
    """The trainer's run with another grader."""

    grader: Any

    def _grading(self) -> Any:
        return self.grader


@dataclass(kw_only=True)
class SimulatedRun:
    """One run; `await run.main()` inside an event loop (virtual or real). It is its own `Placement`."""

    config: RunConfig
    costs: Costs = field(default_factory=Costs)
    length: Callable[[str, int], int] = field(
        default_factory=lambda: lognormal_length(median=20.0, sigma=1.0, longest=256)
    )
    faults: Sequence[tuple[int, Faults]] = ()
    """Faults by worker index; the first entry for an index hits the first process there, the second its successor."""
    learner_faults: Faults = field(default_factory=Faults)
    grader: Any = field(default_factory=SimulatedGrader)
    overlong: Callable[[str], bool] = lambda prompt_id: False
    num_eval_prompts: int = 0
    store: Any = field(default_factory=NoStore)
    log: MemoryLog = field(default_factory=MemoryLog)
    workers: list[SimulatedWorker] = field(default_factory=list)
    """Every worker that ever lived, in order of birth."""
    learner_process: SimulatedLearner | None = None
    stream: SimulatedStream = field(default_factory=SimulatedStream)

    async def main(self) -> TrainResult:
        """The trainer's own `main`."""
        self.network = Network()
        self._left = {i: [f for j, f in self.faults if j == i] for i in range(self.config.rollout.workers)}
        prompts = [Encoded(prompt=self._prompt(i), token_ids=(1, 2, 3)) for i in range(4 + self.num_eval_prompts)]
        inputs = trainer._Inputs(
            stream=self.stream,  # type: ignore[arg-type]
            encoder=SimulatedEncoder(self.overlong),  # type: ignore[arg-type]
            eval_prompts=tuple(prompts[4:]),
            first_prompts=tuple(prompts[:4]),
        )
        run = _Run(config=self.config, inputs=inputs, log=self.log, store=self.store, placement=self)  # type: ignore[arg-type]
        run.grader = self.grader
        return await run.main()

    @staticmethod
    def _prompt(index: int) -> Prompt:
        return Prompt(prompt_id=f"held-out-{index}", row=index, epoch=0, text="?", answer="42")

    def check(self) -> None:
        """See `Placement`."""

    async def worker(self, index: int) -> SimulatedWorker:
        """See `Placement`."""
        mine = self._left[index]
        worker = SimulatedWorker(
            index,
            network=self.network,
            costs=self.costs,
            length=self.length,
            max_num_seqs=self.config.rollout.max_num_seqs,
            faults=mine.pop(0) if mine else None,
        )
        self.workers.append(worker)
        return worker

    async def learner(self) -> SimulatedLearner:
        """See `Placement`."""
        self.learner_process = SimulatedLearner(
            network=self.network,
            costs=self.costs,
            updates_per_batch=self.config.algorithm.updates_per_batch,
            world_size=self.config.learner.ranks,
            faults=self.learner_faults,
        )
        return self.learner_process
