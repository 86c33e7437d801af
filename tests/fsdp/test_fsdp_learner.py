"""Loading, scoring, publishing and saving on one rank."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_models import VOCAB_SIZE, make_learner, make_samples, rank_batch, save_qwen3, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from s2rl.errors import CheckpointError, ModelError, RunError
from s2rl.fsdp.learner import Learner
from s2rl.types import TensorSpec

MODELS = ["qwen3", "llama", "qwen3_moe", "qwen3_moe_fused"]


def disk_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def reference_scores(folder: Path, sequences: list[list[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        scores.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy())
    return scores


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [{}, {"packing": "on"}, {"cpu_offload": True}, {"max_tokens_per_micro_batch": 20}])
def test_float32_scores_are_those_of_transformers(start, request, model: str, settings: dict[str, object]):
    folder = request.getfixturevalue(model)
    sequences = [s.token_ids.tolist() for s in make_samples(5, prompt=(2, 40))] + [[3], []]
    learner = start(folder, **settings)
    scored = learner.score(sequences, 0.7)
    for own, other in zip(scored, reference_scores(folder, sequences[:5], temperature=0.7), strict=False):
        np.testing.assert_allclose(own, other, atol=2e-5)
    assert [len(s) for s in scored[5:]] == [0, 0]
    assert all(s.dtype == np.float32 for s in scored)


def test_scores_follow_a_training_step(start, qwen3):
    learner = start(qwen3, optimizer={"lr": 0.01})
    sequences = [list(range(20))]
    (before,) = learner.score(sequences, 1.0)
    learner.train(rank_batch([make_samples(4)]))
    (after,) = learner.score(sequences, 1.0)
    assert np.abs(after - before).max() > 1e-3
    learner.train(rank_batch([make_samples(4)], version=1))
    assert np.abs(learner.score(sequences, 1.0)[0] - after).max() > 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_what_is_published_at_first_is_the_folder_itself(start, request, model: str):
    folder = request.getfixturevalue(model)
    learner = start(folder, rollout_dtype="bfloat16")
    published, stored = weights(learner), disk_tensors(folder)
    assert list(published) == sorted(stored)
    for name, tensor in stored.items():
        assert published[name].dtype == tensor.dtype
        assert torch.equal(published[name], tensor)
    manifest = learner.manifest()
    assert manifest == [
        TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for n, t in published.items()
    ]


def test_a_float32_engine_gets_the_masters_of_a_bfloat16_folder(start, llama):
    learner = start(llama, rollout_dtype="float32", optimizer={"lr": 1e-4})
    learner.train(rank_batch([make_samples(4)]))
    published = weights(learner)
    assert {t.dtype for t in published.values()} == {torch.float32}
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(published[name], published[name].bfloat16().float())


def test_published_tensors_load_into_transformers_and_score_the_same(start, qwen3):
    learner = start(qwen3, optimizer={"lr": 0.01})
    learner.train(rank_batch([make_samples(4)]))
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights(learner), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(learner.score([ids[0].tolist()], 1.0)[0], logprobs, atol=2e-5)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe_fused"])
def test_trained_experts_are_published_in_the_layout_of_their_folder(start, request, tmp_path, model: str):
    folder = request.getfixturevalue(model)
    learner = start(folder, optimizer={"lr": 0.01})
    learner.train(rank_batch([make_samples(8)]))
    published, stored = weights(learner), disk_tensors(folder)
    experts = [n for n in stored if ".experts." in n]
    assert len(experts) == (4 if model == "qwen3_moe_fused" else 2 * 5 * 3)
    assert sum(not torch.equal(published[n], stored[n]) for n in experts) > len(experts) // 2
    trained = shutil.copytree(folder, tmp_path / "trained", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({n: t.contiguous() for n, t in published.items()}, trained / "model.safetensors", {"format": "pt"})
    sequences = [s.token_ids.tolist() for s in make_samples(3, prompt=(2, 40))]
    for own, other in zip(learner.score(sequences, 1.0), reference_scores(trained, sequences), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)


def test_another_version_is_not_published(start, qwen3):
    learner = start(qwen3)
    with pytest.raises(RunError, match="publish version 1, but the learner is at version 0"):
        learner.publish(1)
    with pytest.raises(RunError, match="before rank 0 joined the sync group"):
        learner.publish(0)


def test_nothing_works_before_start(qwen3):
    with pytest.raises(RunError, match="before start"):
        make_learner(qwen3).manifest()


def test_tokenizer_facts_name_the_rows_of_the_embedding(qwen3):
    learner = make_learner(qwen3)
    facts = learner.start()
    learner.close()
    assert (facts.vocab_size, facts.tokenizer_size) == (VOCAB_SIZE, VOCAB_SIZE)


def train_steps(learner: Learner, *, first: int, num: int) -> list[float]:
    losses = []
    for step in range(first, first + num):
        samples = make_samples(4, seed=step, version=step)
        result = learner.train(rank_batch([samples[:2], samples[2:]], version=step))
        losses.append(result.metrics["loss/total"])
    return losses


@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}])
def test_a_run_goes_on_from_a_checkpoint_exactly_as_if_it_had_not_stopped(start, qwen3, tmp_path, settings):
    optimizer = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2}
    learner = start(qwen3, optimizer=optimizer, **settings)
    train_steps(learner, first=0, num=3)
    learner.save(tmp_path / "ckpt")
    losses = train_steps(learner, first=3, num=2)  # trains on while it is written
    learner.save_done()
    random_then = torch.rand(3)
    expected = weights(learner)

    resumed = start(qwen3, optimizer=optimizer, seed=5, **settings)
    assert resumed.load(tmp_path / "ckpt") == 3
    assert train_steps(resumed, first=3, num=2) == losses
    assert torch.equal(torch.rand(3), random_then)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_checkpoint_can_be_written_and_read_before_the_first_step(start, qwen3, tmp_path):
    learner = start(qwen3)
    learner.save(tmp_path / "ckpt")
    learner.save_done()
    learner.save_done()  # nothing under way: nothing to wait for
    before = weights(learner)
    train_steps(learner, first=0, num=1)
    assert learner.load(tmp_path / "ckpt") == 0
    assert all(torch.equal(before[n], t) for n, t in weights(learner).items())
    train_steps(learner, first=0, num=1)


def test_damaged_missing_and_foreign_checkpoints_are_refused(start, qwen3, llama, tmp_path):
    learner = start(qwen3)
    with pytest.raises(CheckpointError, match="nowhere"):
        learner.load(tmp_path / "nowhere")
    learner.save(tmp_path / "ckpt")
    learner.save_done()
    file = next((tmp_path / "ckpt").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load(tmp_path / "ckpt")
    (tmp_path / "ckpt" / ".metadata").write_bytes(b"not metadata")
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load(tmp_path / "ckpt")

    other = start(llama)
    other.save(tmp_path / "llama")
    other.save_done()
    with pytest.raises(CheckpointError, match="another model"):
        start(save_qwen3(tmp_path / "deep", layers=3)).load(tmp_path / "llama")


def test_a_checkpoint_of_a_model_with_other_shapes_is_refused(start, qwen3, tmp_path):
    learner = start(qwen3)
    learner.save(tmp_path / "ckpt")
    learner.save_done()
    wide = shutil.copytree(qwen3, tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    config["intermediate_size"] = 64
    (wide / "config.json").write_text(json.dumps(config))
    tensors = disk_tensors(wide)
    for name in [n for n in tensors if ".mlp." in n]:
        dim = 1 if "down_proj" in name else 0
        tensors[name] = torch.cat([tensors[name], tensors[name].narrow(dim, 0, 16)], dim).contiguous()
    save_file(tensors, wide / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        start(wide).load(tmp_path / "ckpt")


def broken(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder with other entries in config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not known; known are LlamaForCausalLM"),
        ({"architectures": None}, r"\(none in config.json\) is not known"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lacks 11 of the model's tensors"),
        ({"intermediate_size": 40}, "config.json asks for"),
        ({"tie_word_embeddings": False}, "lacks 1 of the model's tensors, the first is lm_head.weight"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_with_the_reason(start, qwen3, tmp_path, changes, message: str):
    with pytest.raises(ModelError, match=message):
        start(broken(qwen3, tmp_path / "model", **changes))


def test_folders_without_config_or_weights_are_refused(start, qwen3, tmp_path):
    with pytest.raises(ModelError, match="not a model folder: it has no config"):
        start(tmp_path)
    folder = shutil.copytree(qwen3, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        start(folder)


def test_an_unknown_wrap_class_is_refused_with_those_that_exist(start, qwen3):
    with pytest.raises(ModelError, match=r"no module of class 'Qwen3Layer'; it has .*Qwen3DecoderLayer"):
        start(qwen3, wrap_classes=["Qwen3Layer"])


def test_an_attention_backend_that_is_not_installed_is_refused(start, qwen3):
    with pytest.raises(ModelError, match=r"model.attention: 'flash_attention_2' cannot be used here"):
        start(qwen3, attention="flash_attention_2")


def test_tensors_that_the_model_does_not_have_are_left_alone(start, qwen3, tmp_path):
    folder = shutil.copytree(qwen3, tmp_path / "model")
    tensors = disk_tensors(folder) | {"lm_head.weight": torch.zeros(VOCAB_SIZE, 32), "extra": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors")
    learner = start(folder)
    assert "extra" not in weights(learner)
    sequences = [list(range(10))]
    np.testing.assert_allclose(learner.score(sequences, 1.0)[0], reference_scores(qwen3, sequences)[0], atol=2e-5)


def test_loading_reads_no_more_than_the_rows_of_one_tensor(start, llama, monkeypatch):
    asked: list[str] = []
    original = safe_open

    class Watched:
        def __init__(self, *args, **kwargs):
            self._reader = original(*args, **kwargs)

        def __enter__(self):
            self._reader.__enter__()
            return self

        def __exit__(self, *error):
            return self._reader.__exit__(*error)

        def get_slice(self, name):
            asked.append(name)
            return self._reader.get_slice(name)

    monkeypatch.setattr("safetensors.safe_open", Watched)
    learner = start(llama)
    assert sorted(asked) == [spec.name for spec in learner.manifest()]


def test_a_learner_can_be_closed_twice_and_after_a_failed_start(tmp_path):
    learner = make_learner(tmp_path)
    with pytest.raises(ModelError):
        learner.start()
    learner.close()
    learner.close()


def test_skipped_steps_are_part_of_the_version_in_a_checkpoint(start, qwen3, tmp_path):
    learner = start(qwen3)
    poisoned = [replace(s, advantage=float("inf")) for s in make_samples(2)]
    assert learner.train(rank_batch([poisoned])).num_skipped_steps == 1
    learner.save(tmp_path / "ckpt")
    learner.save_done()
    assert start(qwen3).load(tmp_path / "ckpt") == 1
