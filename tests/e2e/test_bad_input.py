"""Input that cannot work, through the real command line: a message with the remedy, exit code 2, nothing left behind.

What the configuration alone can tell is tested with the configuration and the command line. Here the command runs in a
forked process, in which everything is imported already, so that each case takes a fraction of a second.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - imported before the forks
import pytest
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - as above
from e2e_runs import mounted, settings, write_config
from e2e_simulated import in_child, train_simulated
from safetensors.torch import load_file, save_file

import s2rl.evaluate  # noqa: F401 - as above
from s2rl.cli import main
from s2rl.config import load_config


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a model, data and a configuration that work."""

    folder: Path
    model: Path
    train: Path
    heldout: Path
    run: Path

    def s2rl(self, *arguments: str) -> Answer:
        """Run the command line in a forked process, in this folder, but not as far as starting processes."""
        out, err = self.folder / "out.txt", self.folder / "err.txt"

        def work() -> None:
            os.chdir(self.folder)
            for target, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ |= {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
            sys.argv = ["s2rl", *arguments]
            sys.addaudithook(_refuse_ray)
            try:
                main()
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)

        code = in_child(work)
        return Answer(code=code, out=out.read_text(), err=err.read_text())

    def refusal(self, *overrides: str) -> str:
        """The one message of a training run that is refused, which leaves no run folder behind."""
        answer = self.s2rl("train", "--config", "run.yaml", *overrides)
        return self._message(answer, allowed=False)

    def refusal_to_resume(self, *overrides: str) -> str:
        """The same for a run folder that exists."""
        before = _contents(self.run)
        answer = self.s2rl("train", "--config", "run.yaml", *overrides)
        message = self._message(answer, allowed=True)
        assert _contents(self.run) == before, "what the run folder held has changed"
        return message

    def _message(self, answer: Answer, *, allowed: bool) -> str:
        assert answer.code == 2, answer.out + answer.err
        assert "Traceback" not in answer.err, answer.err
        assert allowed or not (self.folder / "runs").exists()
        messages = [line for line in answer.err.splitlines() if line.startswith("error: ")]
        assert len(messages) == 1, answer.err
        return messages[0].removeprefix("error: ")


def _refuse_ray(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import" and arguments[0] == "vllm":
        os.write(2, b"vllm is imported\n")
        os._exit(99)
    if event == "subprocess.Popen" and "raylet" in str(arguments[1]):
        os.write(2, b"processes of Ray are started\n")
        os._exit(98)


def _contents(folder: Path) -> dict[str, bytes]:
    """What a run folder holds, but for the logs of the attempt."""
    ignored = {"run.log", "curve.png", ".lock", "config.yaml", "versions.json"}
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in ignored and "tensorboard" not in file.parts
    }


@pytest.fixture
def project(example: Any, tmp_path: Path) -> Project:
    shutil.copytree(example.model.parent, tmp_path, dirs_exist_ok=True)
    project = Project(
        folder=tmp_path,
        model=tmp_path / "model",
        train=tmp_path / "train.jsonl",
        heldout=tmp_path / "heldout.jsonl",
        run=tmp_path / "runs" / "run",
    )
    write_config(tmp_path, settings(project, steps=6, checkpoint={"every": 2}))
    return project


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys; None removes them."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_weights(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def write_rows(file: Path, *rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


GOOD = {"prompt": [{"role": "user", "content": "1234"}], "reward_model": {"ground_truth": "1234"}}
NO_ANSWER = {"prompt": GOOD["prompt"], "reward_model": {}}


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["train", "heldout"])
def test_data_without_rows_or_answers_is_refused_by_file_and_line(project: Project, which: str) -> None:
    file = getattr(project, which)
    file.write_text("\n \n")
    assert f"{file}: the data set is empty" in project.refusal()
    write_rows(file, GOOD, NO_ANSWER)
    message = project.refusal()
    assert f"{file}, line 2: row without answer" in message and "data.columns.answer" in message


def test_chat_messages_without_a_chat_template_are_refused(project: Project) -> None:
    (project.model / "chat_template.jinja").unlink()
    message = project.refusal()
    assert f"{project.train}, line 1" in message and "no chat template" in message and "model.tokenizer" in message


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_prompts_that_are_all_over_their_budget_are_refused(project: Project, overlong: str) -> None:
    message = project.refusal("data.max_prompt_tokens=4", f"data.overlong={overlong}")
    assert "data.max_prompt_tokens" in message and "aise the budget" in message


