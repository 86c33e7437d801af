"""What the commands print."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from s2rl.errors import Interrupted, UserError

if TYPE_CHECKING:
    from s2rl.config import RunConfig
    from s2rl.config.model_folder import ModelFacts
    from s2rl.export import ExportResult, VerifyReport


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


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a number of bytes at a terminal; nothing elsewhere."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_export(result: ExportResult) -> None:
    """What was exported, and how to check it."""
    kept = f", {result.num_kept} of them from an earlier start" if result.num_kept else ""
    sys.stdout.write(
        f"{result.out}: {result.num_files} files{kept}, {result.num_bytes / 2**20:,.1f} MiB; "
        f"{result.num_trained} tensors from the checkpoint, {result.num_copied} copied\n"
    )


def print_verification(report: VerifyReport, json_out: Path | None) -> None:
    """The tensors that differ and everything that is broken, then the counts."""
    table = Table("tensor", "finding", "largest change", "mean change", box=None)
    for tensor in report.tensors:
        if tensor.finding != "identical":
            changes = (
                (f"{tensor.max_change:.3g}", f"{tensor.mean_change:.3g}") if not tensor.detail else (tensor.detail,)
            )
            style = "bold red" if tensor.finding.is_broken else ""
            table.add_row(tensor.name, Text(tensor.finding.value, style), *changes)
    for file, problem in report.files.items():
        table.add_row(file, Text(problem, "bold red"))
    console = Console(soft_wrap=True)
    if table.row_count:
        console.print(table)
    counts = Counter(tensor.finding.value for tensor in report.tensors)
    summary = ", ".join(f"{count} {finding}" for finding, count in sorted(counts.items()))
    verdict = "BROKEN" if report.is_broken else "the source's format is kept"
    sys.stdout.write(f"{len(report.tensors)} tensors: {summary}; {len(report.files)} other files differ: {verdict}\n")
    if json_out is not None:
        record = {
            "broken": report.is_broken,
            "files": dict(report.files),
            "tensors": [asdict(tensor) for tensor in report.tensors],
        }
        json_out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """Results of an evaluation."""
    table = Table("metric", "value", box=None)
    for name, value in metrics.items():
        table.add_row(name, f"{value:,.4f}".rstrip("0").rstrip("."))
    Console().print(table)
