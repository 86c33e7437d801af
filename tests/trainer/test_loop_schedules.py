"""The controller on simulated processes where nothing goes wrong: staleness, order, evaluation, metrics."""

from __future__ import annotations

import pytest
from loop_checks import check_whole_run, learner_of, simulate, step_rows

from bench.controller.simulated import Costs, lognormal_length
from bench.controller.wiring import SimulatedGrader

SLOW_LEARNER = Costs(train_s=3.0)
SLOW_ROLLOUT = Costs(token_s=0.1)


@pytest.mark.parametrize(
    "costs", [Costs(), SLOW_LEARNER, SLOW_ROLLOUT], ids=["balanced", "slow learner", "slow rollout"]
)
def test_on_policy_training_never_sees_a_stale_token(costs):
    run = simulate(parts={"costs": costs}, steps=12, staleness__max_staleness=0)
    check_whole_run(run)
    assert {row["staleness/max"] for row in step_rows(run)} == {0}


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize(
    "costs", [Costs(), SLOW_LEARNER, SLOW_ROLLOUT], ids=["balanced", "slow learner", "slow rollout"]
)
def test_asynchronous_training_is_stale_but_never_over_the_bound(bound, costs):
    run = simulate(parts={"costs": costs}, steps=20, staleness__max_staleness=bound)
    check_whole_run(run)
    assert max(row["staleness/max"] for row in step_rows(run)) > 0


@pytest.mark.parametrize(
    ("updates", "every", "bound"),
    [(1, 2, 1), (1, 3, 2), (2, 1, 1), (2, 1, 3), (2, 2, 3), (3, 2, 5), (3, 1, 4), (2, 2, 6)],
)
def test_several_updates_per_batch_and_rare_syncs_count_as_staleness(updates, every, bound):
    run = simulate(
        steps=13,
        algorithm__updates_per_batch=updates,
        sync__every=every,
        staleness__max_staleness=bound,
        rollout__workers=3,
    )
    check_whole_run(run)
    published = learner_of(run).published
    # Version 0 first, then each `every` batches, and the last.
    assert published == [0, *(s * updates for s in range(1, 14) if s % every == 0 or s == 13)]


def test_tokens_of_one_completion_carry_the_versions_that_sampled_them():
    run = simulate(parts={"length": lambda group_id, index: 200}, steps=12, staleness__max_staleness=3)
    check_whole_run(run)
    versions = [r.completion.versions for group, _ in run.log.groups for r in group.rollouts_G]
    assert all((v[1:] >= v[:-1]).all() for v in versions)
    assert max(v[-1] - v[0] for v in versions) >= 2
    fresh = [int(v[-1]) for v in versions]
    assert len(set(fresh)) > 5


