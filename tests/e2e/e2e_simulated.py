"""Runs on simulated engines and learner, with the real controller, logs and checkpoints; work in forked children."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.controller.clock import run_in_virtual_time
from bench.controller.simulated import Faults, SimulatedLearner
from bench.controller.wiring import SimulatedGrader, SimulatedRun
from s2rl.ckpt import CheckpointStore
from s2rl.config import RunConfig, digest
from s2rl.data.rows import load_rows
from s2rl.data.stream import PromptStream
from s2rl.logs import RunLog
from s2rl.trainer.trainer import TrainResult
from s2rl.types import Completion, Prompt, RankBatch, Rollout, Score, StepResult


class _RememberingLearner(SimulatedLearner):
    """Its weights are the list of what it was trained on."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.history: list[list[str]] = []

    async def train(self, batches: Sequence[RankBatch]) -> StepResult:
        result = await super().train(batches)
        groups = {s.group_id for rank in batches for micro in rank.micro_batches for s in micro.samples}
        self.history.append(sorted(groups))
        return result

    async def save(self, path: Path) -> None:
        await super().save(path)
        (path / "history").write_text(json.dumps(self.history))

    async def load(self, path: Path) -> int:
        self.history = json.loads((path / "history").read_text())
        return await super().load(path)


class _Grader(SimulatedGrader):
    """Scores that differ from one evaluation to the next."""

    async def grade_many(self, items: Sequence[tuple[Completion, Prompt]]) -> list[Rollout]:
        def score(completion: Completion) -> Score:
            digest = hashlib.sha256(f"{completion.group_id}/{completion.index}".encode()).digest()
            return Score(total=float(digest[0] & 1))

        return [Rollout(completion=completion, score=score(completion)) for completion, _ in items]


@dataclass(kw_only=True)
class _Run(SimulatedRun):
    async def learner(self) -> SimulatedLearner:
        process = await super().learner()
        process.__class__ = _RememberingLearner
        process.history = []
        return process


def _no_room(group_id: str) -> str | None:
    """Why the first worker cannot sample a group, if so."""
    return "no room" if group_id.endswith("7") and not group_id.startswith("eval") else None


def train_simulated(config: RunConfig) -> TrainResult:
    """What `Trainer.fit` does, on simulated processes."""
    rows = load_rows(config.data.train, columns=config.data.columns)
    log = RunLog(config, console=Console(file=io.StringIO()))
    run = _Run(
        config=config,
        grader=_Grader(),
        log=log,
        store=CheckpointStore(log.folder.checkpoints, keep=2, config_digest=digest(config)),
        stream=PromptStream(rows, seed=config.seed, shuffle=True),
        num_eval_prompts=16,
        overlong=lambda prompt_id: int(prompt_id.partition("-")[2]) % 11 == 5,
        faults=[(0, Faults(fail=_no_room))],
    )
    result = run_in_virtual_time(run.main())
    log._metrics.close()
    assert log._rollouts is not None
    log._rollouts.close()
    log.folder.close()
    return result


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; its exit status, negative after a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
