"""Killed at any time, resumed from the last complete checkpoint: one history, every prompt once, the bound kept."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from loop_checks import ages_by_step, check_whole_run, learner_of, step_rows

from bench.controller.clock import run_in_virtual_time
from bench.controller.simulated import Costs
from bench.controller.wiring import MemoryLog, SimulatedRun, SimulatedStream, simulated_config
from s2rl.ckpt import CheckpointStore


def run_until(run: SimulatedRun, seconds: float) -> None:
    """As a SIGKILL at that time: nothing gets a chance to finish."""

    async def main() -> None:
        task = asyncio.create_task(run.main())
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            task.result()
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled(), "the run did not let itself be cancelled"

    run_in_virtual_time(main())


def history(parts: list[SimulatedRun]) -> list[tuple[str, int]]:
    """(prompt, step) of what survives: each part up to the step from which the next one went on."""
    surviving = []
    for i, part in enumerate(parts):
        # A part that was killed before it restored anything changed nothing.
        end = next((p.log.restored for p in parts[i + 1 :] if p.log.restored is not None), None)
        surviving += [(g.group_id, s) for g, s in part.log.groups if end is None or s <= end]
    return surviving


@pytest.mark.parametrize("kill_after", [2.2, 4.0, 5.1, 6.3, 7.7, 9.9, 12.0])
@pytest.mark.parametrize("every", [1, 3])
def test_a_killed_run_trains_every_prompt_once_in_the_surviving_history(tmp_path: Path, kill_after: float, every: int):
    config = simulated_config(
        steps=24,
        checkpoint__every=every,
        staleness__max_staleness=2,
        eval__data=[{"path": "none.jsonl"}],
        eval__every=5,
    )
    parts: list[SimulatedRun] = []
    for seconds in (kill_after, kill_after + 0.7, 1e9):
        store = CheckpointStore(tmp_path, keep=2, config_digest="same")
        run = SimulatedRun(
            config=config,
            store=store,
            log=MemoryLog(),
            stream=SimulatedStream(),
            num_eval_prompts=4,
            overlong=lambda prompt_id: prompt_id.endswith("5"),
            costs=Costs(save_s=0.9),
        )
        run_until(run, seconds)
        parts.append(run)
    surviving = history(parts)
    names = [name for name, _ in surviving]
    assert len(names) == len(set(names)) == 24 * 4
    assert sorted({step for _, step in surviving}) == list(range(1, 25))
    # Together with the dropped ones these are all prompts up to the last one drawn, none was passed over.
    drawn = parts[-1].stream.drawn
    assert {*names, *(f"0-{i}" for i in range(drawn) if i % 10 == 5)} == {f"0-{i}" for i in range(drawn)}
    final = step_rows(parts[-1])[-1]
    assert final["queue/drawn"] == drawn and final["queue/trained"] == 96
    assert final["queue/dropped"] == sum(i % 10 == 5 for i in range(drawn))
    for part in parts:
        rows = step_rows(part)
        first = (part.log.restored or 0) + 1 if part.log.restored is not None and part.log.restored > 0 else 1
        assert [r["step"] for r in rows] == list(range(first, first + len(rows)))
        assert all(min(ages) >= 0 and max(ages) <= 2 for ages in ages_by_step(part).values())


def test_the_first_act_of_a_resumed_run_is_a_sync(tmp_path: Path):
    config = simulated_config(steps=10, checkpoint__every=2)
    for seconds in (6.0, 1e9):
        run = SimulatedRun(config=config, store=CheckpointStore(tmp_path, keep=2, config_digest="same"))
        run_until(run, seconds)
    learner = learner_of(run)
    calls = [c for c in learner.calls if c in ("load", "publish", "train")]
    assert calls[:3] == ["load", "publish", "train"]
    assert learner.published[0] == run.log.restored > 0


def test_a_resume_with_a_smaller_bound_keeps_it(tmp_path: Path):
    for seconds, bound in ((9.0, 4), (1e9, 0)):
        config = simulated_config(steps=20, checkpoint__every=1, staleness__max_staleness=bound)
        run = SimulatedRun(config=config, store=CheckpointStore(tmp_path, keep=2, config_digest="same"))
        run_until(run, seconds)
    assert run.log.restored and run.log.restored > 2
    assert {max(ages) for ages in ages_by_step(run).values()} == {0}


def test_a_finished_run_started_again_does_nothing_and_keeps_its_result(tmp_path: Path):
    for _ in range(2):
        run = SimulatedRun(
            config=simulated_config(steps=5), store=CheckpointStore(tmp_path, keep=2, config_digest="same")
        )
        run_until(run, 1e9)
    assert learner_of(run).batches == [] and run.log.restored == 5


def test_checkpoints_do_not_disturb_a_run(tmp_path: Path):
    run = SimulatedRun(
        config=simulated_config(steps=12, checkpoint__every=1),
        store=CheckpointStore(tmp_path, keep=2, config_digest="same"),
        costs=Costs(save_s=3.0),
    )
    run_until(run, 1e9)
    check_whole_run(run)