def test_many_random_settings_keep_every_promise():
    lengths = [lognormal_length(median=m, sigma=s, longest=256) for m, s in ((3.0, 0.2), (20.0, 1.0), (10.0, 2.0))]
    for case in range(40):
        updates, every = 1 + case % 2, 1 + case % 3
        run = simulate(
            parts={
                "length": lengths[case % 3],
                "costs": Costs(train_s=(0.05, 0.5, 4.0)[case // 3 % 3], load_s=(0.0, 0.3)[case % 2]),
                "grader": SimulatedGrader(lambda g, case=case: (0.0, 0.7)[case // 2 % 2] if g.endswith("3") else 0.0),
                "overlong": lambda prompt_id, case=case: case % 5 == 0 and prompt_id.endswith("7"),
                "num_eval_prompts": (0, 5)[case // 4 % 2],
            },
            steps=8,
            eval__data=[{"path": "none.jsonl"}],
            eval__every=3,
            algorithm__updates_per_batch=updates,
            algorithm__groups_per_step=1 + case % 7,
            algorithm__group_size=2 + case % 4,
            sync__every=every,
            staleness__max_staleness=every * updates - 1 + case % 4,
            rollout__workers=1 + case % 4,
            rollout__max_num_seqs=4 + case % 9,
            learner__ranks=1 + case % 2,
        )
        check_whole_run(run)


def test_prompts_over_budget_are_counted_and_replaced():
    run = simulate(parts={"overlong": lambda prompt_id: prompt_id.endswith(("3", "4"))}, steps=10)
    check_whole_run(run)
    assert {reason for _, reason in run.log.drops} == {"prompt over budget"}
    assert step_rows(run)[-1]["queue/dropped"] == len(run.log.drops) >= 8


def test_the_last_steps_draw_no_prompt_that_nothing_would_train():
    run = simulate(steps=7, staleness__max_staleness=4)
    assert run.stream.drawn == 7 * 4
    last = step_rows(run)[-1]
    assert last["queue/waiting"] == last["queue/in_flight"] == last["queue/finished"] == 0


def test_a_slow_learner_is_never_kept_waiting_once_the_pipeline_is_full():
    rows = step_rows(simulate(parts={"costs": SLOW_LEARNER}, steps=20, staleness__max_staleness=2))
    assert sum(row["time/learner_idle_s"] for row in rows[1:]) < 0.01 * sum(row["time/step_s"] for row in rows[1:])


def test_depth_goes_down_when_the_learner_is_slow_and_data_gets_fresher():
    deep, tuned = (
        step_rows(simulate(parts={"costs": SLOW_LEARNER}, steps=40, staleness__max_staleness=4, staleness__depth=depth))
        for depth in (20, "auto")
    )
    assert tuned[-1]["queue/depth"] < 20
    assert tuned[-2]["staleness/mean"] < deep[-2]["staleness/mean"] - 1
    idle = [sum(r["time/learner_idle_s"] for r in rows) / sum(r["time/step_s"] for r in rows) for rows in (deep, tuned)]
    assert idle[1] < idle[0] + 0.01


def test_a_straggler_does_not_hold_up_later_batches_before_its_deadline():
    def length(group_id: str, index: int) -> int:
        return 250 if (group_id, index) == ("0-1", 0) else 10

    run = simulate(parts={"length": length}, steps=12, staleness__max_staleness=4, staleness__depth=20)
    check_whole_run(run)
    step = next(step for group, step in run.log.groups if group.group_id == "0-1")
    # 2.5 s of sampling, half a second per step: the step of its deadline would have been 5.
    assert 2 < step <= 5
    assert sum(row["time/learner_idle_s"] for row in step_rows(run)[1:4]) < 0.1


def test_a_free_slot_is_filled_although_stragglers_of_other_groups_still_run():
    def length(group_id: str, index: int) -> int:
        return 256 if index == 0 else 5

    run = simulate(
        parts={"length": length, "costs": Costs(train_s=0.1)},
        steps=10,
        staleness__max_staleness=8,
        staleness__depth=36,
        rollout__workers=1,
        rollout__max_num_seqs=16,
    )
    rows = step_rows(run)
    # 16 slots full of stragglers give 16 groups every 2.56 s; if each held a place for its whole group, it would be 4.
    assert sum(row["time/step_s"] for row in rows[2:]) / len(rows[2:]) < 1.3


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluated(**config):
    defaults = {"steps": 12, "eval__data": [{"path": "none.jsonl"}], "eval__every": 4, "eval__at_start": True}
    return simulate(parts=config.pop("parts", {"num_eval_prompts": 9}), **{**defaults, **config})


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_an_evaluation_is_of_one_version_and_stands_in_the_row_of_its_step(bound, every):
    run = evaluated(staleness__max_staleness=max(bound, every - 1), sync__every=every)
    check_whole_run(run)
    assert [row["step"] for row in run.log.rows] == list(range(13))
    by_step = {row["step"]: row for row in run.log.rows}
    assert [s for s, row in by_step.items() if "eval/accuracy" in row] == [0, 4, 8, 12]
    for step, row in by_step.items():
        if "eval/accuracy" in row:
            # `Evaluation` itself refuses tokens of any other version.
            assert row["eval/version"] == row["version"] == step
            assert row["eval/samples"] == 9


def test_training_rollouts_go_on_beside_an_evaluation():
    slow = {"num_eval_prompts": 4, "length": lambda g, i: 250 if g.startswith("eval") else 20}
    run = evaluated(parts=slow, steps=9, staleness__max_staleness=2)
    check_whole_run(run)
    # While the evaluation of step 4 took 2.5 s, the batches of the next steps were sampled.
    rows = {row["step"]: row for row in run.log.rows}
    assert rows[5]["time/learner_idle_s"] < 0.5
    assert rows[4]["time/eval_s"] == pytest.approx(2.5, abs=0.2)


def test_a_run_ends_when_the_accuracy_is_reached():
    run = evaluated(stop_at_accuracy=0.0, steps=50)
    assert len(learner_of(run).batches) < 6


# ---- depth of detail -------------------------------------------------------------------------------------------------


def test_times_of_the_rows_add_up_to_the_run():
    costs = Costs(train_s=0.4, load_s=0.05, score_s=0.01)
    run = simulate(parts={"costs": costs}, steps=10)
    for row in step_rows(run):
        assert row["time/train_s"] == pytest.approx(0.4)
        assert row["sync/seconds"] == pytest.approx(0.06)
        assert row["time/step_s"] == pytest.approx(row["time/learner_idle_s"] + 0.46)
        assert row["sync/stalled_s"] == pytest.approx(0.05)
        assert row["sync/verified"] is True
    busy = sum(r["time/rollout_busy_s"] + r["time/rollout_idle_s"] for r in step_rows(run))
    stalled = 9 * 0.05
    assert busy + stalled == pytest.approx(sum(r["time/step_s"] for r in step_rows(run)), rel=0.2)
