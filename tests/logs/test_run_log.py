"""What a run leaves on disk, and how it goes on after a resume."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from s2rl.config import RunConfig, load_config
from s2rl.errors import CheckpointError, ConfigError, StorageError
from s2rl.logs import METRICS, RunLog, read_lines
from s2rl.logs.docs import TARGET
from s2rl.logs.metrics import known, markdown
from s2rl.logs.writers import JsonLines
from s2rl.types import (
    Completion,
    Encoded,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Score,
)

MakeConfig = Callable[..., RunConfig]


def rows_of(config: RunConfig) -> list[dict]:
    """Rows of metrics.jsonl without the one number that every machine has its own of."""
    rows = read_lines(config.run_dir / "metrics.jsonl")
    assert all(row.pop("memory/controller_rss_mb") > 10 for row in rows)
    return rows


def make_group(prompt_id: str = "0-3") -> RolloutGroup:
    prompt = Prompt(prompt_id=prompt_id, row=3, epoch=0, messages=(Message(role="user", content="1+1=ß"),), answer="2")
    rollouts = tuple(
        Rollout(
            completion=Completion(
                group_id=prompt_id,
                index=i,
                token_ids=np.arange(i, dtype=np.int32),
                logprobs=np.zeros(i, np.float32),
                versions=np.arange(4, 4 + i, dtype=np.int32),
                finish_reason=FinishReason.STOP,
                text=f"text {i}",
            ),
            score=Score(total=float(i), parts={"format": float("nan")}),
            status=RolloutStatus.SCORED,
        )
        for i in range(3)
    )
    encoded = Encoded(prompt=prompt, token_ids=(1, 2))
    return RolloutGroup(group_id=prompt_id, encoded=encoded, rollouts_G=rollouts, worker=1, taken_version=4)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_a_step_is_on_disk_as_soon_as_it_is_logged(make_config: MakeConfig) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    log.step({"step": 1, "version": np.int64(1), "reward/mean": np.float32(0.5), "sync/verified": True})
    assert rows_of(config) == [{"step": 1, "version": 1, "reward/mean": 0.5, "sync/verified": True}]
    log.close()


def test_numbers_that_do_not_exist_are_null_so_that_the_file_is_json(make_config: MakeConfig) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    log.step({"step": 1, "loss/total": float("nan"), "optim/grad_norm": np.float32("inf"), "reward/mean": None})
    log.close()
    json.loads((config.run_dir / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert rows_of(config) == [{"step": 1, "loss/total": None, "optim/grad_norm": None, "reward/mean": None}]


def test_every_group_is_written_with_its_texts_scores_versions_and_fate(make_config: MakeConfig) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    log.group(make_group(), fate="trained", step=5)
    log.dropped(make_group("0-4").encoded.prompt, reason="overlong", step=6)
    log.close()
    trained, dropped = read_lines(config.run_dir / "rollouts.jsonl")
    assert (trained["fate"], trained["step"], trained["group_id"], trained["prompt_id"]) == ("trained", 5, "0-3", "0-3")
    assert trained["prompt"] == [{"role": "user", "content": "1+1=ß"}]
    assert [r["text"] for r in trained["rollouts"]] == ["text 0", "text 1", "text 2"]
    assert [r["score"] for r in trained["rollouts"]] == [0, 1, 2]
    assert [(r["version_min"], r["version_max"]) for r in trained["rollouts"]] == [(None, None), (4, 4), (4, 5)]
    assert trained["rollouts"][2]["parts"] == {"format": None}
    assert (dropped["fate"], dropped["rollouts"]) == ("dropped:overlong", [])


def test_a_resumed_run_continues_where_its_checkpoint_was(make_config: MakeConfig) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    log.restore(0)
    for step in (1, 2):
        log.group(make_group(f"0-{step}"), fate="trained", step=step)
        log.step({"step": step, "reward/mean": 0.1 * step})
    checkpoint = log.rollouts_position
    log.group(make_group("0-3"), fate="trained", step=3)
    log.step({"step": 3, "reward/mean": 0.9})
    log.close()

    log = RunLog(config, console=quiet())
    log.restore(2, rollouts=checkpoint)
    log.group(make_group("0-3"), fate="trained", step=3)
    log.step({"step": 3, "reward/mean": 0.3})
    log.close()
    assert [(r["step"], r["reward/mean"]) for r in read_lines(config.run_dir / "metrics.jsonl")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
    ]
    assert [r["group_id"] for r in read_lines(config.run_dir / "rollouts.jsonl")] == ["0-1", "0-2", "0-3"]
    assert tensorboard_scalars(config.run_dir / "tensorboard", "reward/mean") == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.3)),
    ]


def test_a_run_killed_before_its_first_checkpoint_starts_clean(make_config: MakeConfig) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    log.step({"step": 1, "reward/mean": 0.9})
    log.close()
    log = RunLog(config, console=quiet())
    log.restore(-1)
    log.step({"step": 1, "reward/mean": 0.1})
    log.close()
    assert [r["reward/mean"] for r in read_lines(config.run_dir / "metrics.jsonl")] == [0.1]
    assert tensorboard_scalars(config.run_dir / "tensorboard", "reward/mean") == [(1, pytest.approx(0.1))]


def test_a_line_that_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    lines = JsonLines(file)
    lines.append({"step": 2})
    lines.close()
    assert read_lines(file) == [{"step": 1}, {"step": 2}]


def test_an_unfinished_line_longer_than_a_block_is_cut_off_too(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"step": 1}\n' + b"x" * 200_000)
    JsonLines(file).close()
    assert file.read_bytes() == b'{"step": 1}\n'
    file.write_bytes(b"x" * 200_000)
    JsonLines(file).close()
    assert file.read_bytes() == b""


def test_a_file_with_foreign_lines_is_refused_and_left_as_it_is(make_config: MakeConfig) -> None:
    config = make_config()
    one_step(config)
    file = config.run_dir / "metrics.jsonl"
    file.write_text('{"step": 1}\nhello\n')
    log = RunLog(config, console=quiet())
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2: not a record"):
        log.restore(1)
    assert file.read_text() == '{"step": 1}\nhello\n'
    log.close("failed")


def test_a_full_disk_ends_the_run_with_the_file_and_without_half_a_line(tmp_path: Path) -> None:
    limited = textwrap.dedent(
        f"""
        import resource, signal
        from pathlib import Path
        from s2rl.errors import StorageError
        from s2rl.logs.writers import JsonLines
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        lines = JsonLines(Path({str(tmp_path / "x.jsonl")!r}))
        lines.append({{"step": 1}})
        try:
            lines.append({{"text": "x" * 200}})
        except StorageError as error:
            assert "x.jsonl cannot be written" in str(error), error
        else:
            raise SystemExit("no error")
        """
    )
    subprocess.run([sys.executable, "-c", limited], check=True, timeout=60)
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"step": 1}\n'


# ---- run folder ----------------------------------------------------------------------------------------------------


def test_the_run_folder_holds_the_resolved_configuration_and_the_versions(make_config: MakeConfig) -> None:
    config = make_config("algorithm.clip_high=0.28")
    RunLog(config, console=quiet()).close()
    assert load_config(config.run_dir / "config.yaml") == config
    versions = json.loads((config.run_dir / "versions.json").read_text())
    assert versions["packages"]["numpy"] == np.__version__
    assert versions["python"] == sys.version.split()[0]
    assert set(versions["commit"]) == {"s2rl", "working_directory"}


def one_step(config: RunConfig) -> None:
    log = RunLog(config, console=quiet())
    log.step({"step": 1})
    log.close()


def test_a_run_folder_of_another_configuration_is_refused_with_the_values_that_differ(make_config: MakeConfig) -> None:
    config = make_config()
    one_step(config)
    before = (config.run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"(?s)algorithm\.group_size: 8 in the run folder, 4 now.*name=t-2"):
        RunLog(make_config("algorithm.group_size=4"), console=quiet())
    assert (config.run_dir / "config.yaml").read_text() == before


def test_a_run_folder_in_which_nothing_was_trained_may_be_taken(make_config: MakeConfig) -> None:
    RunLog(make_config(), console=quiet()).close()
    RunLog(make_config("algorithm.group_size=4"), console=quiet()).close()


def test_resume_never_refuses_a_folder_that_holds_a_run(make_config: MakeConfig) -> None:
    one_step(make_config())
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: never"):
        RunLog(make_config("checkpoint.resume=never"), console=quiet())


def test_a_longer_run_may_go_on_in_the_same_folder(make_config: MakeConfig) -> None:
    one_step(make_config())
    one_step(make_config("steps=20", "rollout.workers=2"))


def test_a_damaged_config_of_a_run_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    one_step(config)
    (config.run_dir / "config.yaml").write_text("[")
    with pytest.raises(ConfigError, match="missing or damaged"):
        RunLog(config, console=quiet())


def test_two_processes_cannot_share_a_run_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    log = RunLog(config, console=quiet())
    attempt = textwrap.dedent(
        f"""
        from pathlib import Path
        from s2rl.config import load_config
        from s2rl.errors import ConfigError
        from s2rl.logs import RunFolder
        config = load_config({str(config.run_dir / "config.yaml")!r})
        try:
            RunFolder(config.run_dir).open(config)
        except ConfigError as error:
            assert "is in use by process {os.getpid()}" in str(error), error
        else:
            raise SystemExit("opened")
        """
    )
    subprocess.run([sys.executable, "-c", attempt], check=True, timeout=60)
    log.close()
    result = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, timeout=60)
    assert "opened" in result.stderr


def test_a_folder_that_cannot_be_made_is_for_the_user_to_mend(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        RunLog(make_config(), console=quiet())


# ---- Python's log --------------------------------------------------------------------------------------------------


def test_the_log_goes_to_run_log_and_only_warnings_to_the_terminal(make_config: MakeConfig) -> None:
    console = quiet()
    config = make_config()
    log = RunLog(config, console=console)
    logging.getLogger("s2rl.x").info("for the file")
    logging.getLogger("other").info("for nobody")
    logging.getLogger("s2rl.x").warning("for both")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("python's own", stacklevel=1)
    log.event("worker 1 was replaced")
    log.close("failed")
    logging.getLogger("s2rl.x").warning("after the end")
    written, shown = (config.run_dir / "run.log").read_text(), console.file.getvalue()  # type: ignore[attr-defined]
    assert "for the file" in written and "for the file" not in shown
    assert "for nobody" not in written
    for text in ("for both", "python's own", "worker 1 was replaced"):
        assert text in written and text in shown
    assert shown.count("worker 1 was replaced") == 1
    assert "after the end" not in written


def test_thousands_of_dropped_prompts_do_not_flood_the_terminal(make_config: MakeConfig) -> None:
    console = quiet()
    config = make_config()
    log = RunLog(config, console=console)
    prompt = make_group().encoded.prompt
    for index in range(5):
        log.dropped(prompt, reason=f"overlong: {1000 + index} tokens", step=1)
    log.dropped(prompt, reason="failed: the engine refused it", step=1)
    log.close("failed")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("overlong") == 1 and shown.count("the engine refused it") == 1
    assert (config.run_dir / "run.log").read_text().count("overlong") == 5
    assert len(read_lines(config.run_dir / "rollouts.jsonl")) == 6


# ---- metrics -------------------------------------------------------------------------------------------------------

PROMISED = """step version reward/mean reward/std eval/accuracy loss/total policy/kl_rollout policy/clip_fraction
    policy/entropy policy/logprob_diff_mean policy/logprob_diff_max staleness/max staleness/mean queue/waiting
    queue/in_flight queue/finished queue/trained queue/dropped time/step_s time/learner_idle_s time/rollout_idle_s
    throughput/train_tokens_per_s throughput/rollout_tokens_per_s sync/seconds sync/bytes sync/verified
    memory/learner_rss_mb optim/lr optim/grad_norm batch/padding_fraction"""


def test_the_promised_names_exist_and_the_reference_is_current() -> None:
    assert all(known(name) for name in PROMISED.split())
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert known("reward/part/format") and not known("reward/part") and not known("loss/unknown")
    assert TARGET.read_text(encoding="utf-8") == markdown(), "run `python -m s2rl.logs.docs`"


# ---- wandb ---------------------------------------------------------------------------------------------------------

FAKE_WANDB = """
calls = []
class Run:
    def __init__(self, id): self.id = id or "abc"
    def log(self, values, step): calls.append((step, values))
    def finish(self): calls.append("finish")
