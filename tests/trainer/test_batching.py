"""From groups to micro-batches, and the depth tuner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2rl.trainer.batching import MAX_ROW_PADDING, BatchPlan, plan_batch, row_length, samples_of
from s2rl.trainer.depth import DepthTuner
from s2rl.types import Completion, Encoded, FinishReason, Prompt, Rollout, RolloutGroup, RowLayout, Sample, Score


def sample(number: int, *, prompt_len: int, length: int, advantage: float = 1.0) -> Sample:
    return Sample(
        group_id=str(number),
        token_ids=np.zeros(prompt_len + length, dtype=np.int32),
        prompt_len=prompt_len,
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        advantage=advantage,
    )


def plan(samples: list[Sample], **kw) -> BatchPlan:
    settings_ = {"version": 3, "num_ranks": 2, "max_tokens": 400, "layout": RowLayout(), "skip_zero_advantage": True}
    return plan_batch(samples, **{**settings_, **kw})


batches = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 250), st.sampled_from([0.0, -0.5, 1.0])), min_size=1, max_size=60
).map(lambda rows: [sample(i, prompt_len=p, length=n, advantage=a) for i, (p, n, a) in enumerate(rows)])


@settings(max_examples=200, deadline=None)
@given(
    samples=batches,
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(400, 3000),
    packed=st.booleans(),
    skip=st.booleans(),
)
def test_every_sample_is_computed_once_within_the_budget_and_ranks_agree(samples, num_ranks, max_tokens, packed, skip):
    result = plan(
        samples, num_ranks=num_ranks, max_tokens=max_tokens, layout=RowLayout(packed=packed), skip_zero_advantage=skip
    )
    assert len(result.rank_batches) == num_ranks
    assert len({len(rank.micro_batches) for rank in result.rank_batches}) == 1
    micros = [m.samples for rank in result.rank_batches for m in rank.micro_batches]
    computed = [s.group_id for m in micros for s in m]
    expected = [s.group_id for s in samples if not (skip and s.advantage == 0)]
    assert sorted(computed) == sorted(expected)
    assert result.num_skipped_samples == len(samples) - len(expected)
    padding = 0
    for rows in micros:
        if not rows:
            continue
        longest = max(len(s) for s in rows)
        real = sum(len(s) for s in rows)
        positions = real if packed else longest * len(rows)
        assert positions <= max_tokens
        assert positions - real <= MAX_ROW_PADDING * positions
        padding += positions - real
    assert sum(rank.num_padding_tokens for rank in result.rank_batches) == padding
    total = sum(len(s) for s in samples if not (skip and s.advantage == 0))
    assert result.num_tokens == total
    assert result.padding_fraction == pytest.approx(padding / max(1, total + padding))
    for rank in result.rank_batches:
        # The denominators are those of the whole batch, on every rank, whatever was left out.
        assert rank.num_loss_tokens == sum(len(s.logprobs) for s in samples)
        assert rank.num_samples == len(samples)
        assert rank.version == 3


@settings(max_examples=100, deadline=None)
@given(samples=batches, num_ranks=st.integers(1, 4), packed=st.booleans())
def test_no_rank_is_idle_while_there_are_samples_for_all(samples, num_ranks, packed):
    result = plan(samples, num_ranks=num_ranks, layout=RowLayout(packed=packed), skip_zero_advantage=False)
    if len(samples) >= num_ranks:
        assert all(any(m.samples for m in rank.micro_batches) for rank in result.rank_batches)


groups = st.lists(
    st.tuples(st.integers(1, 120), st.lists(st.integers(1, 250), min_size=1, max_size=8)), min_size=1, max_size=12
).map(lambda gs: [sample(i, prompt_len=p, length=n) for i, (p, lengths) in enumerate(gs) for n in lengths])


@settings(max_examples=200, deadline=None)
@given(
    samples=groups,
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(400, 3000),
    break_even=st.integers(1, 5000),
)
def test_shared_rows_hold_every_sample_once_within_the_budget_and_never_cost_more(
    samples, num_ranks, max_tokens, break_even
):
    def cost(rows):
        return sum(row_length(r) * (1 + row_length(r) / break_even) for r in rows)

    layout = RowLayout(shares_prompts=True, attention_break_even=break_even)
    result = plan(samples, num_ranks=num_ranks, max_tokens=max_tokens, layout=layout)
    micros = [m for rank in result.rank_batches for m in rank.micro_batches]
    assert sorted(id(s) for m in micros for s in m.samples) == sorted(map(id, samples))
    rows = [row for m in micros for row in m.rows]
    assert all(len({s.group_id for s in row}) == 1 for row in rows)
    assert all(max(map(row_length, m.rows), default=0) * len(m.rows) <= max_tokens for m in micros)
    assert result.num_tokens == sum(map(row_length, rows)) <= sum(map(len, samples))
    assert cost(rows) <= cost([(s,) for s in samples]) * (1 + 1e-9)
    assert len(samples) < num_ranks or all(any(m.rows for m in rank.micro_batches) for rank in result.rank_batches)


def test_short_completions_of_a_prompt_share_one_row_and_long_ones_do_not():
    layout = RowLayout(shares_prompts=True, attention_break_even=3000)
    short = [sample(0, prompt_len=70, length=28) for _ in range(8)]
    result = plan(short, num_ranks=1, layout=layout)
    assert result.num_tokens == 70 + 8 * 28
    # Attention over 8,000 positions would cost more than 8 prompts of 70.
    long = [sample(0, prompt_len=70, length=1000) for _ in range(8)]
    result = plan(long, num_ranks=1, max_tokens=10_000, layout=layout)
    assert result.num_tokens == 8 * 1070


def test_ranks_get_like_amounts_of_work():
    rng = np.random.default_rng(0)
    samples = [sample(i, prompt_len=20, length=int(n)) for i, n in enumerate(rng.lognormal(4, 0.8, 128).clip(1, 370))]
    result = plan(samples, num_ranks=4, max_tokens=800)
    work = [sum(len(s) for m in rank.micro_batches for s in m.samples) for rank in result.rank_batches]
    assert max(work) < 1.15 * np.mean(work)


def test_lengths_as_in_a_run_pay_under_ten_percent_of_padding():
    rng = np.random.default_rng(1)
    samples = [sample(i, prompt_len=int(p), length=20) for i, p in enumerate(rng.integers(30, 45, 64))]
    assert plan(samples, num_ranks=2, max_tokens=2048).padding_fraction < 0.10


def test_a_batch_without_any_advantage_gives_every_rank_an_empty_micro_batch():
    samples = [sample(i, prompt_len=3, length=5, advantage=0.0) for i in range(8)]
    result = plan(samples, num_ranks=3)
    assert [[m.samples for m in rank.micro_batches] for rank in result.rank_batches] == [[()], [()], [()]]
    assert result.num_skipped_samples == 8 and result.num_tokens == 0 and result.padding_fraction == 0.0
    assert all(rank.num_loss_tokens == 40 for rank in result.rank_batches)


def test_a_batch_without_any_sample_can_be_planned():
    result = plan([], num_ranks=2)
    assert [len(rank.micro_batches) for rank in result.rank_batches] == [1, 1]
    assert result.rank_batches[0].num_loss_tokens == 0


def test_a_sample_over_the_budget_is_refused_by_name():
    with pytest.raises(ValueError, match="sample of group 7 has 405 tokens, over max_tokens=400"):
        plan([sample(7, prompt_len=5, length=400)])


def test_a_plan_is_the_same_each_time():
    samples = [sample(i, prompt_len=3, length=1 + i * 37 % 90) for i in range(30)]
    first, second = (plan(order, num_ranks=2) for order in (samples, samples[::-1]))
    names = [
        [[s.group_id for s in m.samples] for rank in p.rank_batches for m in rank.micro_batches]
        for p in (first, second)
    ]
    assert names[0] == names[1]


# ---- groups to samples -----------------------------------------------------------------------------------------------


def group(scores: list[float], lengths: list[int], reasons: list[FinishReason]) -> RolloutGroup:
    prompt = Prompt(prompt_id="0-5", row=5, epoch=0, text="?", answer="!")
    rollouts = tuple(
        Rollout(
            completion=Completion(
                group_id="0-5",
                index=i,
                token_ids=np.arange(10, 10 + n, dtype=np.int32),
                logprobs=-np.arange(n, dtype=np.float32),
                versions=np.full(n, 4, dtype=np.int32),
                finish_reason=reason,
                text="",
            ),
            score=Score(total=score),
        )
        for i, (score, n, reason) in enumerate(zip(scores, lengths, reasons, strict=True))
    )
    encoded = Encoded(prompt=prompt, token_ids=(1, 2, 3))
    return RolloutGroup(group_id="0-5", encoded=encoded, rollouts_G=rollouts, worker=0, taken_version=4)


def test_samples_hold_prompt_and_completion_with_the_groups_advantages():
    stop = FinishReason.STOP
    samples = samples_of(group([1.0, 0.0, 0.0, 1.0], [2, 3, 1, 4], [stop] * 4), advantage="group_mean")
    assert [s.advantage for s in samples] == [0.5, -0.5, -0.5, 0.5]
    assert samples[1].token_ids.tolist() == [1, 2, 3, 10, 11, 12]
    assert samples[1].prompt_len == 3 and len(samples[1].logprobs) == len(samples[1].versions) == 3


def test_empty_and_aborted_completions_count_for_the_advantage_but_are_no_samples():
    reasons = [FinishReason.STOP, FinishReason.ABORT, FinishReason.STOP]
    samples = samples_of(group([3.0, 0.0, 0.0], [2, 2, 0], reasons), advantage="group_mean")
    assert [s.advantage for s in samples] == [2.0]


# ---- depth -----------------------------------------------------------------------------------------------------------


def tuner(depth: int) -> DepthTuner:
    return DepthTuner(groups_per_step=8, max_depth=40, depth=depth)


def test_depth_goes_down_while_finished_groups_lie_ready():
    depth = tuner(40)
    seen = [depth.observe(idle_s=0.0, step_s=1.0, spare_groups=8) for _ in range(80)]
    assert seen[-1] == 8 and seen == sorted(seen, reverse=True)


def test_depth_never_goes_down_by_more_than_a_quarter_of_a_batch():
    depth = tuner(40)
    steps = np.diff([40] + [depth.observe(idle_s=0.0, step_s=1.0, spare_groups=30) for _ in range(12)])
    assert steps.min() == -2


def test_depth_goes_up_by_a_batch_to_the_bound_when_the_learner_waits():
    depth = tuner(8)
    seen = [depth.observe(idle_s=0.2, step_s=1.0, spare_groups=0) for _ in range(30)]
    assert seen[:4] == [16, 24, 32, 40] and seen[-1] == 40


def test_depth_stays_when_the_learner_neither_waits_nor_has_groups_to_spare():
    depth = tuner(20)
    assert {depth.observe(idle_s=0.001, step_s=1.0, spare_groups=1) for _ in range(30)} == {20}


def test_a_step_without_spare_groups_starts_the_patience_anew():
    depth = tuner(20)
    for _ in range(10):
        for spare in (8, 8, 0):
            depth.observe(idle_s=0.0, step_s=1.0, spare_groups=spare)
    assert depth.depth == 20


def test_going_down_in_vain_is_tried_ever_more_rarely():
    depth = tuner(20)
    waits = []
    for step in range(600):
        # The learner waits whenever depth is below 20.
        before = depth.depth
        depth.observe(idle_s=0.3 if before < 20 else 0.0, step_s=1.0, spare_groups=8)
        if before < 20:
            waits.append(step)
            depth.depth = 20
    gaps = np.diff(waits)
    assert len(waits) < 15
    assert gaps[-1] > 60 > 10 > gaps[0]
