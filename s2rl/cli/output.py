"""What the commands print."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from s2rl.errors import Interrupted, UserError

if TYPE_CHECKING:
    from s2rl.config import RunConfig
    from s2rl.config.model_folder import ModelFacts


def wants_traceback() -> bool:
    """Whether S2RL_DEBUG asks for Python's traceback instead of a message."""
    return os.environ.get("S2RL_DEBUG", "") not in ("", "0")


def print_problem(error: Exception) -> None:
    """An error that was raised on purpose, on standard error."""
    if isinstance(error, Interrupted):
        kind, style = "interrupted", "bold yellow"
    else:
        kind, style = ("error", "bold red") if isinstance(error, UserError) else ("run failed", "bold red")
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble((f"{kind}: ", style), str(error) or type(error).__name__))
    if not isinstance(error, UserError | Interrupted):
        console.print(Text("Set S2RL_DEBUG=1 for a traceback; the run folder's run.log holds what came before.", "dim"))


def print_warnings(warnings: Sequence[str]) -> None:
    """Settings that are probably not meant, on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    for warning in warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning))


def print_dry_run(config: RunConfig, facts: ModelFacts, warnings: Sequence[str]) -> None:
    """The resolved configuration, and the plan as comments below it: together they are a YAML file that runs."""
    from s2rl.config import dump_config
    from s2rl.config.plan import plan_resources, render_plan

    lines = ["# Resolved configuration", dump_config(config), "# Resources (estimates)", "#"]
    lines += [f"# {line}".rstrip() for line in render_plan(plan_resources(config, facts))]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    print_warnings(warnings)


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """Results of an evaluation."""
    table = Table("metric", "value", box=None)
    for name, value in metrics.items():
        table.add_row(name, f"{value:,.4f}".rstrip("0").rstrip("."))
    Console().print(table)
