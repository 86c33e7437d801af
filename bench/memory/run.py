"""Resident memory of every process over a run of the tiny example: it must stay flat.

    python examples/tiny/prepare.py
    python -m bench.memory.run [--steps 200]

Every process is read from outside after each step. Reported per process: (largest - smallest) / mean over the second
half of the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.process_tree import ProcessTree
from bench.report import machine, read_lines, write_json
from bench.training_run import REPOSITORY, run_training
from s2rl.config import load_config

LIMIT = 0.03


class Sampler:
    """Reads the memory of all processes once per step."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self.rows: list[dict[str, float]] = []
        """One entry per step."""

    def __call__(self, tree: ProcessTree) -> None:
        """Called many times a second."""
        if len(read_lines(self._metrics)) > len(self.rows):
            self.rows.append(tree.resident_mb())


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / mean."""
    return (max(values) - min(values)) / (sum(values) / len(values))


def report(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Per process that lives through the second half."""
    half = rows[len(rows) // 2 :]
    found = {}
    for label in half[0]:
        values = [row[label] for row in half if label in row]
        if len(values) == len(half):
            first = [row[label] for row in rows if label in row]
            found[label] = {
                "spread": spread(values),
                "first_mb": first[0],
                "half_mb": values[0],
                "last_mb": values[-1],
                "max_mb": max(first),
            }
    return found


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "examples/tiny/tiny.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/memory"))
    parser.add_argument("--limit-s", type=float, default=3600.0)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    overrides = [
        f"steps={arguments.steps}",
        "name=memory",
        f"runs_dir={out}",
        "stop_at_accuracy=null",
        "checkpoint.resume=never",
        *arguments.overrides,
    ]
    config = load_config(arguments.config, overrides)
    print(machine(), flush=True)
    sampler = Sampler(config.run_dir / "metrics.jsonl")
    run_training(config, config_file=arguments.config, overrides=overrides, limit_s=arguments.limit_s, on_poll=sampler)
    found = report(sampler.rows)
    write_json(out / "result.json", {"steps": arguments.steps, "processes": found, "rows": sampler.rows})
    for label, values in sorted(found.items(), key=lambda item: -item[1]["spread"]):
        print(
            f"{label:14} {values['spread']:7.2%}  {'flat' if values['spread'] <= LIMIT else 'NOT FLAT'}  "
            f"{values['first_mb']:.0f} MiB at the first step, {values['half_mb']:.0f} at half, "
            f"{values['last_mb']:.0f} at the end"
        )


if __name__ == "__main__":
    main()
