from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from s2rl.algo.advantages import group_advantages

scores = arrays(np.float64, st.integers(1, 9), elements=st.floats(-100, 100))


def test_group_norm_divides_by_the_unbiased_standard_deviation():
    advantages = group_advantages(np.array([0.0, 1.0, 1.0, 0.0]), kind="group_norm")
    deviation = np.std([0, 1, 1, 0], ddof=1)
    np.testing.assert_allclose(advantages, np.array([-0.5, 0.5, 0.5, -0.5]) / (deviation + 1e-6), rtol=1e-12)


def test_group_mean_only_centres():
    np.testing.assert_allclose(group_advantages(np.array([1.0, 2.0, 6.0]), kind="group_mean"), [-2.0, -1.0, 3.0])


@pytest.mark.parametrize("kind", ["group_norm", "group_mean"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6])
def test_equal_scores_give_exactly_zero(kind: str, value: float):
    assert not group_advantages(np.full(7, value), kind=kind).any()


@given(scores, st.sampled_from(["group_norm", "group_mean"]))
def test_advantages_are_finite_sum_to_zero_and_keep_the_order(values, kind):
    advantages = group_advantages(values, kind=kind)
    assert np.isfinite(advantages).all()
    assert abs(advantages.sum()) < 1e-6
    assert (np.diff(advantages[np.argsort(values, kind="stable")]) >= -1e-9).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages(np.array([0.0, bad]), kind="group_norm")


def test_a_matrix_and_an_empty_group_are_refused():
    for values in (np.zeros((2, 2)), np.zeros(0)):
        with pytest.raises(ValueError, match=r"shape \[G\]"):
            group_advantages(values, kind="group_mean")