def test_held_out_prompts_over_their_budget_are_refused(project: Project) -> None:
    write_rows(project.heldout, GOOD | {"prompt": [{"role": "user", "content": "1234567890"}]})
    assert "eval.data: every prompt is over data.max_prompt_tokens=8" in project.refusal("data.max_prompt_tokens=8")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("rewards.functions.0.function=nowhere.rewards:score", "No module named 'nowhere'"),
        ("rewards.functions.0.function=json:score", "has no 'score'"),
        ("rewards.functions.0.function=exact_mach", "Did you mean 'exact_match'?"),
        ("rewards.functions.0.args={caseless: true}", "unexpected keyword argument 'caseless'"),
        ("rewards.functions.0.data_sources=[gsm8k]", "no reward function applies to data source 'sort_digits'"),
    ],
)
def test_reward_functions_that_cannot_be_used_are_refused(project: Project, change: str, expected: str) -> None:
    message = project.refusal(change)
    assert "rewards.functions" in message and expected in message


# ---- the model -------------------------------------------------------------------------------------------------------


def test_an_architecture_that_cannot_be_trained_is_refused_with_those_that_can(project: Project) -> None:
    for architecture, model_type in (("GPT2LMHeadModel", "gpt2"), ("FooForCausalLM", "foo")):
        edit_json(project.model / "config.json", architectures=[architecture], model_type=model_type)
        message = project.refusal()
        assert f"architecture {architecture} is not known; known are LlamaForCausalLM" in message


def test_weights_that_do_not_make_up_the_model_are_refused_by_tensor(project: Project) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(project.model / "model.safetensors", lambda tensors: tensors.pop(name))
    message = project.refusal()
    assert "model.path" in message and "lacks 1 of the model's tensors" in message and name in message
    edit_json(project.model / "config.json", intermediate_size=224)
    edit_weights(project.model / "model.safetensors", lambda tensors: tensors.update({name: _zeros(192, 64)}))
    assert "has shape [192, 64]" in project.refusal()


def _zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(*shape)


def test_weights_that_are_cut_short_are_refused(project: Project) -> None:
    os.truncate(project.model / "model.safetensors", 5000)
    message = project.refusal()
    assert "model.safetensors is damaged: 5000 bytes" in message


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(project: Project) -> None:
    name = "model.embed_tokens.weight"
    edit_json(project.model / "config.json", vocab_size=256)
    edit_weights(
        project.model / "model.safetensors", lambda tensors: tensors.update({name: tensors[name][:256].clone()})
    )
    message = project.refusal()
    assert "model.path: the tokenizer" in message and "has 256 embedding rows" in message


def test_a_damaged_tokenizer_is_refused(project: Project) -> None:
    (project.model / "tokenizer.json").write_text("{}")
    assert f"the tokenizer in {project.model} cannot be loaded" in project.refusal()


def test_a_module_class_that_the_model_has_not_is_refused(project: Project) -> None:
    message = project.refusal("learner.wrap_classes=[GptBlock]")
    assert (
        "learner.wrap_classes: the model has no module of class 'GptBlock'" in message
        and "Qwen3DecoderLayer" in message
    )


# ---- the cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "127.0.0.1", "127.0.0.1:99999999"])
def test_a_cluster_that_does_not_answer_is_refused_at_once(project: Project, address: str) -> None:
    message = project.refusal(f"cluster.address={address}")
    assert f"cluster.address={address!r}: no Ray cluster answers there" in message and "ray start --head" in message


# ---- run folders and checkpoints -------------------------------------------------------------------------------------


@pytest.fixture
def used(project: Project) -> Project:
    """A project whose run folder holds a finished run with checkpoints."""
    config = load_config(project.folder / "run.yaml", base_dir=project.folder)
    assert in_child(lambda: train_simulated(config)) == 0
    return project


def test_the_run_folder_of_another_configuration_is_refused_with_what_differs(used: Project) -> None:
    message = used.refusal_to_resume("algorithm.group_size=4", "steps=9")
    assert "belongs to another configuration" in message
    answer = used.s2rl("train", "--config", "run.yaml", "algorithm.group_size=4")
    assert "algorithm.group_size: 8 in the run folder, 4 now" in answer.err and "name=run-2" in answer.err


