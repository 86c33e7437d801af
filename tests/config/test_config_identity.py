"""Which changes make another run, and what a run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from s2rl.config import check_files, config_from_dict, digest, dump_config, resume_conflicts
from s2rl.config.docs import TARGET, markdown
from s2rl.config.plan import plan_resources, render_plan
from s2rl.config.yaml_text import parse_yaml


@pytest.mark.parametrize(
    "override",
    [
        "steps=20",
        "rollout.workers=2",
        "learner.ranks=2",
        "limits.step_s=5",
        "logging.live=off",
        "checkpoint.every=3",
        "rewards.processes=2",
        "stop_at_accuracy=null",
        "learner.optimizer.schedule=constant",
    ],
)
def test_resources_logging_and_length_may_change_on_resume(raw: dict, override: str) -> None:
    first, second = config_from_dict(raw), config_from_dict(raw, [override])
    assert digest(first) == digest(second)
    assert resume_conflicts(first.model_dump(mode="json"), second) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=1", "seed: 0 in the run folder, 1 now"),
        ("algorithm.group_size=4", "algorithm.group_size: 8 in the run folder, 4 now"),
        ("learner.optimizer.lr=1e-5", "learner.optimizer.lr: 1e-06 in the run folder, 1e-05 now"),
        ("staleness.max_staleness=2", "staleness.max_staleness: 1 in the run folder, 2 now"),
        ("data.train.0.limit=5", "data.train.0.limit: null in the run folder, 5 now"),
        ("rollout.sampling.temperature=0.9", "rollout.sampling.temperature: 1.0 in the run folder, 0.9 now"),
    ],
)
def test_what_shapes_the_weights_may_not(raw: dict, override: str, line: str) -> None:
    first, second = config_from_dict(raw), config_from_dict(raw, [override])
    assert digest(first) != digest(second)
    saved, _ = parse_yaml(dump_config(first), origin="x")
    assert resume_conflicts(saved, second) == [line]


def test_the_length_may_not_change_when_the_learning_rate_depends_on_it(raw: dict) -> None:
    first = config_from_dict(raw, ["learner.optimizer.schedule=cosine"])
    second = config_from_dict(raw, ["learner.optimizer.schedule=cosine", "steps=20"])
    assert resume_conflicts(first.model_dump(mode="json"), second) == ["steps: 10 in the run folder, 20 now"]


def test_a_run_may_be_moved_but_not_given_other_data(raw: dict, tmp_path: Path) -> None:
    first = config_from_dict(raw)
    moved = config_from_dict(raw, [f"data.train.0.path={tmp_path / 'elsewhere' / 'train.jsonl'}"])
    other = config_from_dict(raw, [f"data.train.0.path={tmp_path / 'other.jsonl'}"])
    assert digest(first) == digest(moved) != digest(other)


def test_a_second_data_file_is_a_conflict(raw: dict) -> None:
    first = config_from_dict(raw)
    raw["data"]["train"].append({"path": "more.jsonl"})
    assert any(
        "data.train.1.path: not there" in line
        for line in resume_conflicts(first.model_dump(mode="json"), config_from_dict(raw))
    )


def test_the_plan_counts_processes_devices_and_memory(raw: dict) -> None:
    raw |= {"device": "cuda"}
    config = config_from_dict(raw, ["rollout.workers=2", "rollout.tensor_parallel=2", "learner.ranks=4"])
    plan = plan_resources(config, check_files(config))
    rows = {row.process: row for row in plan.rows}
    assert plan.devices == 8
    assert (rows["rollout worker"].count, rows["rollout worker"].devices) == (2, 2)
    assert (rows["learner rank"].count, rows["learner rank"].devices) == (4, 1)
    # 16 bytes of state a parameter over 4 ranks, and the gathered bfloat16 copy.
    assert rows["learner rank"].device_mb == pytest.approx(1536 * (16 / 4 + 2) / 2**20)
    text = "\n".join(render_plan(plan))
    assert "8 x cuda" in text and "at most 16" in text


def test_on_the_cpu_weights_and_cache_count_as_host_memory(raw: dict) -> None:
    small, large = (config_from_dict(raw, [f"rollout.kv_cache_gb={gb}"]) for gb in (1, 3))
    facts = check_files(small)
    assert plan_resources(large, facts).host_mb - plan_resources(small, facts).host_mb == pytest.approx(2048)


def test_the_configuration_reference_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == markdown(), "run `python -m s2rl.config.docs`"
