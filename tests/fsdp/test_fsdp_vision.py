"""Vision-language models in the learner: log-probabilities of transformers' own forward, and ranks that agree."""

from __future__ import annotations

from pathlib import Path

import fsdp_vision_ranks as ranks
import numpy as np
import pytest
import torch
import transformers
from fsdp_models import rank_batch, weights

from s2rl.errors import ModelError
from s2rl.models.small import SmallModel, save_small_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return save_small_model(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return save_small_model(tmp_path_factory.mktemp("qwen3_vl"), family="qwen3_vl_moe")


def theirs(made: SmallModel, ids: np.ndarray, images: tuple[np.ndarray, ...]) -> np.ndarray:
    """Log-probabilities [S - 1] by transformers' own processor, positions and forward."""
    model = getattr(transformers, made.architecture).from_pretrained(made.folder, dtype=torch.float32).eval()
    inputs = {}
    if images:
        processor = transformers.AutoImageProcessor.from_pretrained(made.folder)
        inputs = dict(processor(images=[torch.from_numpy(i).permute(2, 0, 1) for i in images], return_tensors="pt"))
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    types = (tokens == made.config["image_token_id"]).int()
    with torch.no_grad():
        logits = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=types, use_cache=False, **inputs
        ).logits
    return logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1).numpy()


def test_scores_of_text_and_images_are_those_of_the_models_own_forward(made, start):
    learner = start(made.folder)
    sequences, images = ranks.sequences(made, ["text", "one", "two", "text", "large"])
    scores = learner.score(sequences, 1.0, images)
    for ids, own, score in zip(sequences, images, scores, strict=True):
        np.testing.assert_allclose(score, theirs(made, ids, own), atol=2e-5)


def test_the_image_matters(made, start):
    learner = start(made.folder)
    sequences, images = ranks.sequences(made, ["one"])
    other = [tuple(255 - image for image in images[0])]
    [score], [changed] = learner.score(sequences, 1.0, images), learner.score(sequences, 1.0, other)
    assert np.abs(score - changed).max() > 1e-4


def test_text_alone_leaves_the_vision_tower_as_it_is_and_images_train_it(made, start):
    learner = start(made.folder, optimizer={"lr": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1.0})
    before = weights(learner)
    learner.train(rank_batch([ranks.samples(made, ["text", "text"])], version=0))
    after_text = weights(learner)
    learner.train(rank_batch([ranks.samples(made, ["one", "text"], version=1)], version=1))
    after_image = weights(learner)
    tower = [name for name in before if "visual." in name]
    assert tower
    assert all(torch.equal(before[name], after_text[name]) for name in tower)
    assert all(not torch.equal(after_text[name], after_image[name]) for name in tower if name.endswith("proj.weight"))


def test_samples_in_one_batch_or_in_many_give_the_same_step(made, start):
    """Padding, and the dummy image in it, change nothing."""
    outcomes = []
    for deal in ([[0, 1, 2]], [[0], [1], [2]]):
        learner = start(made.folder)
        samples = ranks.samples(made, ["text", "one", "two"])
        metrics = learner.train(rank_batch([[samples[i] for i in micro] for micro in deal], everyone=samples)).metrics
        outcomes.append((metrics["loss/total"], metrics["optim/grad_norm"]))
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-4)


def test_missing_and_surplus_placeholders_are_refused(qwen3_vl, start):
    learner = start(qwen3_vl.folder)
    sequences, images = ranks.sequences(qwen3_vl, ["one"])
    with pytest.raises(ModelError, match="placeholders"):
        learner.score([np.delete(sequences[0], 5)], 1.0, images)
    with pytest.raises(ModelError, match="placeholders"):
        learner.score(sequences, 1.0, [()])


def test_images_for_a_text_model_are_refused(qwen3: Path, start):
    learner = start(qwen3)
    with pytest.raises(ModelError, match="no vision tower"):
        learner.score([[1, 2, 3]], 1.0, [(np.zeros((64, 64, 3), dtype=np.uint8),)])


@pytest.mark.dist
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5"])
def test_two_ranks_with_every_mix_of_text_and_images_train_as_one(family, tmp_path, start):
    made = save_small_model(tmp_path / "model", family=family)
    results = ranks.run(made, tmp_path)
    learner = start(made.folder)
    for step, mix in enumerate(ranks.MIXES):
        everyone = ranks.samples(made, [kind for share in mix for kind in share], version=step)
        expected = learner.train(rank_batch([everyone], version=step)).metrics
        for rank in results:
            assert rank[step]["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-3, abs=1e-6)
            assert rank[step]["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-3)


@pytest.mark.dist
def test_without_the_dummy_image_ranks_that_disagree_cannot_train(qwen3_vl, tmp_path):
    with pytest.raises(Exception, match=r"(?i)timed out|timeout|mismatch|closed|SIGABRT|did not finish"):
        ranks.run(qwen3_vl, tmp_path, without_dummy=True)
