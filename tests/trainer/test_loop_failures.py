"""The controller on simulated processes when things go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest
from loop_checks import check_whole_run, learner_of, simulate, step_rows

from bench.controller.clock import run_in_virtual_time
from bench.controller.simulated import Costs, Faults
from bench.controller.wiring import SimulatedGrader, SimulatedRun, simulated_config
from s2rl.errors import ContractError, Interrupted, LearnerDied, RunError, StalledError, SyncError


def failing(expected, match, *, parts=None, **config) -> SimulatedRun:
    """A run that must end with this error."""
    run = SimulatedRun(config=simulated_config(**config), **(parts or {}))
    with pytest.raises(expected, match=match):
        run_in_virtual_time(run.main())
    assert all(w.closed for w in run.workers)
    return run


# ---- workers die -----------------------------------------------------------------------------------------------------


def groups_by_worker(run: SimulatedRun) -> set[int]:
    return {group.worker for group, _ in run.log.groups}


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("when", [1.9, 2.3, 3.3, 4.05, 5.0])
def test_groups_of_a_killed_worker_are_sampled_again_and_the_run_completes(num_workers, when):
    run = simulate(parts={"faults": [(0, Faults(die_at=when))]}, steps=14, rollout__workers=num_workers)
    check_whole_run(run)
    assert len(run.workers) == num_workers + 1
    assert groups_by_worker(run) == set(range(num_workers))
    assert not run.log.drops


def test_while_a_replacement_starts_the_others_take_its_groups():
    slow_start = Costs(start_s=30.0)
    run = simulate(parts={"faults": [(1, Faults(die_at=35.0))], "costs": slow_start}, steps=40)
    check_whole_run(run)
    rows = step_rows(run)
    # Nobody waited half a minute for the replacement.
    assert max(row["time/step_s"] for row in rows) < 10


def test_a_worker_that_is_gone_when_a_publication_begins_is_left_out_of_it():
    """Its death is known, its successor is not there yet: the group must be built anew without it."""
    run = simulate(parts={"faults": [(1, Faults(die_at=35.0))], "costs": Costs(start_s=30.0)}, steps=80)
    learner = learner_of(run)
    assert learner.calls.count("join_sync") == 3  # at start, without the dead worker, with its successor
    assert run.workers[0].calls["join_sync"] == 3 and not run.workers[0].dead_before_close


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("method", ["load_weights", "score", "join_sync", "submit", "abort", "collect"])
def test_a_worker_that_dies_in_any_call_is_replaced(method, num_workers):
    nth = {"load_weights": 4, "score": 4, "join_sync": 1, "submit": 5, "abort": 1, "collect": 9}[method]
    faults = [(0, Faults(die_in=(method, nth)))]
    if method == "join_sync":  # a successor dies while it joins
        faults = [(0, Faults(die_at=4.0)), (0, Faults(die_in=("join_sync", 1)))]
    if method == "abort":
        faults = [(i, Faults(die_in=("abort", 1), stuck=lambda g: g == "0-2")) for i in range(num_workers)]
    run = simulate(
        parts={"faults": faults}, steps=12, rollout__workers=num_workers, limits__group_s=20, staleness__max_staleness=2
    )
    check_whole_run(run)
    assert len(run.workers) > num_workers


def test_those_that_fall_with_a_worker_in_a_collective_cost_no_restart():
    faults = [(2, Faults(die_in=("load_weights", 3)))]
    run = simulate(parts={"faults": faults}, steps=10, rollout__workers=4, limits__worker_restarts=1)
    check_whole_run(run)
    assert len(run.workers) == 8  # an error while loading ends an engine


def test_a_hanging_worker_is_replaced_after_its_limit_and_costs_one_restart():
    """Several calls to it fail, one after the other; those that fail late must not be charged to its successor."""
    run = simulate(
        parts={"faults": [(1, Faults(hang_at=4.2))], "costs": Costs(answer_s=40.0)},
        steps=40,
        limits__sync_s=200,
        limits__worker_restarts=1,
    )
    check_whole_run(run)


@pytest.mark.parametrize("method", ["load_weights", "score", "join_sync"])
def test_an_engine_that_hangs_in_a_sync_while_its_process_answers_is_replaced(method):
    faults = [(1, Faults(hang_in=(method, 4)))]
    if method == "join_sync":
        faults = [(1, Faults(die_at=4.0)), (1, Faults(hang_in=("join_sync", 1)))]
    run = simulate(
        parts={"faults": faults, "costs": Costs(answer_s=200.0)},
        steps=12,
        rollout__workers=3,
        limits__sync_s=200,
        limits__worker_restarts=2,
    )
    check_whole_run(run)
    assert max(row["time/step_s"] for row in step_rows(run)) < 300


class UnevenProbes(SimulatedRun):
    """Worker 1 takes five seconds for the probe, the others none."""

    async def worker(self, index):
        worker = await super().worker(index)
        worker._costs = dataclasses.replace(self.costs, score_s=5.0 if index == 1 else 0.0)
        return worker


@pytest.mark.parametrize("start_s", [0.01, 1.0, 4.0])
def test_a_worker_replaced_within_a_publication_is_not_taken_for_one_that_loaded_it(start_s):
    """It answered the probe, died, and its successor stands before the others have answered."""
    run = UnevenProbes(config=simulated_config(steps=6), costs=Costs(start_s=start_s))

    async def main() -> None:
        async def kill() -> None:
            for _ in range(10_000):
                if run.workers and run.workers[0].calls["score"] == 3:
                    break
                await asyncio.sleep(0.01)
            run.workers[0].die()

        killer = asyncio.create_task(kill())
        await run.main()
        await killer

    run_in_virtual_time(main())
    check_whole_run(run)
    successor = run.workers[2]
    assert successor.calls["submit"] > 0 and successor.calls["load_weights"] > 0


def test_a_group_that_is_being_graded_when_its_worker_dies_keeps_its_tokens():
    """All completions are here; only the grader still works on them."""
    graded = SimulatedGrader(lambda group_id: 6.0 if group_id == "0-1" else 0.0)
    run = simulate(
        parts={"faults": [(i, Faults(die_at=6.0)) for i in range(2)], "grader": graded},
        steps=12,
        staleness__max_staleness=4,
    )
    check_whole_run(run)
    assert next(group for group, _ in run.log.groups if group.group_id == "0-1").taken_version == 0


def test_restarts_that_are_used_up_end_the_run_with_the_last_error():
    faults = [(0, Faults(die_at=t)) for t in (4.0, 8.0, 12.0)]
    failing(
        RunError,
        r"worker 0 died and limits.worker_restarts are used up; its last error: .*is gone",
        parts={"faults": faults},
        steps=60,
        limits__worker_restarts=2,
    )


def test_a_replacement_that_dies_while_it_starts_is_replaced_too():
    faults = [(0, Faults(die_at=4.0)), (0, Faults(die_in=("start", 1)))]
    run = simulate(parts={"faults": faults}, steps=20)
    check_whole_run(run)
    assert len(run.workers) == 4


def test_all_workers_dying_again_and_again_lose_nothing():
    faults = [(i, Faults(die_at=3.0 + 2.7 * n + i)) for i in range(3) for n in range(5)]
    run = simulate(parts={"faults": faults}, steps=25, rollout__workers=3, limits__worker_restarts=15)
    check_whole_run(run)
    assert len(run.workers) == 18


# ---- evaluation and death --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("after_s", [0.1, 0.6, 1.5])
@pytest.mark.parametrize("step", [0, 4, 8])
def test_a_worker_that_dies_during_an_evaluation_spoils_neither_it_nor_the_run(num_workers, after_s, step):
    """With one worker, and the learner already a version further, the evaluation cannot be of its version any more."""
    parts = {"num_eval_prompts": 6, "length": lambda g, i: 200 if g.startswith("eval") else 20}
    config = {
        "steps": 8,
        "eval__data": [{"path": "none.jsonl"}],
        "eval__every": 4,
        "eval__at_start": True,
        "rollout__workers": num_workers,
    }

    async def main(run: SimulatedRun) -> None:
        async def kill() -> None:
            for _ in range(10_000):
                if any(g.startswith(f"eval-{step}-") for w in run.workers for g in w._by_group):
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(after_s)
            run.workers[0].die()

        killer = asyncio.create_task(kill())
        await run.main()
        await killer

    run = SimulatedRun(config=simulated_config(**config), **parts)
    run_in_virtual_time(main(run))
    check_whole_run(run)
    evaluated = {row["step"]: row for row in run.log.rows if "eval/accuracy" in row}
    assert all(row["eval/version"] == row["version"] and row["eval/samples"] == 6 for row in evaluated.values())
    assert 8 in evaluated and len(evaluated) == 3  # one that could not be finished is made up for at the next step


# ---- syncs that cannot be proven -------------------------------------------------------------------------------------


def test_a_corrupted_tensor_ends_the_run_before_another_step():
    faults = [(1, Faults(corrupt={3: "layer.weight"}))]
    run = failing(SyncError, r"worker 1, version 3.*layer\.weight", parts={"faults": faults})
    assert len(learner_of(run).batches) == 3
    assert learner_of(run).published[-1] == 3


def test_an_engine_that_computes_otherwise_ends_the_run_before_another_step():
    faults = [(0, Faults(probe_off={2: 0.2}))]
    run = failing(SyncError, r"worker 0, version 2.*disagree on log-probabilities", parts={"faults": faults})
    assert len(learner_of(run).batches) == 2


def test_a_corrupted_first_sync_ends_the_run_before_any_step():
    run = failing(SyncError, "head.weight", parts={"faults": [(0, Faults(corrupt={0: "head.weight"}))]})
    assert learner_of(run).batches == []


def test_a_corrupted_tensor_is_found_also_in_the_sync_after_a_death():
    faults = [(0, Faults(die_in=("load_weights", 3))), (0, Faults(corrupt={2: "norm.weight"}))]
    run = failing(SyncError, r"worker 0, version 2.*norm\.weight", parts={"faults": faults})
    assert len(learner_of(run).batches) == 2


# ---- the start-up contract -------------------------------------------------------------------------------------------


def test_an_engine_that_samples_at_another_temperature_is_refused_before_the_first_step():
    faults = [(1, Faults(temperature=1.0))]
    run = failing(
        ContractError,
        r"disagree on log-probabilities at temperature 0\.7: mean \|difference\|",
        parts={"faults": faults},
        rollout__sampling__temperature=0.7,
    )
    assert learner_of(run).batches == []


def test_a_temperature_that_both_sides_use_is_accepted():
    check_whole_run(simulate(steps=3, rollout__sampling__temperature=0.7))


def test_a_worker_with_another_vocabulary_is_refused():
    class OtherTokenizer(SimulatedRun):
        async def worker(self, index):
            worker = await super().worker(index)
            if index == 1:
                start = worker.start

                async def other_start():
                    return dataclasses.replace(await start(), eos_token_ids=(7,))

                worker.start = other_start
            return worker

    run = OtherTokenizer(config=simulated_config())
    with pytest.raises(ContractError, match=r"worker 1 and the learner disagree on eos_token_ids: \(7,\) and \(0,\)"):
        run_in_virtual_time(run.main())


# ---- the learner dies, everything stalls, someone interrupts ---------------------------------------------------------


@pytest.mark.parametrize("method", ["train", "publish", "score", "memory"])
def test_a_dead_learner_ends_the_run_and_says_how_to_go_on(method):
    run = failing(
        LearnerDied,
        r"learner-0 died during .*last complete checkpoint is none; run the same command again",
        parts={"learner_faults": Faults(die_in=(method, 7 if method == "score" else 2))},
        steps=40,
    )
    assert len(learner_of(run).batches) < 20


def test_a_stall_ends_the_run_and_names_who_waits_for_whom():
    run = failing(
        StalledError,
        r"nothing moved for 3\d\d? s \(limits.progress_s=300\). Waiting: the learner, for a batch of 4 groups; .*"
        r"waiting=0, in_flight=\d+, finished=\d+.*0-1 at rollout worker [01] since version 0.*"
        r"Last seen: .*Last errors: none",
        parts={"faults": [(i, Faults(stuck=lambda g: g == "0-1")) for i in range(2)]},
        steps=30,
        limits__progress_s=300,
    )
    assert 1 <= len(learner_of(run).batches) < 30
    assert learner_of(run).calls.count("save") == 1  # what there is was saved


def test_a_stall_quotes_the_last_error_of_the_counterpart():
    failing(
        StalledError,
        r"Last errors: rollout worker 1: WorkerDied: rollout worker 1 is gone",
        parts={"faults": [(1, Faults(die_at=4.0)), *((i, Faults(stuck=lambda g: g[:2] == "0-")) for i in (0, 1))]},
        limits__progress_s=100,
    )


def test_sigint_ends_at_a_step_boundary_with_a_checkpoint():
    run = SimulatedRun(config=simulated_config(steps=100))

    async def main() -> None:
        asyncio.get_running_loop().call_at(5.3, os.kill, os.getpid(), signal.SIGINT)
        await run.main()

    with pytest.raises(Interrupted, match=r"interrupted after step \d+; run the same command again to go on"):
        run_in_virtual_time(main())
    learner = learner_of(run)
    assert 1 <= len(run.log.rows) < 12
    assert len(learner.batches) == len(run.log.rows)
    assert learner.calls.count("save") == learner.calls.count("save_done") == 1


def test_sigint_before_the_first_step_ends_at_once():
    run = SimulatedRun(config=simulated_config(), costs=Costs(start_s=500.0))

    async def main() -> None:
        asyncio.get_running_loop().call_at(2.0, os.kill, os.getpid(), signal.SIGTERM)
        await run.main()

    with pytest.raises(Interrupted, match="before the first step"):
        run_in_virtual_time(main())


# ---- single prompts --------------------------------------------------------------------------------------------------


def test_a_group_that_cannot_be_sampled_is_dropped_and_replaced():
    faults = [(i, Faults(fail=lambda g: "too long for the engine" if g in ("0-2", "0-9") else None)) for i in range(2)]
    run = simulate(parts={"faults": faults})
    check_whole_run(run)
    assert sorted(run.log.drops) == [("0-2", "too long for the engine"), ("0-9", "too long for the engine")]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_group_over_its_time_limit_is_dropped_and_replaced(bound):
    faults = [(i, Faults(stuck=lambda g: g in ("0-2", "0-13"))) for i in range(2)]
    run = simulate(parts={"faults": faults}, staleness__max_staleness=bound, limits__group_s=20)
    check_whole_run(run)
    assert sorted(run.log.drops) == [("0-13", "timeout"), ("0-2", "timeout")]
    assert all(w.calls["abort"] <= 2 for w in run.workers)


def test_a_slow_grader_holds_up_its_own_group_only():
    grader = SimulatedGrader(lambda group_id: 8.0 if group_id == "0-1" else 0.0)
    run = simulate(parts={"grader": grader}, staleness__max_staleness=9, steps=30, staleness__depth=40)
    check_whole_run(run)
    assert next(step for group, step in run.log.groups if group.group_id == "0-1") > 5


def test_a_grader_that_breaks_ends_the_run():
    class Broken(SimulatedGrader):
        async def grade_many(self, items):
            raise RunError("the grading pool is not running")

    failing(RunError, "grading pool is not running", parts={"grader": Broken()})


def test_an_evaluation_prompt_that_cannot_be_sampled_ends_the_run():
    faults = [(0, Faults(fail=lambda g: "no" if g.startswith("eval") else None))]
    failing(
        RunError,
        "evaluation prompt eval-4-0 cannot be sampled: no",
        parts={"faults": faults, "num_eval_prompts": 3},
        eval__data=[{"path": "none.jsonl"}],
        eval__every=4,
    )
