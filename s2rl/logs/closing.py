"""The last thing a run says: where its results are and what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the message is made of."""

    run_dir: Path
    curve: Path | None
    checkpoint: Path | None
    """The last complete checkpoint."""
    held_out: str | None
    """First held-out file."""
    step: int
    total_steps: int
    first_accuracy: float | None
    last_accuracy: float | None
    goal: float | None
    """The accuracy that ends the run."""
    can_extend: bool
    """Whether more steps may be added to this run."""


def closing_lines(closing: Closing) -> list[str]:
    """The message, line by line."""
    lines = [f"Run folder:  {near(closing.run_dir)}"]
    if closing.curve is not None:
        lines.append(f"Curve:       {near(closing.curve)}")
    if closing.last_accuracy is not None and closing.first_accuracy is not None:
        lines.append(f"Accuracy:    {closing.first_accuracy:.3f} -> {closing.last_accuracy:.3f} on held-out data")
    commands = next_commands(closing)
    return [*lines, "", "Try next:", *(f"  {command}" for command in commands)]


def next_commands(closing: Closing) -> list[str]:
    """Three commands that work as they stand."""
    s2rl, run_config = program("s2rl"), shlex.quote(near(closing.run_dir / "config.yaml"))
    commands = []
    if closing.checkpoint is not None:
        held_out = closing.held_out or "HELD_OUT.jsonl"
        ckpt, data = shlex.quote(near(closing.checkpoint)), shlex.quote(near(Path(held_out)))
        commands.append(f"{s2rl} eval --ckpt {ckpt} --data {data}")
        commands.append(f"{s2rl} train --config {run_config} {_changes(closing)}".rstrip())
    else:
        commands.append(f"{s2rl} train --config {run_config}")
    commands.append(f"{program('tensorboard')} --logdir {shlex.quote(near(closing.run_dir / 'tensorboard'))}")
    if len(commands) < 3:
        commands.append(f"{s2rl} train --config {run_config} --dry-run")
    return commands


def _changes(closing: Closing) -> str:
    """What to change so that the same command trains on."""
    reached = closing.goal is not None and (closing.last_accuracy or 0.0) >= closing.goal
    finished = closing.step >= closing.total_steps
    if (reached or finished) and not closing.can_extend:
        return f"name={closing.run_dir.name}-2 seed=1"
    changes = ["stop_at_accuracy=null"] * reached + [f"steps={closing.total_steps * 2}"] * finished
    return " ".join(changes)


def near(path: Path) -> str:
    """A path relative to the current directory when it lies below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def program(name: str) -> str:
    """How to call a program of this environment from the current directory."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found and own.exists() and os.path.samefile(found, own):
        return name
    return near(own) if own.exists() else name
