"""One rank's batch against a float64 computation of the same loss with full logits and autograd."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_models import make_samples, rank_batch, weights
from transformers import AutoModelForCausalLM

from s2rl.errors import ModelError, RunError
from s2rl.types import MicroBatch, RankBatch, Sample


class Recorder:
    """Stands in for the optimizer and keeps the gradients it is given."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, step: int):
        for name, parameter in self._optimizer._parameters.items():
            self.gradients[name] = parameter.grad.full_tensor().double().clone()
        return self._optimizer.step(step)


def gradients(
    learner, micros: list[list[Sample]] | RankBatch, **batch
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    update = learner._started().update
    recorder = Recorder(update._optimizer)
    update._optimizer = recorder
    result = learner.train(micros if isinstance(micros, RankBatch) else rank_batch(micros, **batch))
    update._optimizer = recorder._optimizer
    return recorder.gradients, dict(result.metrics)


def reference_gradients(
    folder,
    samples: list[Sample],
    *,
    temperature: float = 1.0,
    cap: float | None = 2.0,
    aggregation: str = "token_mean",
    num_samples: int | None = None,
    rollout_is_old: bool = False,
) -> tuple[dict[str, torch.Tensor], float]:
    """Policy loss at ratio 1 for `old_policy: learner`, or at learner / rollout with clipping for `rollout`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    num_tokens = sum(len(s.logprobs) for s in samples)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0] / temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[sample.prompt_len - 1 :, 0]
        rollout = torch.from_numpy(sample.logprobs).double()
        if rollout_is_old:
            ratio = (logprobs - rollout).exp()
            loss = -torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.3) * sample.advantage)
        else:
            weight = (logprobs.detach() - rollout).exp()
            weight = torch.ones_like(weight) if cap is None else weight.clamp(max=cap)
            loss = -(logprobs - logprobs.detach()).exp() * sample.advantage * weight
        scale = num_tokens if aggregation == "token_mean" else len(logprobs) * (num_samples or len(samples))
        total = total + loss.sum() / scale
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if n != "lm_head.weight" or p.grad is not None}, total.item()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 2e-5) -> None:
    assert actual.keys() == expected.keys()
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    for name, gradient in expected.items():
        assert float((actual[name] - gradient).abs().max()) < tolerance * norm, name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradient_and_loss_are_those_of_a_float64_reference(start, llama, aggregation: str):
    samples = make_samples(6)
    learner = start(llama, algorithm={"aggregation": aggregation}, temperature=0.8, logprob_chunk_tokens=5)
    actual, metrics = gradients(learner, [samples[:3], [], samples[3:]])
    expected, loss = reference_gradients(llama, samples, temperature=0.8, aggregation=aggregation)
    assert_same(actual, expected)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_clipping_against_the_rollout_policy_takes_gradients_away_and_is_counted(start, qwen3):
    samples = make_samples(6)
    learner = start(qwen3, algorithm={"old_policy": "rollout", "clip_high": 0.3})
    actual, metrics = gradients(learner, [samples])
    expected, loss = reference_gradients(qwen3, samples, rollout_is_old=True)
    assert_same(actual, expected)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)
    assert 0 < metrics["policy/clip_fraction"] < 1


def test_samples_that_were_left_out_stay_in_the_denominators(start, qwen3):
    samples = make_samples(6)
    computed = samples[:4]
    learner = start(qwen3, algorithm={"aggregation": "sequence_mean"})
    actual, _ = gradients(learner, [computed], everyone=samples)
    expected, _ = reference_gradients(qwen3, computed, aggregation="sequence_mean", num_samples=6)
    assert_same(actual, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_give_the_same_gradient_as_rows(start, qwen3, attention: str):
    samples = make_samples(6)
    rows, row_metrics = gradients(start(qwen3, packing="off"), [samples])
    learner = start(qwen3, packing="on", attention=attention)
    assert learner.layout().packed
    packed, packed_metrics = gradients(learner, [samples])
    assert_same(packed, rows)
    assert packed_metrics["policy/entropy"] == pytest.approx(row_metrics["policy/entropy"], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_completions_that_share_their_prompt_give_the_same_gradient_as_rows_of_their_own(
    start, request: pytest.FixtureRequest, family: str
):
    folder = request.getfixturevalue(family)
    samples = make_samples(7)
    prompts = [samples[0].token_ids[:5], samples[1].token_ids[:2]]
    groups = [
        tuple(
            replace(s, prompt_len=len(prompt), token_ids=np.concatenate([prompt, s.token_ids[s.prompt_len :]]))
            for s in part
        )
        for prompt, part in zip(prompts, (samples[:4], samples[4:]), strict=True)
    ]
    flat = [s for group in groups for s in group]
    separate, separate_metrics = gradients(start(folder, prompt_sharing="off"), [flat])
    learner = start(folder, prompt_sharing="on", activation_checkpointing=True)
    assert learner.layout().shares_prompts
    batch = replace(rank_batch([flat]), micro_batches=(MicroBatch(rows=tuple(groups)),))
    shared, shared_metrics = gradients(learner, batch)
    assert_same(shared, separate)
    for key in ("policy/entropy", "policy/logprob_diff_mean", "policy/logprob_diff_max", "loss/total"):
        assert shared_metrics[key] == pytest.approx(separate_metrics[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"packing": "on"}, "learner.packing is in use"), ({"attention": "eager"}, "attention 'eager'")],
)
def test_prompt_sharing_is_refused_where_no_mask_of_ours_is_taken(start, qwen3, settings, reason: str):
    with pytest.raises(ModelError, match=f"learner.prompt_sharing.*{reason}"):
        start(qwen3, prompt_sharing="on", **settings)
    assert not start(qwen3, **settings).layout().shares_prompts


def test_prompts_are_not_shared_in_a_model_with_a_sliding_window(start, qwen3, tmp_path: Path):
    folder = shutil.copytree(qwen3, tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    assert not start(folder).layout().shares_prompts
    with pytest.raises(ModelError, match="layers other than full attention"):
        start(folder, prompt_sharing="on")


def test_activation_checkpointing_and_chunks_do_not_change_the_gradient(start, qwen3):
    samples = make_samples(6)
    plain, _ = gradients(start(qwen3), [samples])
    saving = start(qwen3, activation_checkpointing=True, logprob_chunk_tokens=3, reshard_after_forward="on")
    lean, _ = gradients(saving, [samples[:2], samples[2:]])
    assert_same(lean, plain)


def test_bfloat16_compute_gives_nearly_the_same_gradient_on_float32_masters(start, qwen3):
    samples = make_samples(12)
    exact, _ = gradients(start(qwen3), [samples])
    learner = start(qwen3, dtype="bfloat16")
    rounded, _ = gradients(learner, [samples[:6], samples[6:]])
    flat = [torch.cat([g[n].flatten() for n in exact]) for g in (exact, rounded)]
    assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.995
    assert all(p.dtype == torch.float32 for p in learner._started().policy.parameters.values())


def test_the_kl_term_pulls_back_to_the_initial_policy_only_once_the_policy_has_moved(start, qwen3):
    samples = [replace(s, advantage=0.0) for s in make_samples(4)]
    for estimator in ("k1", "k2", "k3"):
        learner = start(qwen3, algorithm={"kl": {"coefficient": 0.5, "estimator": estimator}})
        unmoved, metrics = gradients(learner, [samples])
        assert max(float(g.abs().max()) for g in unmoved.values()) < 1e-5
        assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
        learner.train(rank_batch([make_samples(4)], version=1))
        moved, metrics = gradients(learner, [samples], version=2)
        assert max(float(g.abs().max()) for g in moved.values()) > 1e-4
        assert metrics["loss/total"] == pytest.approx(metrics["loss/kl"], abs=1e-6)


def test_metrics_of_the_first_update_compare_learner_and_rollout(start, qwen3):
    samples = make_samples(4)
    learner = start(qwen3)
    scored = learner.score([s.token_ids.tolist() for s in samples], 1.0)
    own = [lp[s.prompt_len - 1 :] for lp, s in zip(scored, samples, strict=True)]
    shifted = [
        replace(s, logprobs=lp + np.float32(0.5 if i else 0.0), versions=np.full(len(lp), -i, dtype=np.int32))
        for i, (s, lp) in enumerate(zip(samples, own, strict=True))
    ]
    metrics = learner.train(rank_batch([shifted[:1], shifted[1:]])).metrics
    lengths = [len(lp) for lp in own]
    stale = sum(lengths[1:]) / sum(lengths)
    assert metrics["policy/logprob_diff_mean"] == pytest.approx(0.5 * stale, abs=1e-5)
    assert metrics["policy/logprob_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["policy/logprob_diff_mean_fresh"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["policy/importance_mean"] == pytest.approx(1 - stale + stale * math.exp(-0.5), abs=1e-5)
    # k3 of KL(rollout || learner) with rollout 0.5 above the learner.
    assert metrics["policy/kl_rollout"] == pytest.approx(stale * (math.exp(-0.5) - 1 + 0.5), abs=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)


def test_the_fresh_difference_is_absent_without_fresh_tokens(start, qwen3):
    metrics = start(qwen3).train(rank_batch([make_samples(2, version=-1)])).metrics
    assert "policy/logprob_diff_mean" in metrics
    assert "policy/logprob_diff_mean_fresh" not in metrics


def test_several_updates_keep_the_old_policy_of_the_batch_and_count_versions(start, qwen3):
    learner = start(qwen3, algorithm={"updates_per_batch": 3}, optimizer={"lr": 0.02, "warmup_steps": 3})
    result = learner.train(rank_batch([make_samples(4)]))
    assert result.version == 3
    assert result.metrics["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    assert result.metrics["optim/lr"] == pytest.approx(0.02)


def test_a_batch_without_any_sample_changes_nothing_and_does_not_crash(start, qwen3):
    learner = start(qwen3)
    before = weights(learner)
    result = learner.train(rank_batch([[]]))
    assert (result.version, result.num_skipped_steps, result.metrics["loss/total"]) == (1, 0, 0.0)
    assert "policy/entropy" not in result.metrics
    assert learner.train(rank_batch([], version=1)).version == 2
    # Decay alone may move weights: it is no gradient.
    assert all(torch.allclose(before[n], after, rtol=1e-3) for n, after in weights(learner).items())


def test_advantages_of_zero_do_not_crash(start, qwen3):
    samples = [replace(s, advantage=0.0) for s in make_samples(3)]
    assert start(qwen3).train(rank_batch([samples])).metrics["optim/grad_norm"] == 0.0


def test_a_step_that_is_not_finite_is_skipped_and_counted_and_training_goes_on(start, qwen3):
    learner = start(qwen3, optimizer={"lr": 1e-3, "warmup_steps": 4})
    before = weights(learner)
    samples = make_samples(4)
    poisoned = [replace(samples[0], advantage=math.nan), *samples[1:]]
    result = learner.train(rank_batch([poisoned]))
    assert (result.version, result.num_skipped_steps) == (1, 1)
    assert math.isnan(result.metrics["optim/grad_norm"])
    assert all(torch.equal(before[n], after) for n, after in weights(learner).items())
    result = learner.train(rank_batch([samples], version=1))
    assert result.num_skipped_steps == 0
    assert result.metrics["optim/lr"] == pytest.approx(1e-3 * 2 / 4)  # the skipped step counted
    assert any(not torch.equal(before[n], after) for n, after in weights(learner).items())


def test_a_batch_of_another_version_is_refused(start, qwen3):
    with pytest.raises(RunError, match="batch is for version 3, but the learner is at version 0"):
        start(qwen3).train(rank_batch([make_samples(1)], version=3))
