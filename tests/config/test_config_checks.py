"""Values that cannot work together, alone or with the files and the machine they meet."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from s2rl.config import check_devices, check_files, check_machine, config_from_dict, warnings_of
from s2rl.config.checks import max_outstanding_groups
from s2rl.config.machine import count_devices, num_cores
from s2rl.errors import ConfigError, DataError, ModelError, UserError


def refusal(raw: dict, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(raw, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key", "parts"),
    [
        (["algorithm.group_size=1"], "algorithm.group_size", ["group_norm", "at least 2"]),
        (["algorithm.group_size=1", "algorithm.advantage=group_mean"], "algorithm.group_size", ["group_mean"]),
        (
            ["rollout.sampling.max_new_tokens=1500"],
            "rollout.sampling.max_new_tokens",
            ["1500", "1024", "2524", "rollout.max_model_len is 2048"],
        ),
        (
            ["eval.sampling.max_new_tokens=1500", "eval.data=[{path: held.jsonl}]"],
            "eval.sampling.max_new_tokens",
            ["2524", "rollout.max_model_len"],
        ),
        (["learner.max_tokens_per_micro_batch=1535"], "learner.max_tokens_per_micro_batch", ["1536", "at least 1536"]),
        (["rollout.max_num_batched_tokens=32"], "rollout.max_num_batched_tokens", ["32", "64"]),
        (["algorithm.groups_per_step=1", "learner.ranks=9"], "learner.ranks", ["9 ranks", "8 samples"]),
        (["sync.every=3"], "staleness.max_staleness", ["at least 2", "sync.every 3"]),
        (["algorithm.updates_per_batch=3"], "staleness.max_staleness", ["at least 2"]),
        (["algorithm.updates_per_batch=2", "sync.every=2"], "staleness.max_staleness", ["at least 3"]),
        (["staleness.depth=7"], "staleness.depth", ["8 to 16", "or auto"]),
        (["staleness.depth=17"], "staleness.depth", ["8 to 16"]),
        (["rollout.kv_on_update=keep"], "rollout.prefix_caching", ["rollout.prefix_caching=false"]),
        (
            ["rollout.engine_args={max_model_len: 99}"],
            "rollout.engine_args.max_model_len",
            ["Use rollout.max_model_len"],
        ),
        (["rollout.engine_args={logprobs-mode: raw}"], "rollout.engine_args.logprobs-mode", ["Remove it"]),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel", ["device cpu"]),
        (["learner.optimizer.warmup_steps=10"], "learner.optimizer.warmup_steps", ["10 optimizer steps"]),
        (["model.attention=flash_attention_2"], "model.attention", ["device cpu"]),
        (["data.train.0.split=test"], "data.train.0.split", ["is a file"]),
        (["stop_at_accuracy=0.9"], "stop_at_accuracy", ["eval.data"]),
        (["cluster.env_vars={a-b: x}"], "cluster.env_vars", ["a-b"]),
        (["sync.probe_tokens=4096"], "sync.probe_tokens", ["2048"]),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_the_key_and_the_remedy(
    raw: dict, overrides: list[str], key: str, parts: list[str]
) -> None:
    message = refusal(raw, *overrides)
    assert message.startswith(f"{key}: ")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "overrides",
    [
        ["staleness.max_staleness=0"],
        ["staleness.max_staleness=2", "sync.every=3"],
        ["staleness.max_staleness=1", "algorithm.updates_per_batch=2"],
        ["staleness.depth=8"],
        ["staleness.depth=16"],
        ["rollout.kv_on_update=keep", "rollout.prefix_caching=false"],
        ["rollout.sampling.max_new_tokens=1024"],
        ["learner.max_tokens_per_micro_batch=1536"],
        ["rollout.tensor_parallel=2", "device=cuda"],
        ["eval.sampling.max_new_tokens=1500"],
    ],
)
def test_values_at_the_edge_are_accepted(raw: dict, overrides: list[str]) -> None:
    config_from_dict(raw, overrides)


def test_all_problems_are_listed_at_once(raw: dict) -> None:
    message = refusal(raw, "algorithm.group_size=1", "sync.every=3", "stop_at_accuracy=0.9")
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize("bound", range(5))
@pytest.mark.parametrize("updates", range(1, 4))
def test_the_most_outstanding_groups_are_those_that_the_queue_allows(raw: dict, bound: int, updates: int) -> None:
    if bound < updates - 1:
        return
    from s2rl.trainer.queue import SampleQueue

    config = config_from_dict(raw, [f"staleness.max_staleness={bound}", f"algorithm.updates_per_batch={updates}"])
    queue = SampleQueue(groups_per_step=8, max_staleness=bound, updates_per_batch=updates)
    assert max_outstanding_groups(config) == queue.max_depth


def test_wandb_without_the_package_is_refused(raw: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refusal(raw, "logging.wandb_project=x")


# ---- files ---------------------------------------------------------------------------------------------------------


def file_refusal(raw: dict, *overrides: str, kind: type[UserError]) -> str:
    config = config_from_dict(raw, overrides)
    with pytest.raises(kind) as caught:
        check_files(config)
    return str(caught.value)


def test_a_model_folder_is_read_without_torch(raw: dict) -> None:
    facts = check_files(config_from_dict(raw))
    assert facts.num_parameters == 16 * 64 + 512
    assert facts.num_bytes == (config_from_dict(raw).model.path / "model.safetensors").stat().st_size
    assert facts.kv_values_per_token == 2 * 2 * 4 * 16


def test_a_model_path_that_is_no_model_folder_is_told_by_what_is_missing(
    raw: dict, model_folder: Path, tmp_path: Path
) -> None:
    assert "is not a folder" in file_refusal(raw, f"model.path={tmp_path / 'none'}", kind=ModelError)
    assert "not downloaded" in file_refusal(raw, "model.path=Qwen/Qwen3-0.6B", kind=ModelError)
    assert "it has no config.json" in file_refusal(raw, f"model.path={tmp_path}", kind=ModelError)
    (model_folder / "tokenizer.json").unlink()
    assert "holds no tokenizer" in file_refusal(raw, kind=ModelError)
    (model_folder / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in file_refusal(raw, kind=ModelError)


def test_a_tokenizer_folder_is_checked_when_it_is_given(raw: dict, tmp_path: Path) -> None:
    assert file_refusal(raw, f"model.tokenizer={tmp_path}", kind=ModelError).startswith("model.tokenizer: ")


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "longer"])
def test_a_damaged_weight_file_is_found_by_its_header(raw: dict, model_folder: Path, damage: str) -> None:
    file = model_folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-1], "garbage": b"\0" * 100, "empty": b"", "longer": data + b"x"}[damage])
    assert str(file) in file_refusal(raw, kind=ModelError)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": 3}'])
def test_a_config_json_that_is_none_is_refused(raw: dict, model_folder: Path, content: str) -> None:
    (model_folder / "config.json").write_text(content)
    assert "config.json" in file_refusal(raw, kind=ModelError)


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(raw: dict, model_folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in file_refusal(raw, kind=ModelError)


def test_budgets_are_checked_against_the_model(raw: dict) -> None:
    assert "has 4096 positions" in file_refusal(raw, "rollout.max_model_len=5000", kind=ConfigError)
    assert "cannot hold one sequence" in file_refusal(raw, "rollout.kv_cache_gb=0.0001", kind=ConfigError)
    assert "100 is not a token id" in file_refusal(raw, "rollout.sampling.stop_token_ids=[100]", kind=ConfigError)


def test_data_files_are_looked_for_before_anything_is_loaded(raw: dict, tmp_path: Path) -> None:
    missing = file_refusal(raw, f"data.train.0.path={tmp_path / 'no.jsonl'}", kind=DataError)
    assert missing.startswith("data.train.0.path: no such file") and "no.jsonl" in missing
    (tmp_path / "empty.jsonl").touch()
    assert "is empty" in file_refusal(raw, f"eval.data=[{{path: {tmp_path / 'empty.jsonl'}}}]", kind=DataError)
    (tmp_path / "x.csv").write_text("a,b")
    assert "ends with .csv" in file_refusal(raw, f"data.train.0.path={tmp_path / 'x.csv'}", kind=DataError)
    assert "is a folder" in file_refusal(raw, f"data.train.0.path={tmp_path}", kind=DataError)


def test_a_file_where_the_run_folder_should_be_is_refused(raw: dict, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert "is a file" in file_refusal(raw, f"runs_dir={tmp_path / 'taken'}", kind=ConfigError)


# ---- machine -------------------------------------------------------------------------------------------------------


def test_more_accelerators_than_there_are_is_refused_with_the_sum(raw: dict) -> None:
    config = config_from_dict(raw, ["device=cuda", "rollout.workers=2", "rollout.tensor_parallel=2", "learner.ranks=4"])
    check_devices(config, available=8)
    with pytest.raises(ConfigError, match=r"needs 8 cuda devices .* there are 7"):
        check_devices(config, available=7)


@pytest.mark.skipif(count_devices("cuda") > 0, reason="this machine has CUDA devices")
def test_a_machine_without_accelerators_is_told_to_use_the_cpu(raw: dict) -> None:
    with pytest.raises(ConfigError, match=r"there are 0.*device=cpu"):
        check_machine(config_from_dict(raw, ["device=cuda"]))


def test_devices_of_a_cluster_are_not_looked_for_on_this_machine(raw: dict) -> None:
    check_machine(config_from_dict(raw, ["device=npu", "cluster.address=auto"]))


def test_more_threads_in_a_process_than_cores_is_refused_and_in_all_is_warned_of(raw: dict) -> None:
    cores = num_cores()
    with pytest.raises(ConfigError, match=r"rollout\.threads"):
        check_machine(config_from_dict(raw, [f"rollout.threads={cores + 1}"]))
    crowded = config_from_dict(raw, [f"rollout.threads={cores}", f"learner.threads={cores}"])
    check_machine(crowded)
    assert any("threads" in warning for warning in warnings_of(crowded))


def test_settings_without_effect_are_warned_of(raw: dict) -> None:
    config = config_from_dict(
        raw, ["learner.optimizer.min_lr_ratio=0.1", "algorithm.old_policy=rollout", "algorithm.importance_cap=3"]
    )
    text = "\n".join(warnings_of(config))
    assert "min_lr_ratio" in text and "importance_cap" in text and "eval.data" in text
