"""Running the real controller on simulated processes, and what must hold of every run."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.controller.clock import run_in_virtual_time
from bench.controller.simulated import SimulatedLearner
from bench.controller.wiring import SimulatedRun, simulated_config

KEYS = """
    step version reward/mean reward/std reward/mixed_groups reward/grader_timeouts reward/grader_errors loss/total
    staleness/max staleness/mean queue/drawn queue/waiting queue/in_flight queue/finished queue/trained queue/dropped
    queue/depth batch/samples batch/skipped_samples batch/tokens batch/micro_batches batch/padding_fraction
    rollout/length_mean rollout/length_max rollout/truncated time/step_s time/train_s time/learner_idle_s
    time/rollout_idle_s time/rollout_busy_s throughput/train_tokens_per_s throughput/rollout_tokens_per_s optim/lr
    optim/grad_norm memory/learner_rss_mb memory/rollout_rss_mb
"""
ALWAYS = KEYS.split()


def simulate(run: SimulatedRun | None = None, /, *, parts: dict[str, Any] | None = None, **config: Any) -> SimulatedRun:
    """Run to the end in virtual time; `parts` are fields of `SimulatedRun`."""
    run = run or SimulatedRun(config=simulated_config(**config), **(parts or {}))
    run_in_virtual_time(run.main())
    return run


def learner_of(run: SimulatedRun) -> SimulatedLearner:
    assert run.learner_process is not None
    return run.learner_process


def step_rows(run: SimulatedRun) -> list[dict[str, Any]]:
    return [dict(row) for row in run.log.rows if row["step"] != 0]


def ages_by_step(run: SimulatedRun) -> dict[int, list[int]]:
    """Staleness of every trained token, from the tokens' own tags and the steps that trained them."""
    updates = run.config.algorithm.updates_per_batch
    ages: dict[int, list[int]] = {}
    for group, step in run.log.groups:
        for rollout in group.rollouts_G:
            for update in range(updates):
                trained_at = (step - 1) * updates + update
                ages.setdefault(step, []).extend((trained_at - rollout.completion.versions).tolist())
    return ages


def check_whole_run(run: SimulatedRun) -> None:
    """What holds of every run that came to its last step."""
    config = run.config
    rows, learner = step_rows(run), learner_of(run)
    assert [row["step"] for row in rows] == list(range(1, config.steps + 1))
    assert len(learner.batches) == config.steps
    assert learner.version == config.steps * config.algorithm.updates_per_batch
    for row in rows:
        missing = [key for key in ALWAYS if key not in row]
        assert not missing, f"step {row['step']} lacks {missing}"
        where = sum(row[f"queue/{k}"] for k in ("waiting", "in_flight", "finished", "trained", "dropped"))
        assert where == row["queue/drawn"], row
        assert row["queue/trained"] == row["step"] * config.algorithm.groups_per_step
    # Every token within the bound, by the tokens' own tags; the logged figure is the true one.
    ages = ages_by_step(run)
    for row in rows:
        found = ages[row["step"]]
        assert min(found) >= 0 and max(found) <= config.staleness.max_staleness
        assert row["staleness/max"] == max(found)
    # Every drawn prompt was trained once or dropped once, and nothing else happened to any.
    trained = [group.group_id for group, _ in run.log.groups]
    dropped = [prompt_id for prompt_id, _ in run.log.drops]
    assert len(trained) == len(set(trained)) == config.steps * config.algorithm.groups_per_step
    assert sorted([*trained, *dropped]) == sorted(f"0-{i}" for i in range(run.stream.drawn))
    # What the learner got is what was logged, whole and in good order.
    for group, _ in run.log.groups:
        assert [r.completion.index for r in group.rollouts_G] == list(range(config.algorithm.group_size))
        assert all(r.completion.group_id == group.group_id for r in group.rollouts_G)
    in_batches = {
        s.group_id for batch in learner.batches for rank in batch for m in rank.micro_batches for s in m.samples
    }
    mixed = {g.group_id for g, _ in run.log.groups if np.std([r.score.total for r in g.rollouts_G]) > 0}
    assert in_batches == mixed
    assert all(w.closed for w in run.workers) and "close" in learner.calls