def init(**arguments):
    calls.append(arguments)
    return Run(arguments["id"])
"""


def test_wandb_gets_the_rows_and_a_resumed_run_the_same_id(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = make_config("logging.wandb_project=p", "logging.tensorboard=false")
    log = RunLog(config, console=quiet())
    log.step({"step": 1, "reward/mean": 0.5, "loss/total": float("nan")})
    log.close()
    RunLog(config, console=quiet()).close()
    import wandb

    first, row, end, second = wandb.calls[:4]
    assert (first["project"], first["name"], first["id"]) == ("p", "t", None)
    assert row[0] == 1 and row[1] | {"memory/controller_rss_mb": 0} == {
        "step": 1,
        "reward/mean": 0.5,
        "memory/controller_rss_mb": 0,
    }
    assert end == "finish"
    assert second["id"] == "abc"


def test_a_sink_that_fails_at_the_end_does_not_hide_the_outcome(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB.replace('calls.append("finish")', "raise OSError('offline')"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    console = quiet()
    log = RunLog(make_config("logging.wandb_project=p"), console=console)
    log.step({"step": 1, "reward/mean": 0.5})
    log.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "WandbSink could not be closed: offline" in shown and "Try next:" in shown


def test_nothing_of_the_log_imports_torch(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        import s2rl.logs
        from s2rl.logs.sinks import TensorBoardSink
        from s2rl.logs.curve import draw_curve
        sink = TensorBoardSink(Path({str(tmp_path)!r}))
        sink.log(1, {{"a": 1.0}})
        sink.close()
        (Path({str(tmp_path)!r}) / "m.jsonl").write_text('{{"step": 1, "reward/mean": 1}}\\n')
        draw_curve(metrics=Path({str(tmp_path)!r}) / "m.jsonl", target=Path({str(tmp_path)!r}) / "c.png", title="t")
        heavy = {{"torch", "ray", "vllm", "tensorflow", "matplotlib.pyplot"}} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def names_in_source() -> set[str]:
    """Every string in the package that has the shape of a metric's name."""
    package = Path(__file__).resolve().parents[2] / "s2rl"
    groups = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
    shape = re.compile(rf"(?:{'|'.join(groups)})/[a-z_]+(?:/[a-z_]*)?")
    return {
        node.value
        for file in package.rglob("*.py")
        if file.name != "metrics.py" or file.parent.name != "logs"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and shape.fullmatch(node.value)
    }


def test_every_metric_in_the_source_is_documented() -> None:
    undocumented = sorted(name for name in names_in_source() if not known(name))
    assert not undocumented


def test_every_documented_metric_exists_in_the_source() -> None:
    source = names_in_source()
    invented = [m.name for m in METRICS if "/" in m.name and m.name.removesuffix("*") not in source]
    assert not invented
