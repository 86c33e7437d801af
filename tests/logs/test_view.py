"""What the person at the terminal sees."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from s2rl.config import RunConfig
from s2rl.logs import RunLog
from s2rl.logs.closing import Closing, closing_lines, next_commands
from s2rl.logs.curve import draw_curve
from s2rl.logs.view import ViewState, clock, render, sparkline, step_line

MakeConfig = Callable[..., RunConfig]

ROW = {
    "step": 3,
    "version": 3,
    "reward/mean": 0.5,
    "eval/accuracy": 0.75,
    "eval/version": 3,
    "staleness/max": 1,
    "staleness/mean": 0.25,
    "queue/waiting": 2,
    "queue/in_flight": 8,
    "queue/finished": 4,
    "queue/trained": 24,
    "queue/dropped": 1,
    "time/step_s": 10.0,
    "time/learner_idle_s": 1.0,
    "time/rollout_idle_s": 2.5,
    "throughput/train_tokens_per_s": 900.0,
    "throughput/rollout_tokens_per_s": 1234.0,
    "sync/seconds": 0.5,
    "sync/bytes": 2**20,
    "sync/verified": True,
}


def make_state() -> ViewState:
    return ViewState(name="t", total_steps=10, max_staleness=2, target_accuracy=0.9)


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], "▁"), ([0, 1], "▁█"), ([1, 1, 1], "▁▁▁"), ([0, 0.5, 1], "▁▅█"), ([3, 2, 1], "█▅▁")],
)
def test_a_sparkline_spans_the_range_of_its_values(values: list[float], bars: str) -> None:
    assert sparkline(values).replace("▄", "▅") == bars


def test_a_long_series_is_averaged_to_the_width_and_keeps_its_ends() -> None:
    line = sparkline(list(range(1000)), width=10)
    assert len(line) == 10 and line[0] == "▁" and line[-1] == "█"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (65, "1:05"), (3600, "1:00:00")])
def test_a_clock_reads_as_people_write_it(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_time_left_is_the_median_of_the_last_steps() -> None:
    state = make_state()
    assert state.eta_s is None
    for step, seconds in ((1, 100.0), (2, 10.0), (3, 12.0)):
        state.take({"step": step, "time/step_s": seconds})
    assert state.eta_s == pytest.approx(12.0 * 7)


def test_a_share_of_the_step_is_never_above_one_and_unknown_without_a_step() -> None:
    state = make_state()
    assert state.share_of_step("time/learner_idle_s") is None
    state.take({"time/step_s": 2.0, "time/learner_idle_s": 3.0})
    assert state.share_of_step("time/learner_idle_s") == 1.0


def test_a_plain_line_holds_what_was_measured_in_the_step() -> None:
    state = make_state()
    state.take(ROW)
    line = step_line(state, ROW)
    for part in (
        "step 3/10",
        "reward 0.500",
        "held-out accuracy 0.750 (version 3)",
        "staleness 1 max 0.25 mean",
        "learner 10%",
        "rollout 25%",
        "1,234 tok/s",
        "sync 0.50 s",
        "ETA 1:10",
    ):
        assert part in line
    state.take({"step": 4, "reward/mean": 0.6})
    assert "held-out" not in step_line(state, {"step": 4, "reward/mean": 0.6})


def test_the_panel_shows_everything_that_the_plain_line_shows() -> None:
    state = make_state()
    for step in range(1, 4):
        state.take(ROW | {"step": step, "reward/mean": step / 10})
    console = Console(file=io.StringIO(), width=100)
    console.print(render(state))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "step 3 / 10",
        "ETA",
        "▁▅█",
        "best 0.750",
        "goal 0.90",
        "of at most 2",
        "waiting 2  in flight 8  finished 4  trained 24  dropped 1",
        "learner 10%  rollout 25%",
        "rollout 1,234  train 900",
        "0.50 s",
        "verified",
    ):
        assert part in text.replace("▄", "▅"), part


def test_the_panel_can_be_drawn_before_anything_happened() -> None:
    console = Console(file=io.StringIO(), width=40)
    console.print(render(make_state()))
    assert "step 0 / 10" in console.file.getvalue()  # type: ignore[attr-defined]


def run_once(config: RunConfig, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    log = RunLog(config, console=console)
    log.status({"phase": "loading the model"})
    log.status({"phase": "loading the model"})
    log.status({"queue/waiting": 7})
    log.step(ROW)
    log.event("something happened")
    log.close()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_there_is_one_line_per_step_and_no_control_code(make_config: MakeConfig) -> None:
    shown = run_once(make_config("logging.live=auto"), terminal=False)
    assert "\x1b" not in shown and "╭" not in shown
    assert shown.count("loading the model") == 1
    assert shown.count("step 3/10") == 1
    assert "something happened" in shown


def test_at_a_terminal_the_panel_is_drawn_and_the_last_one_stays(make_config: MakeConfig) -> None:
    shown = run_once(make_config("logging.live=auto"), terminal=True)
    last_panel = shown.rindex("╭")
    assert "step 3 / 10" in shown[last_panel:]
    assert "something happened" in shown[:last_panel]
    assert shown.index("Try next:") > last_panel


def test_the_live_view_can_be_switched_off_at_a_terminal(make_config: MakeConfig) -> None:
    assert "╭" not in run_once(make_config("logging.live=off"), terminal=True)


def test_logging_a_step_takes_little_of_the_controllers_core(make_config: MakeConfig) -> None:
    log = RunLog(make_config(), console=Console(file=io.StringIO()))
    started = time.process_time()
    for step in range(1, 201):
        log.step(ROW | {"step": step})
    assert (time.process_time() - started) / 200 < 0.01
    log.close()


# ---- the end -------------------------------------------------------------------------------------------------------


def make_closing(**changes: object) -> Closing:
    values = {
        "run_dir": Path("runs/t"),
        "curve": Path("runs/t/curve.png"),
        "checkpoint": Path("runs/t/checkpoints/step-10"),
        "held_out": "data/held out.jsonl",
        "step": 10,
        "total_steps": 10,
        "first_accuracy": 0.43,
        "last_accuracy": 0.83,
        "goal": None,
        "can_extend": True,
    }
    return Closing(**(values | changes))  # type: ignore[arg-type]


def test_the_closing_message_names_folder_curve_and_three_commands() -> None:
    text = "\n".join(closing_lines(make_closing()))
    assert "runs/t/curve.png" in text and "0.430 -> 0.830" in text
    evaluate, longer, board = next_commands(make_closing())
    assert evaluate.endswith("s2rl eval --ckpt runs/t/checkpoints/step-10 --data 'data/held out.jsonl'")
    assert longer.endswith("s2rl train --config runs/t/config.yaml steps=20")
    assert board.endswith("tensorboard --logdir runs/t/tensorboard")


def test_an_interrupted_run_is_offered_to_go_on_to_its_end() -> None:
    assert next_commands(make_closing(step=4))[1].endswith("s2rl train --config runs/t/config.yaml")


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"step": 4, "goal": 0.8}, "stop_at_accuracy=null"),
        ({"step": 10, "goal": 0.8}, "stop_at_accuracy=null steps=20"),
        ({"step": 10, "goal": 0.9}, "config.yaml steps=20"),
        ({"can_extend": False}, "name=t-2 seed=1"),
        ({"can_extend": False, "step": 4}, "config.yaml"),
    ],
)
def test_the_command_to_train_on_really_trains_on(changes: dict, command: str) -> None:
    assert next_commands(make_closing(**changes))[1].endswith(command)


def test_a_run_without_checkpoint_offers_commands_that_work() -> None:
    commands = next_commands(make_closing(checkpoint=None))
    assert len(commands) == 3 and not any("--ckpt" in command for command in commands)


def test_the_curve_is_drawn_as_a_picture_of_both_lines(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 0, "eval/accuracy": 0.4}\n'
        + "".join(f'{{"step": {i}, "reward/mean": {i / 20}}}\n' for i in range(1, 20))
        + '{"step": 20, "reward/mean": null, "eval/accuracy": 0.9}\n'
    )
    picture = draw_curve(metrics=metrics, target=tmp_path / "curve.png", title="t")
    assert picture is not None
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    assert not list(tmp_path.glob(".*draft"))


def test_there_is_no_curve_of_nothing(tmp_path: Path) -> None:
    assert draw_curve(metrics=tmp_path / "none.jsonl", target=tmp_path / "curve.png", title="t") is None
    assert not (tmp_path / "curve.png").exists()
