from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def size(tiny):
    return tiny.Size(
        hidden_size=64, num_layers=1, num_heads=2, num_digits=3, warm_start_steps=3, num_train=40, num_heldout=20
    )


@pytest.fixture(scope="module")
def example(tiny, size, tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("tiny") / "example", size=size, seed=1)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_verls_columns_and_right_answers(example):
    for split, path, count in (("train", example.train, 40), ("heldout", example.heldout, 20)):
        assert len(rows(path)) == count
        for index, row in enumerate(rows(path)):
            question = row["prompt"][0]["content"]
            assert row["prompt"] == [{"role": "user", "content": question}]
            assert row["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(question))}
            assert row["extra_info"] == {"split": split, "index": index}
            assert row["data_source"] == "sort_digits"


def test_heldout_problems_are_not_trained(example):
    questions = [{row["prompt"][0]["content"] for row in rows(path)} for path in (example.train, example.heldout)]
    assert questions[0].isdisjoint(questions[1])


def test_the_folder_loads_as_a_chat_model(example):
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(example.model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "321"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>321<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(tokenizer("naïve 7 €")["input_ids"]) == "naïve 7 €"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id
    config = AutoConfig.from_pretrained(example.model)
    assert config.model_type == "qwen3" and config.head_dim == 32
    assert config.eos_token_id == tokenizer.eos_token_id and config.vocab_size >= len(tokenizer)


def test_same_seed_same_files(tiny, size, example, tmp_path):
    again = tiny.build(tmp_path / "again", size=size, seed=1)
    assert again.train.read_bytes() == example.train.read_bytes()
    assert (again.model / "model.safetensors").read_bytes() == (example.model / "model.safetensors").read_bytes()


def test_building_twice_does_nothing_and_another_recipe_replaces(tiny, size, tmp_path):
    first = tiny.build(tmp_path / "x", size=size, seed=1)
    before = first.train.stat().st_mtime_ns
    assert tiny.build(tmp_path / "x", size=size, seed=1) == first
    assert first.train.stat().st_mtime_ns == before
    tiny.build(tmp_path / "x", size=size, seed=2)
    assert first.train.stat().st_mtime_ns != before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_with_other_files_is_refused(tiny, size, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="did not write"):
        tiny.build(tmp_path, size=size)
    assert tiny.main(["--out", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_the_sizes_suit_the_kernels_and_the_promise(tiny):
    import torch

    for name, size in tiny.SIZES.items():
        with torch.device("meta"):
            model = tiny.make_model(size, tiny.make_tokenizer())
        assert size.hidden_size % 32 == 0
        if name == "tiny":
            assert 1e6 < sum(p.numel() for p in model.parameters()) < 5e6


def test_the_warm_up_teaches_a_wrong_habit_for_most_numbers(tiny):
    import random

    problems = [f"{i:05d}" for i in range(1, 100_000, 97)]
    problems = [p for p in problems if len(set(p)) > 1]
    answers = tiny.warm_start_answers(problems, random.Random(0))
    right = [answer == tiny.solve(problem) for problem, answer in zip(problems, answers, strict=True)]
    by_habit = {start: [r for p, r in zip(problems, right, strict=True) if p[0] == start] for start in "0123456789"}
    for start, outcomes in by_habit.items():
        share = sum(outcomes) / len(outcomes)
        assert share > 0.75 if start in "0123" else share < 0.25
