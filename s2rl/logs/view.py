"""What the person at the terminal sees: a live panel, or plain lines where there is no terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from s2rl.logs.metrics import Metrics

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_HZ = 2.0
"""A redraw costs a few milliseconds of the controller's core."""
_SPARK_WIDTH = 32


def sparkline(values: Sequence[float], *, width: int = _SPARK_WIDTH) -> str:
    """Values as a line of bars between their minimum and maximum; long series are averaged down to `width` bars."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def clock(seconds: float) -> str:
    """`4:05` or `1:02:03`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(slots=True, kw_only=True)
class ViewState:
    """What both views show."""

    name: str
    total_steps: int
    max_staleness: int
    target_accuracy: float | None = None
    phase: str = "starting"
    row: dict[str, float] = field(default_factory=dict)
    """Latest value of each metric."""
    rewards: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    accuracy_version: int | None = None
    step_seconds: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def take(self, metrics: Metrics) -> None:
        """A row of metrics, or live values between rows."""
        numbers = {name: float(value) for name, value in metrics.items() if value is not None}
        self.row |= numbers
        if "reward/mean" in numbers:
            self.rewards.append(numbers["reward/mean"])
        if "time/step_s" in numbers:
            self.step_seconds.append(numbers["time/step_s"])
        if "eval/accuracy" in numbers:
            self.accuracies.append(numbers["eval/accuracy"])
            self.accuracy_version = int(numbers.get("eval/version", numbers.get("version", 0)))

    @property
    def step(self) -> int:
        """Batches trained."""
        return int(self.row.get("step", 0))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, from the median of the last ten; None before the first step."""
        if not self.step_seconds:
            return None
        return statistics.median(self.step_seconds[-10:]) * max(0, self.total_steps - self.step)

    def share_of_step(self, name: str) -> float | None:
        """A time as a share of the step's, None when either is unknown."""
        seconds, step_s = self.row.get(name), self.row.get("time/step_s")
        return None if seconds is None or not step_s else min(1.0, seconds / step_s)


class View(Protocol):
    """How a run is shown."""

    def step(self, metrics: Metrics) -> None:
        """One row of metrics."""
        ...

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """Live values between rows; the key `phase` says what the run is doing."""
        ...

    def message(self, text: str, *, style: str = "") -> None:
        """One line for the reader."""
        ...

    def close(self) -> None:
        """Leave the terminal as it should stay."""
        ...


