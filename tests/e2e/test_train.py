"""Training end to end: real engines, real learners, real Ray, and a model that must learn."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_extensions import CORRUPTED
from e2e_runs import (
    HERE,
    Command,
    Ended,
    check_history,
    check_nothing_is_left,
    complete_checkpoints,
    last_step,
    rows,
    settings,
    write_config,
)

from s2rl.config import load_config

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

STEPS, MORE_STEPS = 36, 42


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished command and its run folder."""

    folder: Path
    config: Path
    run: Path
    command: Command
    ended: Ended
    rows: list[dict[str, Any]]
    """Of metrics.jsonl, at the end of the command."""


# ---- one asynchronous run on two learner ranks: trained, resumed, evaluated ------------------------------------------


@pytest.fixture(scope="module")
def trained(example: Any, start_in_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("async")
    config = write_config(
        folder, settings(example, steps=STEPS, learner={"ranks": 2}, eval={"every": 12}, checkpoint={"every": 12})
    )
    return _train(start_in_module, folder, config)


@pytest.fixture(scope="module")
def resumed(trained: Trained, start_in_module: Any) -> Trained:
    return _train(start_in_module, trained.folder, trained.config, f"steps={MORE_STEPS}")


def _train(start: Any, folder: Path, config: Path, *overrides: str) -> Trained:
    command = start(["train", "--config", str(config), *overrides], folder=folder)
    ended = command.wait()
    assert ended.code == 0, ended.out + ended.err
    run = folder / "runs" / "run"
    check_history(run, steps=load_config(config, overrides).steps)
    return Trained(folder=folder, config=config, run=run, command=command, ended=ended, rows=rows(run))


def test_the_model_learns(trained: Trained) -> None:
    accuracies = [row["eval/accuracy"] for row in trained.rows if "eval/accuracy" in row]
    assert len(accuracies) == 1 + STEPS // 12
    # The warm-started model begins below 0.4; what it can reach with its size is about 0.85.
    assert accuracies[0] < 0.5
    assert accuracies[-1] > 0.7 and accuracies[-1] > accuracies[0] + 0.25, accuracies
    assert all(row["eval/version"] == row["version"] for row in trained.rows if "eval/accuracy" in row)


def test_it_really_is_asynchronous_within_the_bound(trained: Trained) -> None:
    worst = [row["staleness/max"] for row in trained.rows if row["step"] > 0]
    assert max(worst) <= 2
    assert max(worst) > 0
    assert trained.rows[1]["staleness/max"] == 0


def test_every_step_has_its_row_and_every_sync_its_proof(trained: Trained) -> None:
    assert [row["step"] for row in trained.rows] == list(range(STEPS + 1))
    assert all(row["sync/verified"] is True for row in trained.rows if row["step"] > 0)


def test_engine_and_learner_agree_on_the_log_probabilities_of_fresh_tokens(trained: Trained) -> None:
    fresh = [v for row in trained.rows if (v := row.get("policy/logprob_diff_mean_fresh")) is not None]
    assert fresh and max(fresh) < 1e-4
    # Staler tokens were sampled by another policy, and the metric shows it.
    assert max(row.get("policy/logprob_diff_mean") or 0.0 for row in trained.rows) > 10 * max(fresh)


def test_the_run_folder_holds_what_it_promises(trained: Trained) -> None:
    run = trained.run
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").glob("events.out.tfevents.*"))
    assert "max_staleness: 2" in (run / "config.yaml").read_text()
    assert json.loads((run / "versions.json").read_text())["packages"]["torch"]
    names = {"step", "version", "reward/mean", "reward/std", "loss/total", "policy/kl_rollout", "policy/clip_fraction"}
    names |= {"policy/entropy", "policy/logprob_diff_mean", "policy/logprob_diff_max", "staleness/max", "time/step_s"}
    names |= {"staleness/mean", "time/learner_idle_s", "time/rollout_idle_s", "throughput/train_tokens_per_s"}
    names |= {"throughput/rollout_tokens_per_s", "sync/seconds", "sync/bytes", "sync/verified", "optim/lr"}
    names |= {"memory/learner_rss_mb", "optim/grad_norm", "batch/padding_fraction"}
    assert names <= {name for row in trained.rows for name in row}
    assert "Try next:" in trained.ended.out
    assert "Traceback" not in trained.ended.err and "Warning" not in trained.ended.err, trained.ended.err


def test_the_same_command_with_more_steps_goes_on_where_the_run_ended(resumed: Trained, trained: Trained) -> None:
    assert resumed.rows[: STEPS + 1] == trained.rows
    assert "resumed from" in resumed.ended.out
    assert complete_checkpoints(resumed.run) == [STEPS, MORE_STEPS]


def test_evaluating_the_checkpoint_gives_the_accuracy_of_the_run(resumed: Trained, start: Any, example: Any) -> None:
    command = start(["eval", "--ckpt", str(resumed.run), "--data", str(example.heldout)], folder=resumed.folder)
    ended = command.wait()
    assert ended.code == 0, ended.out + ended.err
    found = re.search(r"eval/accuracy\s+([0-9.]+)", ended.out)
    assert found is not None, ended.out
    assert float(found[1]) == pytest.approx(resumed.rows[-1]["eval/accuracy"], abs=5e-5)
    check_nothing_is_left(command)


def test_evaluating_the_model_folder_gives_the_accuracy_before_the_first_step(
    trained: Trained, start: Any, example: Any, tmp_path: Path
) -> None:
    samples = tmp_path / "samples.jsonl"
    flags = ["--ckpt", str(example.model), "--config", str(trained.run / "config.yaml"), "--out", str(samples)]
    ended = start(["eval", *flags, "--data", str(example.heldout)], folder=trained.folder).wait()
    assert ended.code == 0, ended.out + ended.err
    found = re.search(r"eval/accuracy\s+([0-9.]+)", ended.out)
    assert found is not None, ended.out
    before = next(row for row in trained.rows if row["step"] == 0)
    assert float(found[1]) == pytest.approx(before["eval/accuracy"], abs=5e-5)
    assert len(samples.read_text().splitlines()) == before["eval/samples"]


def test_the_exported_model_has_the_format_of_its_source_and_the_accuracy_of_the_run(
    resumed: Trained, start: Any, example: Any, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    ended = start(["export", "--ckpt", str(resumed.run), "--out", str(out)], folder=resumed.folder).wait()
    assert ended.code == 0, ended.out + ended.err
    against = ["--source", str(example.model), "--ckpt", str(resumed.run)]
    checked = start(["verify", str(out), *against, "--json", str(tmp_path / "report.json")], folder=tmp_path).wait()
    assert checked.code == 0, checked.out + checked.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["broken"] and {t["finding"] for t in report["tensors"]} == {"trained"}
    flags = ["--ckpt", str(out), "--config", str(resumed.run / "config.yaml"), "--data", str(example.heldout)]
    evaluated = start(["eval", *flags], folder=resumed.folder).wait()
    assert evaluated.code == 0, evaluated.out + evaluated.err
    found = re.search(r"eval/accuracy\s+([0-9.]+)", evaluated.out)
    assert found is not None, evaluated.out
    assert float(found[1]) == pytest.approx(resumed.rows[-1]["eval/accuracy"], abs=5e-5)
    (out / "config.json").write_text("{}")
    assert start(["verify", str(out), "--source", str(example.model)], folder=tmp_path).wait().code == 1


def test_nothing_of_a_finished_run_is_left(resumed: Trained, trained: Trained) -> None:
    for run in (trained, resumed):
        check_nothing_is_left(run.command)


# ---- strictly on-policy ---------------------------------------------------------------------------------------------


def test_without_staleness_every_token_is_of_the_policy_that_it_trains(
    example: Any, start: Any, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, settings(example, steps=5, staleness={"max_staleness": 0}, eval={"data": []}, checkpoint={"every": 5})
    )
    run = _train(start, tmp_path, config)
    for row in run.rows:
        assert row["staleness/max"] == 0
        assert row["policy/logprob_diff_mean"] < 1e-4
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["policy/importance_mean"] == pytest.approx(1.0, abs=1e-4)


# ---- weights that are wrong after a sync -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(
    example: Any, start_in_module: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Command]]:
    """Runs with faulty worker extensions, side by side."""
    commands = {}
    for name in ("CorruptingExtension", "ForgetfulExtension"):
        folder = tmp_path_factory.mktemp(name)
        # A large step, so that weights of the step before are far from those after it.
        values = settings(example, steps=5, eval={"data": []}, learner={"optimizer": {"lr": 1e-3}})
        config = write_config(folder, values)
        script = HERE / "train_with_extension.py"
        commands[name] = (folder, start_in_module([name, str(config)], folder=folder, script=script))
    return commands


def test_a_tensor_that_changed_on_its_way_ends_the_run_by_its_name(faulty: dict[str, tuple[Path, Command]]) -> None:
    folder, command = faulty["CorruptingExtension"]
    ended = command.wait()
    assert ended.code == 1, ended.out + ended.err
    assert CORRUPTED in ended.err and "version 2" in ended.err, ended.err
    assert last_step(folder / "runs" / "run") == 1, "nothing may be trained after a sync that failed"
    check_nothing_is_left(command)


def test_weights_that_were_not_processed_after_the_load_end_the_run_by_the_probe(
    faulty: dict[str, tuple[Path, Command]],
) -> None:
    folder, command = faulty["ForgetfulExtension"]
    ended = command.wait()
    assert ended.code == 1, ended.out + ended.err
    assert "probe" in ended.err and "version 1" in ended.err, ended.err
    assert last_step(folder / "runs" / "run") <= 0
    check_nothing_is_left(command)
