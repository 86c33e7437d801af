"""From YAML and overrides to a configuration, and what the messages say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2rl.config import RunConfig, config_from_dict, dump_config, load_config
from s2rl.config.describe import keys
from s2rl.config.load import MAX_PROBLEMS
from s2rl.config.yaml_text import dump_yaml, parse_yaml
from s2rl.errors import ConfigError, UserError


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


def test_a_small_file_gives_all_defaults(config_file: Path) -> None:
    config = load_config(config_file)
    assert (config.algorithm.group_size, config.rollout.workers, config.staleness.max_staleness) == (8, 1, 1)


def test_errors_of_the_user_are_value_errors_with_exit_code_2(config_file: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(config_file, ["steps=0"])
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("on", "on"),
        ("yes", "yes"),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("true", True),
        (".inf", float("inf")),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
    ],
)
def test_plain_scalars_mean_what_a_reader_takes_them_for(text: str, value: object) -> None:
    assert parse_yaml(f"k: {text}", origin="x")[0] == {"k": value}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
        lambda children: (
            st.lists(children, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=6), children, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_dumped_yaml_reads_back_unchanged(value: object) -> None:
    read, _ = parse_yaml(dump_yaml({"k": value}), origin="x")
    assert read == {"k": value}


@pytest.mark.parametrize(
    "text", ["1e-5", "on", "010", "0o17", "null", "1:30", "", "<<", "- a", "a: b", "#", "'", "2024-01-01"]
)
def test_text_that_looks_like_something_else_survives_the_run_folder(text: str, raw: dict) -> None:
    raw["rollout"] = {"sampling": {"stop": [text or "x"]}}
    raw["rewards"]["functions"][0]["args"] = {"a": text}
    config = config_from_dict(raw)
    assert parse_yaml(dump_config(config), origin="x")[0]["rewards"]["functions"][0]["args"]["a"] == text


def test_the_resolved_configuration_reads_back_equal(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["learner.optimizer.lr=2e-5", "staleness.depth=16", "learner.packing=on"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_the_folder_that_was_searched(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no.yaml'}: no such file" in refusal(tmp_path / "no.yaml")


def test_a_folder_an_empty_file_and_a_binary_file_are_told_apart(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.yaml", tmp_path / "b.yaml"
    empty.write_text("# nothing but a comment\n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is a folder" in refusal(tmp_path)
    assert "the file is empty" in refusal(empty)
    assert "not a text file in UTF-8" in refusal(binary)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [1, 2\nsteps: 3", "line 2"),
        ("a: b: c", "line 1, column 5"),
        ("name: x\n\tsteps: 3", "line 2"),
        ("--- \na: 1\n---\nb: 2", "not valid YAML"),
        ("name: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("name: !!binary aGk=", "is not allowed here"),
        ("- a\n- b", "allowed: a mapping with keys"),
        ("just text", "allowed: a mapping with keys"),
        ("name: &a [*a]", "contains itself"),
        ("name: *nobody", "not valid YAML"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert expected in refusal(file)


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("name: a\nlearner:\n  ranks: 1\n  threads: 1\n  ranks: 2\n")
    assert "learner.ranks: stands twice in one section" in refusal(file)
    assert "lines 3 and 5" in refusal(file)


def test_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    data, _ = parse_yaml("a: &x {p: 1, q: 2}\nb:\n  <<: *x\n  q: 3\n", origin="x")
    assert data["b"] == {"p": 1, "q": 3}


def test_a_section_with_nothing_in_it_means_its_defaults(config_file: Path) -> None:
    config_file.write_text(config_file.read_text() + "eval:\nlearner:\n  optimizer:\n")
    assert load_config(config_file).learner.optimizer.lr == 1e-6


# ---- unknown keys and wrong values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learner.lr", "learner.optimizer.lr"),
        ("lr", "learner.optimizer.lr"),
        ("rollout.worker", "rollout.workers"),
        ("algorithm.clip_hihg", "algorithm.clip_high"),
        ("algorithm.max_staleness", "staleness.max_staleness"),
        ("max_new_tokens", "rollout.sampling.max_new_tokens or eval.sampling.max_new_tokens"),
        ("eval.max_new_tokens", "eval.sampling.max_new_tokens"),
        ("rewards.functions.0.wieght", "rewards.functions[].weight"),
        ("learning_rate", "learner.optimizer.lr"),
        ("gpu_memory_utilization", "rollout.memory_fraction"),
        ("rollouts", "rollout"),
        ("logging.wandb", "logging.wandb_project"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_real_one(config_file: Path, key: str, nearest: str) -> None:
    message = refusal(config_file, f"{key}=1")
    assert message.startswith(f"{key}: unknown key. Did you mean {nearest}?")


def test_a_key_that_resembles_nothing_is_answered_with_what_its_section_has(config_file: Path) -> None:
    assert "sync has: every, bucket_mb, verify" in refusal(config_file, "sync.zzz=1")
    assert "docs/config.md" in refusal(config_file, "zzzzzz=1")


def test_every_suggested_name_is_a_real_key() -> None:
    from s2rl.config.suggest import _ELSEWHERE

    assert set(_ELSEWHERE.values()) <= {key.dotted for key in keys()}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.workers=two", "rollout.workers: got 'two' (text), allowed: integer > 0"),
        ("rollout.workers=0", "rollout.workers: got 0 (integer), allowed: integer > 0"),
        ("rollout.workers=1.5", "rollout.workers: got 1.5 (number), allowed: integer > 0"),
        ("rollout.workers=true", "rollout.workers: got true (true or false), allowed: integer > 0"),
        ("rollout.workers='2'", "rollout.workers: got '2' (text), allowed: integer > 0"),
        ("rollout.workers=", "rollout.workers: got null (nothing), allowed: integer > 0"),
        ("steps=[1]", "steps: got a list of 1, allowed: integer > 0"),
        ("device=tpu", "device: got 'tpu' (text), allowed: one of cpu, cuda, npu"),
        ("staleness.depth=deep", "staleness.depth: got 'deep' (text), allowed: integer > 0 or auto"),
        ("model=x", "model: got 'x' (text), allowed: section with path, tokenizer"),
        ("name=1", "(put it in quotes)"),
        ("name=../x", "name: got '../x' (text), allowed: text that matches"),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas.1: must be given"),
        (
            "learner.optimizer.betas=[0.9, 1.0]",
            "learner.optimizer.betas.1: got 1.0 (number), allowed: number >= 0 and < 1",
        ),
        ("learner.optimizer.lr=.nan", "learner.optimizer.lr: got nan (number), allowed: number > 0"),
        ("data.train=[]", "data.train: got a list of 0, allowed: non-empty list"),
        ("data.train=a.jsonl", "data.train: got 'a.jsonl' (text), allowed: non-empty list"),
        ("rewards.functions.0.args={a: [1]}", "rewards.functions.0.args.a: got a list of 1, allowed: text or integer"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p: got 0.9 (number), allowed: only 1"),
        ("rollout.sampling.top_k=40", "rollout.sampling.top_k: got 40 (integer), allowed: only 0"),
        (
            "rollout.sampling.temperature=0",
            "rollout.sampling.temperature: got 0 (integer), allowed: number >= 0.01 and <= 2",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(config_file: Path, override: str, expected: str) -> None:
    message = refusal(config_file, override)
    assert expected in message
    assert f"(override {override})" in message
    assert "pydantic" not in message and "validation" not in message


def test_truncated_sampling_is_refused_with_the_reason(config_file: Path) -> None:
    assert "importance ratios would be wrong" in refusal(config_file, "rollout.sampling.top_p=0.95")


def test_problems_of_the_file_carry_its_line_and_come_in_its_order(config_file: Path) -> None:
    config_file.write_text(config_file.read_text() + "rollout:\n  workers: none\nlearner:\n  ranks: -1\n")
    first, second = refusal(config_file).splitlines()
    num_lines = len(config_file.read_text().splitlines())
    assert first.startswith("rollout.workers: ")
    assert first.endswith(f"({config_file}, line {num_lines - 2})")
    assert second.startswith("learner.ranks: ") and second.endswith(f"({config_file}, line {num_lines})")


def test_what_must_be_given_is_listed_with_its_meaning(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("name: t\n")
    message = refusal(file)
    assert {line.partition(":")[0] for line in message.splitlines()} == {"steps", "model", "data", "rewards"}
    assert "steps: must be given. Batches to train." in message


def test_a_file_full_of_mistakes_is_not_answered_with_a_wall_of_text(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("\n".join(f"unknown_{i}: 1" for i in range(100)))
    assert len(refusal(file).splitlines()) == MAX_PROBLEMS + 1


# ---- overrides -----------------------------------------------------------------------------------------------------


def test_overrides_reach_sections_that_the_file_does_not_have_and_items_of_lists(config_file: Path) -> None:
    config = load_config(
        config_file,
        [
            "algorithm.clip_high=0.28",
            "rewards.functions.0.weight=2",
            "eval.sampling={temperature: 0.6, top_p: 0.95}",
            "rollout.sampling.stop=['\\n', 'a=b']",
            "name=other",
        ],
    )
    assert config.algorithm.clip_high == 0.28
    assert config.rewards.functions[0].weight == 2
    assert config.eval.sampling.top_p == 0.95
    assert config.rollout.sampling.stop == ("\\n", "a=b")
    assert config.run_dir.name == "other"


def test_the_last_override_of_a_key_wins(config_file: Path) -> None:
    assert load_config(config_file, ["steps=3", "steps=4"]).steps == 4


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".steps=3", ""])
def test_an_override_without_key_or_sign_is_answered_with_an_example(config_file: Path, override: str) -> None:
    assert "write dotted.key=value" in refusal(config_file, override)


def test_an_override_of_a_list_item_that_does_not_exist_says_how_many_there_are(config_file: Path) -> None:
    assert "rewards.functions is a list of 1" in refusal(config_file, "rewards.functions.1.weight=2")


def test_an_override_below_a_value_is_refused(config_file: Path) -> None:
    assert "steps is 10 (integer) and has no keys below it" in refusal(config_file, "steps.x=2")


def test_an_override_that_is_not_yaml_is_named(config_file: Path) -> None:
    assert "override steps=[1" in refusal(config_file, "steps=[1")


# ---- paths ---------------------------------------------------------------------------------------------------------


def test_relative_paths_are_relative_to_the_current_directory(
    raw: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw |= {
        "runs_dir": "r",
        "model": {"path": "model", "tokenizer": "tok"},
        "data": {"train": [{"path": "train.jsonl"}]},
    }
    raw["eval"] = {"data": [{"path": "held.parquet"}, {"path": "openai/gsm8k", "split": "test"}]}
    config = config_from_dict(raw)
    assert config.model.path == tmp_path / "model"
    assert config.model.tokenizer == tmp_path / "tok"
    assert config.run_dir == tmp_path / "r" / "t"
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
    assert [s.path for s in config.eval.data] == [str(tmp_path / "held.parquet"), "openai/gsm8k"]


def test_the_given_data_is_not_changed(raw: dict) -> None:
    before = json.dumps(raw)
    config_from_dict(raw, ["steps=3"])
    assert json.dumps(raw) == before


def test_a_configuration_cannot_be_changed_after_it_was_made(config_file: Path) -> None:
    config = load_config(config_file)
    with pytest.raises(ValueError):
        config.steps = 3  # type: ignore[misc]
    assert isinstance(config, RunConfig)