class PlainView:
    """One line per step."""

    def __init__(self, state: ViewState, *, console: Console) -> None:
        self._state, self._console = state, console

    def step(self, metrics: Metrics) -> None:
        """See `View`."""
        self._state.take(metrics)
        self.message(step_line(self._state, metrics))

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """See `View`: only a change of phase is worth a line."""
        phase = values.get("phase")
        if isinstance(phase, str) and phase != self._state.phase:
            self._state.phase = phase
            self.message(phase)

    def message(self, text: str, *, style: str = "") -> None:
        """See `View`."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def close(self) -> None:
        """See `View`."""


def step_line(state: ViewState, metrics: Metrics) -> str:
    """One step as a line of text, with what was measured in it."""
    row = {name: value for name, value in metrics.items() if value is not None}
    parts = [f"step {state.step}/{state.total_steps}"]
    if "reward/mean" in row:
        parts.append(f"reward {row['reward/mean']:.3f}")
    if "eval/accuracy" in row:
        parts.append(f"held-out accuracy {row['eval/accuracy']:.3f} (version {state.accuracy_version})")
    if "staleness/max" in row:
        parts.append(f"staleness {row['staleness/max']:.0f} max {row.get('staleness/mean', 0):.2f} mean")
    if "queue/waiting" in row:
        short = (("waiting", "w"), ("in_flight", "f"), ("finished", "d"), ("dropped", "x"))
        parts.append("queue " + " ".join(f"{letter}{row.get(f'queue/{name}', 0):.0f}" for name, letter in short))
    idle = [(who, state.share_of_step(f"time/{who}_idle_s")) for who in ("learner", "rollout")]
    if "time/step_s" in row:
        parts.append("idle " + " ".join(f"{who} {share:.0%}" for who, share in idle if share is not None))
        parts.append(f"{row.get('throughput/rollout_tokens_per_s', 0):,.0f} tok/s")
    if "sync/seconds" in row:
        parts.append(f"sync {row['sync/seconds']:.2f} s")
    if "time/step_s" in row:
        parts.append(f"{row['time/step_s']:.1f} s")
    if state.eta_s and state.step:
        parts.append(f"ETA {clock(state.eta_s)}")
    return "  ".join(parts)


class LiveView:
    """A panel that is redrawn in place; messages scroll by above it."""

    def __init__(self, state: ViewState, *, console: Console) -> None:
        self._state, self._console = state, console
        self._live = Live(
            console=console,
            get_renderable=lambda: render(state),
            refresh_per_second=_REFRESH_HZ,
            redirect_stdout=True,
            redirect_stderr=True,
            vertical_overflow="visible",
        )
        self._live.start()

    def step(self, metrics: Metrics) -> None:
        """See `View`."""
        self._state.take(metrics)

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """See `View`."""
        phase = values.get("phase")
        if isinstance(phase, str):
            self._state.phase = phase
        self._state.take({name: value for name, value in values.items() if not isinstance(value, str)})

    def message(self, text: str, *, style: str = "") -> None:
        """See `View`."""
        self._console.print(Text(text, style=style))

    def close(self) -> None:
        """See `View`: the last panel stays."""
        self._live.stop()


def render(state: ViewState) -> RenderableType:
    """The panel."""
    elapsed = clock(time.monotonic() - state.started)
    eta = "" if state.eta_s is None else f"  ETA {clock(state.eta_s)}"
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(f"step {state.step} / {state.total_steps}", style="bold"), Text(f"{elapsed}{eta}", style="dim"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=10)
    table.add_column()
    for name, value in _lines(state):
        table.add_row(name, value)
    bar = Table.grid(expand=True)  # a bar alone ends no line
    bar.add_row(ProgressBar(total=max(1, state.total_steps), completed=state.step))
    return Panel(
        Group(head, bar, table), title=f"[bold]s2rl[/] {state.name}", title_align="left", border_style="cyan", width=86
    )


def _lines(state: ViewState) -> list[tuple[str, Text]]:
    row = state.row
    lines = [("doing", Text(state.phase))]
    if state.rewards:
        lines.append(("reward", _curve(state.rewards, style="green")))
    if state.accuracies:
        text = _curve(state.accuracies, style="magenta")
        text.append(f"  version {state.accuracy_version}, best {max(state.accuracies):.3f}", "dim")
        if state.target_accuracy is not None:
            text.append(f", goal {state.target_accuracy:.2f}", "dim")
        lines.append(("held-out", text))
    if "staleness/max" in row:
        bound = f"  of at most {state.max_staleness}"
        text = Text(f"max {row['staleness/max']:.0f}  mean {row.get('staleness/mean', 0):.2f}")
        lines.append(("staleness", text.append(bound, "dim")))
    if "queue/waiting" in row:
        names = ("waiting", "in_flight", "finished", "trained", "dropped")
        counts = "  ".join(f"{name.replace('_', ' ')} {row.get(f'queue/{name}', 0):.0f}" for name in names)
        lines.append(("queue", Text(counts)))
    idle = {who: state.share_of_step(f"time/{who}_idle_s") for who in ("learner", "rollout")}
    if any(share is not None for share in idle.values()):
        shares = "  ".join(f"{who} {share:.0%}" for who, share in idle.items() if share is not None)
        lines.append(("idle", Text(shares)))
    if "throughput/rollout_tokens_per_s" in row:
        rollout, train = row["throughput/rollout_tokens_per_s"], row.get("throughput/train_tokens_per_s", 0)
        lines.append(("tokens/s", Text(f"rollout {rollout:,.0f}  train {train:,.0f}")))
    if "sync/seconds" in row:
        text = Text(f"{row['sync/seconds']:.2f} s  {row.get('sync/bytes', 0) / 2**20:,.0f} MiB")
        lines.append(("sync", text.append("  verified" if row.get("sync/verified") else "", "green")))
    return lines


def _curve(values: Sequence[float], *, style: str) -> Text:
    return Text(f"{values[-1]:.3f}  ").append(sparkline(values), style)
