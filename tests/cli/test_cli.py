"""The command line as a person meets it: separate processes, real exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from s2rl.config import load_config

HEAVY = ("torch", "ray", "vllm", "transformers", "matplotlib", "tensorboard", "datasets")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str
    cpu_s: float


def s2rl(*arguments: str, cwd: Path, before: str = "", env: dict[str, str] | None = None) -> Outcome:
    """Run the command line in a new interpreter; `before` is Python that runs first."""
    code = f"""
import atexit, sys
heavy = {HEAVY!r}
def report():
    print("LOADED", *[name for name in heavy if name in sys.modules], file=sys.stderr)
atexit.register(report)
{before}
from s2rl.cli import main
sys.argv[0] = "s2rl"
main()
"""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env=os.environ | {"PYTHONPATH": root, "COLUMNS": "200", "TERM": "dumb"} | (env or {}),
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Outcome(code=result.returncode, out=result.stdout, err=result.stderr, cpu_s=cpu_s)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a model folder, data and a configuration."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    (model / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((4, 4), np.float32)}, model / "model.safetensors")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n')
    config = {
        "name": "t",
        "steps": 10,
        "model": {"path": "model"},
        "data": {"train": [{"path": "train.jsonl"}]},
        "rewards": {"functions": [{"function": "exact_match"}]},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("train", "--help"), ("eval", "--help"), ("train", "--config", "x.yaml", "--dry-run"), ("version",)],
    ids=" ".join,
)
def test_help_and_dry_run_answer_in_under_a_second_and_load_nothing_heavy(
    project: Path, arguments: tuple[str, ...]
) -> None:
    outcome = s2rl(*arguments, cwd=project)
    assert outcome.code == 0, outcome.err
    assert outcome.err.rstrip().splitlines()[-1] == "LOADED"
    assert outcome.cpu_s < 1.0


def test_dry_run_prints_a_configuration_that_loads_again_and_the_plan(project: Path) -> None:
    outcome = s2rl("train", "--config", "x.yaml", "algorithm.clip_high=0.28", "--dry-run", cwd=project)
    assert outcome.code == 0, outcome.err
    (project / "resolved.yaml").write_text(outcome.out)
    assert load_config(project / "resolved.yaml").algorithm.clip_high == 0.28
    for part in ("learner rank", "rollout worker", "8 groups x 8 completions = 64 samples", "MiB in all"):
        assert part in outcome.out
    assert not (project / "runs").exists()


def test_dry_run_of_a_run_that_cannot_start_here_says_so(project: Path) -> None:
    outcome = s2rl("train", "--config", "x.yaml", "device=npu", "--dry-run", cwd=project)
    assert outcome.code == 2
    assert "2 x npu" in outcome.out
    assert "error: device: the run needs 2 npu devices" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "--config", "none.yaml"), "error: none.yaml: no such file"),
        (("train", "--config", "x.yaml", "learner.lr=1"), "Did you mean learner.optimizer.lr?"),
        (("train", "--config", "x.yaml", "steps=many"), "steps: got 'many' (text), allowed: integer > 0"),
        (("train", "--config", "x.yaml", "algorithm.group_size=1"), "error: algorithm.group_size: 1"),
        (("train", "--config", "x.yaml", "model.path=nowhere"), "is not a folder"),
        (("train", "--config", "x.yaml", "data.train.0.path=none.jsonl"), "error: data.train.0.path: no such file"),
        (("train", "--config", "x.yaml", "device=cuda"), "error: device: the run needs 2 cuda devices"),
        (("train",), "Missing option '--config'"),
        (("train", "--config", "x.yaml", "--dryrun"), "No such option"),
        (("trian",), "No such command"),
        (("eval", "--data", "x"), "Missing option '--ckpt'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_answered_on_stderr_with_exit_code_2_before_anything_is_loaded(
    project: Path, arguments: tuple[str, ...], expected: str
) -> None:
    outcome = s2rl(*arguments, cwd=project)
    assert outcome.code == 2, outcome.err
    assert expected in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.rstrip().splitlines()[-1] == "LOADED"
    assert outcome.out == ""
    assert not (project / "runs").exists()


def test_a_message_with_square_brackets_is_not_taken_for_markup(project: Path) -> None:
    outcome = s2rl("train", "--config", "x.yaml", "rewards.functions.0.wieght=[red]", cwd=project)
    assert "rewards.functions[].weight? (override rewards.functions.0.wieght=[red])" in outcome.err


FAKE_TRAINER = """
import sys, types
import s2rl.errors as errors
trainer = types.ModuleType("s2rl.trainer")
class Trainer:
    def __init__(self, config): pass
    def fit(self): raise {error}