def test_a_run_folder_that_must_not_be_resumed_is_refused(used: Project) -> None:
    assert "checkpoint.resume: never, but" in used.refusal_to_resume("checkpoint.resume=never")


def test_a_run_folder_in_use_is_refused(used: Project) -> None:
    with (used.run / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        assert f"is in use by process {os.getpid()}" in used.refusal_to_resume("steps=9")


def _last(project: Project) -> Path:
    return max(project.run.glob("checkpoints/step_*"))


def _damage(kind: str) -> Callable[[Project], Path]:
    def flip(project: Project) -> Path:
        file = _last(project) / "outstanding.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 4
        file.write_bytes(content)
        return file

    def cut(project: Project) -> Path:
        file = _last(project) / "learner" / "history"
        os.truncate(file, file.stat().st_size - 1)
        return file

    def remove(project: Project) -> Path:
        file = _last(project) / "trainer.json"
        file.unlink()
        return file

    def remove_manifest(project: Project) -> Path:
        file = _last(project) / "manifest.json"
        file.unlink()
        return file

    def edit_manifest(project: Project) -> Path:
        file = _last(project) / "manifest.json"
        file.write_text(file.read_text().replace("step", "stop"))
        return file

    def empty_marker(project: Project) -> Path:
        (_last(project) / "COMPLETE").write_text("")
        return _last(project) / "manifest.json"

    return locals()[kind]


@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "remove_manifest", "edit_manifest", "empty_marker"])
def test_a_corrupt_checkpoint_is_refused_by_its_file_and_the_one_before_can_be_used(used: Project, kind: str) -> None:
    file = _damage(kind)(used)
    message = used.refusal_to_resume("steps=9")
    assert f"{file} is damaged" in message and "Remove this checkpoint folder to go on from the one before" in message
    answer = used.s2rl("eval", "--ckpt", str(used.run), "--data", str(used.heldout))
    assert answer.code == 2 and f"{file} is damaged" in answer.err
    # What the message says works: nothing else is in the way of the run.
    last = _last(used)
    shutil.rmtree(last)
    answer = used.s2rl("train", "--config", "run.yaml", "steps=9")
    assert answer.code == 98, answer.err  # it got as far as starting processes


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_runs_folder_that_cannot_be_written_is_refused(project: Project) -> None:
    with mounted(project.folder / "locked", "ro") as locked:
        answer = project.s2rl("train", "--config", "run.yaml", f"runs_dir={locked}/runs")
    assert answer.code == 2 and f"runs_dir: {locked} may not be written to" in answer.err, answer.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_full_already_is_refused(project: Project) -> None:
    with mounted(project.folder / "full", "size=64k") as full:
        with (full / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(b"x" * 4096)
        answer = project.s2rl("train", "--config", "run.yaml", f"runs_dir={full}/runs")
        assert answer.code == 2 and "runs_dir: the run folder" in answer.err and "No space left" in answer.err, (
            answer.err
        )
        assert not (full / "runs").exists()


# ---- eval ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_evaluated_is_refused(used: Project) -> None:
    heldout, last = str(used.heldout), _last(used)

    def refusal(*arguments: str) -> str:
        answer = used.s2rl("eval", *arguments)
        assert answer.code == 2 and "Traceback" not in answer.err, answer.err
        return answer.err

    assert "nowhere: no such folder" in refusal("--ckpt", "nowhere", "--data", heldout)
    assert "--data none.jsonl: no such file" in refusal("--ckpt", "runs/run", "--data", "none.jsonl")
    assert "Give --config" in refusal("--ckpt", "model", "--data", heldout)
    assert "make it first" in refusal("--ckpt", "runs/run", "--data", heldout, "--out", "none/out.jsonl")
    write_rows(used.heldout, GOOD, NO_ANSWER)
    assert "line 2: row without answer" in refusal("--ckpt", "runs/run", "--data", heldout)
    (last / "COMPLETE").unlink()
    assert "is not complete" in refusal("--ckpt", str(last), "--data", heldout)
    shutil.rmtree(used.run / "checkpoints")
    assert "Give --config" in refusal("--ckpt", "runs/run", "--data", heldout)
