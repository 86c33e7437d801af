from __future__ import annotations

import pytest
import torch

from s2rl.fsdp.logprobs import token_logprobs


def problem(n: int = 7, *, dtype: torch.dtype = torch.float64, bias: bool = False) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    hidden, vocab = 5, 11
    return {
        "hidden_NH": torch.randn(n, hidden, generator=generator, dtype=dtype, requires_grad=True),
        "weight_VH": torch.randn(vocab, hidden, generator=generator, dtype=dtype, requires_grad=True),
        "bias_V": torch.randn(vocab, generator=generator, dtype=dtype, requires_grad=True) if bias else None,
        "targets_N": torch.randint(0, vocab, (n,), generator=generator),
    }


@pytest.mark.parametrize("chunk_tokens", [3, 7, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_agree_with_finite_differences_in_one_chunk_and_in_several(chunk_tokens: int, bias: bool):
    p = problem(bias=bias)
    inputs = [t for t in (p["hidden_NH"], p["weight_VH"], p["bias_V"]) if t is not None]

    def logprobs(hidden, weight, bias_V=None):
        return token_logprobs(
            hidden,
            weight_VH=weight,
            bias_V=bias_V,
            targets_N=p["targets_N"],
            temperature=0.7,
            chunk_tokens=chunk_tokens,
        )[0]

    assert torch.autograd.gradcheck(logprobs, inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_values_are_those_of_the_full_softmax(temperature: float, chunk_tokens: int):
    p = problem()
    logprobs, entropy = token_logprobs(**p, temperature=temperature, chunk_tokens=chunk_tokens)
    full = torch.distributions.Categorical(logits=p["hidden_NH"] @ p["weight_VH"].T / temperature)
    torch.testing.assert_close(logprobs, full.log_prob(p["targets_N"]))
    torch.testing.assert_close(entropy, full.entropy())
    assert not entropy.requires_grad


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients():
    p = problem(dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(**p, temperature=1.0, chunk_tokens=2)
    logprobs.sum().backward()
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert p["weight_VH"].grad.dtype == torch.bfloat16


def test_entropy_is_finite_where_a_probability_is_exactly_zero():
    p = problem(2)
    p["bias_V"] = torch.full((11,), -torch.inf, dtype=torch.float64)
    p["bias_V"][[1, 2]] = 0.0
    p["targets_N"] = torch.tensor([1, 2])
    _, entropy = token_logprobs(**p, temperature=1.0, chunk_tokens=100)
    assert torch.isfinite(entropy).all()


def test_no_tokens_give_empty_results_and_gradients_of_zero():
    p = problem(0)
    logprobs, entropy = token_logprobs(**p, temperature=1.0, chunk_tokens=100)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert torch.count_nonzero(p["weight_VH"].grad) == 0