trainer.Trainer = Trainer
sys.modules["s2rl.trainer"] = trainer
"""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("errors.SyncError('worker 1: tensor x differs')", 1, "run failed: worker 1: tensor x differs"),
        ("errors.DataError('row 3 of a.jsonl has no answer')", 2, "error: row 3 of a.jsonl has no answer"),
        ("errors.Interrupted('stopped at step 4')", 130, "interrupted: stopped at step 4"),
        ("KeyboardInterrupt()", 130, ""),
    ],
)
def test_each_kind_of_end_has_its_exit_code_and_no_traceback(
    project: Path, error: str, code: int, message: str
) -> None:
    outcome = s2rl("train", "-c", "x.yaml", cwd=project, before=FAKE_TRAINER.format(error=error))
    assert outcome.code == code, outcome.err
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_a_bug_keeps_its_traceback(project: Path) -> None:
    outcome = s2rl("train", "-c", "x.yaml", cwd=project, before=FAKE_TRAINER.format(error="KeyError('x')"))
    assert outcome.code == 1
    assert "Traceback" in outcome.err and "KeyError" in outcome.err


def test_the_traceback_of_a_message_can_be_asked_for(project: Path) -> None:
    outcome = s2rl("train", "-c", "x.yaml", "steps=0", cwd=project, env={"S2RL_DEBUG": "1"})
    assert outcome.code != 0
    assert "Traceback" in outcome.err and "ConfigError" in outcome.err


FAKE_EVALUATE = """
import sys, types
evaluate = types.ModuleType("s2rl.evaluate")
def run_evaluation(**arguments):
    print({name: str(value) for name, value in arguments.items() if value is not None}, file=sys.stderr)
    return {"eval/accuracy": 0.8125, "eval/samples": 64}
evaluate.run_evaluation = run_evaluation
sys.modules["s2rl.evaluate"] = evaluate
"""


def test_eval_hands_its_options_on_and_prints_a_table(project: Path) -> None:
    outcome = s2rl(
        *("eval", "--ckpt", "c", "--data", "d", "--samples", "4", "--temperature", "0.6", "--max-new-tokens", "20"),
        *("--limit", "8", "--out", "o.jsonl", "rewards.processes=2"),
        cwd=project,
        before=FAKE_EVALUATE,
    )
    assert outcome.code == 0, outcome.err
    for part in ("'ckpt': 'c'", "'samples': '4'", "'temperature': '0.6'", "'limit': '8'", "rewards.processes=2"):
        assert part in outcome.err
    assert "eval/accuracy" in outcome.out and "0.8125" in outcome.out and "64" in outcome.out


def test_reward_functions_beside_the_configuration_can_be_imported(project: Path) -> None:
    (project / "my_rewards.py").write_text("value = 1\n")
    before = FAKE_TRAINER.format(error="errors.RunError(str(__import__('my_rewards').value))")
    outcome = s2rl("train", "-c", "x.yaml", cwd=project, before="import sys; sys.path.remove('')\n" + before)
    assert "run failed: 1" in outcome.err


def test_version_names_what_it_runs_on(project: Path) -> None:
    outcome = s2rl("version", cwd=project)
    assert "s2rl 0." in outcome.out and "torch " in outcome.out
