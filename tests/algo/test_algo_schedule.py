from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2rl.algo.schedule import learning_rate


def course(
    schedule: str, *, warmup: int = 0, total: int = 5, ratio: float = 0.0, steps: int | None = None
) -> list[float]:
    return [
        learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total, min_lr_ratio=ratio)
        for step in range(steps or total)
    ]


def test_constant_stays_at_the_peak_after_a_warm_up_in_equal_parts():
    assert course("constant", warmup=4, total=6) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_falls_in_equal_parts_to_the_last_step():
    assert course("linear", ratio=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert course("linear", warmup=2, total=6, ratio=0.0) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_cosine_is_half_way_down_in_the_middle():
    assert course("cosine", ratio=0.1) == pytest.approx([2.0, 1.736396, 1.1, 0.463604, 0.2], abs=1e-6)


def test_the_rate_stays_at_the_minimum_when_the_run_goes_on():
    assert course("cosine", ratio=0.1, steps=8)[4:] == pytest.approx([0.2] * 4)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 30),
    st.integers(1, 30),
    st.floats(0, 1),
    st.integers(0, 60),
)
def test_the_rate_is_between_zero_and_the_peak_for_every_setting(schedule, warmup, total, ratio, step):
    lr = learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total, min_lr_ratio=ratio)
    assert 0 <= lr <= 2.0
    if step < warmup:
        assert lr > 0


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, peak=1.0, schedule="constant", warmup_steps=0, total_steps=1, min_lr_ratio=0.0)
