from __future__ import annotations

import math

import pytest
import torch

from s2rl.algo.losses import LossInputs, LossSettings, importance_weights, policy_loss, token_weights


def inputs(ratio: list[float], advantages: list[float], *, learner_over_rollout: float = 1.0) -> LossInputs:
    """Tokens whose policy / learner ratio is given."""
    learner = torch.full((len(ratio),), -1.0)
    return LossInputs(
        logprobs=(learner + torch.tensor(ratio).log()).requires_grad_(),
        learner_logprobs=learner,
        rollout_logprobs=learner - math.log(learner_over_rollout),
        advantages=torch.tensor(advantages),
    )


def settings(**changes) -> LossSettings:
    return LossSettings(
        **({"clip_low": 0.2, "clip_high": 0.3, "old_policy": "learner", "importance_cap": 2.0} | changes)
    )


def test_clipped_loss_of_each_case_by_hand():
    ratio = [1.0, 1.2, 1.5, 0.9, 0.5, 1.5, 0.5]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    result = policy_loss("clipped")(inputs(ratio, advantages), settings=settings())
    # Above 1 + high with a gain, and below 1 - low with a loss, the bound holds; on the other side it never does.
    expected = [-1.0, -1.2, -1.3, 0.9, 0.8, 1.5, -0.5]
    torch.testing.assert_close(result.loss, torch.tensor(expected))
    assert result.clipped.tolist() == [False, False, True, False, True, False, False]
    torch.testing.assert_close(result.ratio, torch.tensor(ratio))


def test_clipped_tokens_have_no_gradient_and_the_others_have_ratio_times_advantage():
    given = inputs([1.0, 1.5, 0.5, 1.5], [2.0, 1.0, -1.0, -1.0])
    policy_loss("clipped")(given, settings=settings()).loss.sum().backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([-2.0, 0.0, 0.0, 1.5]))


@pytest.mark.parametrize(
    ("weight", "cap", "expected"), [(1.5, 2.0, 1.5), (5.0, 2.0, 2.0), (0.1, 2.0, 0.1), (5.0, None, 1)]
)
def test_each_token_is_weighted_by_the_truncated_importance_weight(weight: float, cap: float | None, expected: float):
    given = inputs([1.0], [1.0], learner_over_rollout=weight)
    loss = policy_loss("clipped")(given, settings=settings(importance_cap=cap)).loss
    torch.testing.assert_close(loss, torch.tensor([-float(expected)]))
    loss.sum().backward()
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([-float(expected)]))


def test_against_the_rollout_policy_the_ratio_itself_carries_the_difference():
    given = inputs([1.0], [1.0], learner_over_rollout=1.5)
    result = policy_loss("clipped")(given, settings=settings(old_policy="rollout"))
    torch.testing.assert_close(result.ratio, torch.tensor([1.5]))
    torch.testing.assert_close(result.loss, torch.tensor([-1.3]))


def test_extreme_log_ratios_stay_finite():
    given = LossInputs(
        logprobs=torch.tensor([0.0, -500.0], requires_grad=True),
        learner_logprobs=torch.tensor([-500.0, 0.0]),
        rollout_logprobs=torch.tensor([-900.0, -1.0]),
        advantages=torch.tensor([-1.0, 1.0]),
    )
    loss = policy_loss("clipped")(given, settings=settings(importance_cap=None)).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(given.logprobs.grad).all()
    assert torch.isfinite(importance_weights(given.learner_logprobs, given.rollout_logprobs)).all()


def test_a_broken_token_is_not_hidden():
    given = inputs([1.0, 1.0], [1.0, 1.0])
    given.rollout_logprobs[1] = math.nan
    loss = policy_loss("clipped")(given, settings=settings()).loss
    assert torch.isnan(loss).tolist() == [False, True]


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="four vectors of the same length"):
        LossInputs(
            logprobs=torch.zeros(2),
            learner_logprobs=torch.zeros(2),
            rollout_logprobs=torch.zeros(3),
            advantages=torch.zeros(2),
        )


def test_token_mean_weighs_tokens_alike_and_sequence_mean_sequences():
    lengths = torch.tensor([1.0, 3.0, 3.0, 3.0])
    tokens = token_weights(lengths, aggregation="token_mean", num_loss_tokens=4, num_samples=2)
    sequences = token_weights(lengths, aggregation="sequence_mean", num_loss_tokens=4, num_samples=2)
    torch.testing.assert_close(tokens, torch.full((4,), 0.25))
    torch.testing.assert_close(sequences, torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]))
    assert token_weights(lengths[:0], aggregation="token_mean", num_loss_tokens=0, num_samples=0).shape == (0,)
