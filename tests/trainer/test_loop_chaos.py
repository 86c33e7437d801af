"""Everything at once: random settings, random deaths, hangs, failing groups, slow graders, kills and resumes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from loop_checks import ages_by_step, check_whole_run, step_rows
from test_loop_resume import history, run_until

from bench.controller.clock import run_in_virtual_time
from bench.controller.simulated import Costs, Faults, lognormal_length
from bench.controller.wiring import SimulatedGrader, SimulatedRun, simulated_config
from s2rl.ckpt import CheckpointStore


def random_config(rng: random.Random) -> dict[str, Any]:
    updates, every = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    least = updates * every - 1
    return {
        "steps": rng.randint(8, 20),
        "algorithm__updates_per_batch": updates,
        "algorithm__groups_per_step": rng.randint(1, 6),
        "algorithm__group_size": rng.randint(2, 5),
        "sync__every": every,
        "staleness__max_staleness": rng.randint(least, least + 4),
        "rollout__workers": rng.randint(1, 4),
        "rollout__max_num_seqs": rng.randint(2, 20),
        "learner__ranks": rng.randint(1, 2),
        "eval__data": [{"path": "none.jsonl"}],
        "eval__every": rng.randint(1, 6),
        "eval__at_start": rng.random() < 0.5,
        "limits__worker_restarts": 100,
        "limits__group_s": 100.0,
        "limits__sync_s": 60.0,
        "limits__progress_s": 400.0,
    }


def random_parts(rng: random.Random, workers: int) -> dict[str, Any]:
    # A worker that dies before the start-up check is over ends the run: nothing is lost yet.
    start_s = rng.choice((0.1, 1.0, 15.0))
    up = start_s + 4.0 * workers + 1.0

    def fault() -> Faults:
        kind = rng.random()
        if kind < 0.5:
            return Faults(die_at=rng.uniform(up, up + 40.0))
        if kind < 0.7:
            method = rng.choice(("load_weights", "score", "collect", "submit", "join_sync"))
            return Faults(die_in=(method, rng.randint(20, 60) if method == "collect" else rng.randint(2, 12)))
        if kind < 0.8:
            return Faults(hang_at=rng.uniform(up, up + 40.0))
        if kind < 0.9:
            return Faults(hang_in=(rng.choice(("load_weights", "score")), rng.randint(2, 8)))
        return Faults()

    bad = {f"0-{rng.randint(0, 80)}" for _ in range(rng.randint(0, 6))}
    for_all = {"fail": lambda g: "too long" if g in bad and int(g[2:]) % 2 else None, "stuck": lambda g: g in bad}
    faults = []
    for index in range(workers):
        for _ in range(8):
            one = fault() if rng.random() < 0.6 else Faults()
            one.fail, one.stuck = for_all["fail"], for_all["stuck"]
            faults.append((index, one))
    slow = rng.choice((0.0, 0.0, 2.0))
    return {
        "faults": faults,
        "num_eval_prompts": rng.choice((0, 3, 10)),
        "length": lognormal_length(
            median=rng.choice((3, 20)), sigma=rng.choice((0.3, 1.2)), longest=256, seed=rng.randint(0, 999)
        ),
        "costs": Costs(
            train_s=rng.choice((0.05, 0.5, 3.0)),
            load_s=rng.choice((0.0, 0.2)),
            score_s=rng.choice((0.0, 0.05, 1.0)),
            start_s=start_s,
            answer_s=rng.choice((20.0, 60.0)),
            save_s=rng.choice((0.1, 2.0)),
        ),
        "grader": SimulatedGrader(lambda g: slow if g.endswith("2") else 0.0),
        "overlong": lambda prompt_id: prompt_id.endswith("77"),
    }


@pytest.mark.parametrize("seed", range(60))
def test_a_run_full_of_trouble_keeps_every_promise(seed: int):
    rng = random.Random(seed)
    config = random_config(rng)
    parts = random_parts(rng, config["rollout__workers"])
    run = SimulatedRun(config=simulated_config(**config), **parts)
    run_in_virtual_time(run.main())
    check_whole_run(run)
    if parts["num_eval_prompts"]:
        evaluated = [row for row in run.log.rows if "eval/accuracy" in row]
        assert evaluated[-1]["step"] == config["steps"]
        assert all(row["eval/version"] == row["version"] for row in evaluated)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_runs_full_of_trouble():
    for seed in range(60, 1060):
        test_a_run_full_of_trouble_keeps_every_promise(seed)


@pytest.mark.parametrize("seed", range(15))
def test_a_run_full_of_trouble_that_is_killed_again_and_again_has_one_history(seed: int, tmp_path: Path):
    rng = random.Random(1000 + seed)
    config = random_config(rng) | {"checkpoint__every": rng.randint(1, 4)}
    parts: list[SimulatedRun] = []
    for seconds in (*(rng.uniform(1.0, 60.0) for _ in range(4)), 1e9):
        run = SimulatedRun(
            config=simulated_config(**config),
            store=CheckpointStore(tmp_path, keep=2, config_digest="same"),
            **random_parts(rng, config["rollout__workers"]),
        )
        run_until(run, seconds)
        parts.append(run)
    per_step, steps = config["algorithm__groups_per_step"], config["steps"]
    names = [name for name, _ in history(parts)]
    assert len(names) == len(set(names)) == steps * per_step
    for part in parts:
        assert all(
            min(ages) >= 0 and max(ages) <= config["staleness__max_staleness"] for ages in ages_by_step(part).values()
        )
        for row in step_rows(part):
            where = sum(row[f"queue/{k}"] for k in ("waiting", "in_flight", "finished", "trained", "dropped"))
            assert where == row["queue/drawn"]
