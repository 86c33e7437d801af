"""The estimators against exact divergences of small categorical distributions."""

from __future__ import annotations

import pytest
import torch

from s2rl.algo.kl import kl_divergence


def exact(estimator: str, *, gap: float) -> dict[str, torch.Tensor]:
    """Expected estimate and expected gradient over all tokens, beside the true divergence and its gradient."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, generator=generator, dtype=torch.float64)
    reference = (start + gap * torch.randn(6, generator=generator, dtype=torch.float64)).log_softmax(0)

    logits = start.clone().requires_grad_()
    policy = logits.log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    (true_gradient,) = torch.autograd.grad(true, logits)

    logits = start.clone().requires_grad_()
    policy = logits.log_softmax(0)
    estimate = (policy.detach().exp() * kl_divergence(policy, reference, estimator=estimator)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    return {"true": true.detach(), "estimate": estimate.detach(), "true_gradient": true_gradient, "gradient": gradient}


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str):
    result = exact(estimator, gap=0.7)
    torch.testing.assert_close(result["estimate"], result["true"])


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_k1_and_k2_have_the_gradient_of_the_divergence(estimator: str):
    result = exact(estimator, gap=0.7)
    torch.testing.assert_close(result["gradient"], result["true_gradient"])


def test_k3_has_it_to_first_order():
    result = exact("k3", gap=0.01)
    torch.testing.assert_close(result["gradient"], result["true_gradient"], rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_there_is_neither_value_nor_gradient_where_the_policies_agree(estimator: str):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    value = kl_divergence(logprobs, logprobs.detach().clone(), estimator=estimator)
    value.sum().backward()
    assert value.tolist() == [0.0, 0.0]
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reference_gets_no_gradient_and_extremes_stay_finite(estimator: str):
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    reference = torch.tensor([0.0, -1000.0], requires_grad=True)
    value = kl_divergence(logprobs, reference, estimator=estimator)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()
    assert reference.grad is None


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="two vectors"):
        kl_divergence(torch.zeros(2), torch.zeros(3), estimator="k1")
