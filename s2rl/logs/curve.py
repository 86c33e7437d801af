"""The run as a picture: reward and held-out accuracy over the batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from s2rl.logs.writers import read_lines

_INK, _GRID, _REWARD, _ACCURACY = "#334155", "#e2e8f0", "#0d9488", "#7c3aed"


def draw_curve(*, metrics: Path, target: Path, title: str) -> Path | None:
    """Draw `metrics` (metrics.jsonl) into the PNG `target`; None when there is nothing to draw yet."""
    rows = read_lines(metrics)
    rewards = [(row["step"], row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
    accuracies = [(row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None]
    panels = [(name, points) for name, points in (("reward", rewards), ("held-out accuracy", accuracies)) if points]
    if not panels:
        return None
    # Figure without pyplot: no window system is looked for and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 1.0 + 2.4 * len(panels)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold", color=_INK)
    for axis, (name, points) in zip(axes, panels, strict=True):
        _style(axis, name)
        steps, values = [p[0] for p in points], [p[1] for p in points]
        if name == "reward":
            axis.plot(steps, values, color=_REWARD, linewidth=1, alpha=0.35)
            axis.plot(steps, _smooth(values), color=_REWARD, linewidth=2)
        else:
            axis.plot(steps, values, color=_ACCURACY, linewidth=2, marker="o", markersize=4)
        axis.annotate(
            f"{values[-1]:.3f}",
            (steps[-1], values[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
        )
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("batches trained", color=_INK)
    draft = target.with_name(f".{target.name}.draft")
    figure.savefig(draft, format="png", facecolor="white")
    draft.replace(target)
    return target


def _style(axis: Any, name: str) -> None:
    axis.set_ylabel(name, color=_INK)
    axis.grid(True, color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.06)
    axis.tick_params(colors=_INK, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#94a3b8")


def _smooth(values: Sequence[float], *, window: int = 5) -> list[float]:
    """Mean over a centred window that is cut at both ends."""
    half = window // 2
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half) : i + half + 1])]
