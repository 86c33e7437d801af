"""Two gloo ranks against one: same losses, same weights, same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_ranks
import numpy as np
import pytest
import torch
from fsdp_models import rank_batch, weights

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, qwen3: Path, llama: Path, qwen3_moe: Path) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "qwen3").symlink_to(qwen3)
    (folder / "llama").symlink_to(llama)
    (folder / "qwen3_moe").symlink_to(qwen3_moe)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    """Scenario results per rank. What one rank alone writes for them is written first."""
    from fsdp_models import make_learner

    learner = make_learner(folder / "qwen3")
    learner.start()
    one_rank(learner, num_steps=2)
    learner.save(folder / "one-rank")
    learner.save_done()
    learner.close()
    return fsdp_ranks.run_all(folder)


@pytest.fixture
def outcome(two_ranks: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The two ranks' results of the scenario that the test names."""
    results = [rank[request.param] for rank in two_ranks]
    for result in results:
        assert not isinstance(result, str), result
    return results


def scenario(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("outcome", [name], indirect=True, ids=[name])


def one_rank(learner, *, num_steps: int, first: int = 0) -> list[dict[str, float]]:
    metrics = []
    for step in range(first, first + num_steps):
        samples = fsdp_ranks.step_samples(step)
        metrics.append(dict(learner.train(rank_batch([samples[:3], samples[3:]], version=step)).metrics))
    return metrics


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/"))}


def assert_equal_runs(outcome: list[dict[str, Any]], metrics: list[dict[str, float]], expected: dict[str, Any]) -> None:
    for rank in outcome:
        for own, other in zip(rank["metrics"], metrics, strict=True):
            assert comparable(own) == pytest.approx(comparable(other), rel=2e-4, abs=2e-6)
        assert rank["weights"].keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("outcome", ["lean", "fast", "offloaded"], indirect=True)
def test_two_ranks_train_as_one_does(outcome, start, qwen3):
    learner = start(qwen3, algorithm={"kl": {"coefficient": 0.1}})
    assert_equal_runs(outcome, one_rank(learner, num_steps=fsdp_ranks.NUM_STEPS), weights(learner))
    sequences = [list(range(1, 2 + n)) for n in range(6)]
    expected = learner.score(sequences, 0.9)
    for rank in outcome:
        assert [len(s) for s in rank["scores"]] == [0, 1, 2, 3, 4, 5]
        for own, other in zip(rank["scores"], expected, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4)


@scenario("untied")
def test_two_ranks_train_an_untied_model_as_one_does_and_publish_its_types(outcome, start, llama):
    learner = start(llama, rollout_dtype="bfloat16")
    metrics = one_rank(learner, num_steps=fsdp_ranks.NUM_STEPS)
    for rank in outcome:
        for own, other in zip(rank["metrics"], metrics, strict=True):
            assert comparable(own) == pytest.approx(comparable(other), rel=1e-3, abs=1e-5)
        assert rank["weights"]["lm_head.weight"].dtype == torch.float32
        assert rank["weights"]["model.embed_tokens.weight"].dtype == torch.bfloat16


@scenario("experts")
def test_two_ranks_train_experts_as_one_does(outcome, start, qwen3_moe):
    learner = start(qwen3_moe)
    assert_equal_runs(outcome, one_rank(learner, num_steps=fsdp_ranks.NUM_STEPS), weights(learner))


@scenario("poisoned")
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(outcome):
    for rank in outcome:
        assert rank["skipped"] == [1, 0]
        assert rank["versions"] == [1, 2]
        assert rank["unchanged"]
    assert outcome[0]["lr"] == outcome[1]["lr"]


@scenario("resumed_from_one")
def test_two_ranks_go_on_from_what_one_rank_wrote(outcome, start, qwen3, folder):
    learner = start(qwen3)
    assert learner.load(folder / "one-rank") == 2
    (metrics,) = one_rank(learner, num_steps=1, first=2)
    for rank in outcome:
        assert rank["version"] == 2
    assert_equal_runs([{**r, "metrics": [r["metrics"]]} for r in outcome], [metrics], weights(learner))


@scenario("lean")
def test_one_rank_goes_on_from_what_two_ranks_wrote_while_they_trained_on(outcome, start, qwen3, folder):
    learner = start(qwen3, seed=99, algorithm={"kl": {"coefficient": 0.1}})
    assert learner.load(folder / "two-ranks") == 2
    (metrics,) = one_rank(learner, num_steps=1, first=2)
    assert_equal_runs([{**r, "metrics": r["metrics"][2:]} for r in outcome], [metrics], weights(learner))


@scenario("full_disk")
def test_a_rank_that_cannot_write_is_reported_by_all_and_training_goes_on(outcome):
    for rank in outcome:
        assert "could not be written" in rank["message"]
        assert "rank 1" in rank["message"]
        assert "File too large" in rank["message"]
        assert rank["version"] == 1
