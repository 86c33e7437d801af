"""What only real processes can tell: faults that show while models are loaded or while the run goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e_runs import (
    Command,
    check_history,
    check_nothing_is_left,
    complete_checkpoints,
    mounted,
    settings,
    write_config,
)
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]


def refusal(command: Command) -> str:
    """The message of a run that ends with exit code 2."""
    ended = command.wait()
    assert ended.code == 2, ended.out + ended.err
    assert "Traceback" not in ended.err, ended.err
    check_nothing_is_left(command)
    (message,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    return message


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_not_finite_are_refused_by_tensor(
    example: Any, start: Any, tmp_path: Path, ranks: int
) -> None:
    shutil.copytree(example.model, tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name][-1, -1] = float("nan")  # in the last rank's rows
    save_file(tensors, file, metadata={"format": "pt"})
    values = settings(example, model={"path": str(tmp_path / "model")}, learner={"ranks": ranks})
    command = start(["train", "--config", str(write_config(tmp_path, values))], folder=tmp_path)
    message = refusal(command)
    assert f"{name} in {file} holds values that are not finite" in message
    assert not (tmp_path / "runs").exists()


def test_an_engine_argument_that_does_not_exist_is_refused(example: Any, start: Any, tmp_path: Path) -> None:
    config = write_config(tmp_path, settings(example, rollout={"engine_args": {"nonsense": 1}}))
    message = refusal(start(["train", "--config", str(config)], folder=tmp_path))
    assert "rollout.engine_args.nonsense" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(("what", "ranks"), [("runs/run/checkpoints", 2), ("runs", 1)])
def test_a_disk_that_fills_up_ends_the_run_at_its_last_checkpoint(
    example: Any, start: Any, tmp_path: Path, what: str, ranks: int
) -> None:
    """One checkpoint takes 1.5 MB: the disk holds one of them."""
    steps = 12
    config = write_config(
        tmp_path, settings(example, steps=steps, learner={"ranks": ranks}, checkpoint={"every": 4, "keep": 1})
    )
    run, folder = tmp_path / "runs" / "run", tmp_path / what
    folder.parent.mkdir(parents=True, exist_ok=True)
    with mounted(folder, "size=2600k") as disk:
        message = refusal(start(["train", "--config", str(config)], folder=tmp_path))
        assert "could not be written" in message and "(0 MiB free)" in message, message
        assert "run the same command again" in message
        assert complete_checkpoints(run) == [4]
        assert not list(run.glob("checkpoints/*.partial"))
        # It can be evaluated, and with more room the run goes on.
        evaluation = start(["eval", "--ckpt", str(run), "--data", str(example.heldout)], folder=tmp_path).wait()
        assert evaluation.code == 0, evaluation.err
        mounted.resize(disk, "64m")
        ended = start(["train", "--config", str(config)], folder=tmp_path).wait()
        assert ended.code == 0, ended.out + ended.err
        assert "resumed from" in ended.out
        check_history(run, steps=steps)


def test_numbers_of_processes_and_groups_that_divide_nothing_just_work(
    example: Any, start: Any, tmp_path: Path
) -> None:
    values = settings(
        example,
        steps=7,
        learner={"ranks": 3},
        rollout={"workers": 2, "max_num_seqs": 7},
        algorithm={"group_size": 5, "groups_per_step": 3, "updates_per_batch": 2},
        staleness={"max_staleness": 3},
        eval={"every": 3},
        checkpoint={"every": 2},
    )
    command = start(["train", "--config", str(write_config(tmp_path, values))], folder=tmp_path)
    ended = command.wait()
    assert ended.code == 0, ended.out + ended.err
    check_history(tmp_path / "runs" / "run", steps=7)
    # Fewer ranks and more workers go on with what three ranks wrote.
    overrides = ["steps=9", "learner.ranks=2", "rollout.workers=3"]
    command = start(["train", "--config", str(tmp_path / "run.yaml"), *overrides], folder=tmp_path)
    ended = command.wait()
    assert ended.code == 0, ended.out + ended.err
    check_history(tmp_path / "runs" / "run", steps=9)
    check_nothing_is_left(command)
