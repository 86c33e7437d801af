"""Core-seconds of a run over the core-seconds that its work costs at least, in one run of this script.

    python -m bench.end_to_end.run [--steps 20] [KEY=VALUE ...]

1. `s2rl train` with the quickstart's settings. Core-seconds are user and system time of every process that it starts.
2. vLLM alone generates as many tokens for the same prompts, each sequence as long as it was, evaluations included.
3. A plain loop does forward, backward and optimizer step over the same micro-batches with the bare model.

Two ratios: of the work (from loaded models to the end of the last step and its evaluation, over generation and training
without loading) and of everything from the first process to the last (over both programs with their loading).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.end_to_end.workload import read_workload
from bench.process_tree import ProcessTree
from bench.report import machine, read_json, write_json
from bench.training_run import REPOSITORY, TrainingRun, run_training
from s2rl.config import RunConfig, load_config


def run_alone(module: str, config: RunConfig, folder: Path, *, flags: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run one of the pure programs; its own result and the core-seconds of the whole process."""
    name = module.rpartition(".")[2]
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        module,
        str(config.run_dir / "config.yaml"),
        str(folder / "workload.json"),
        str(result),
    ]
    # Thread counts must stand before the libraries are loaded.
    threads = config.rollout.threads if "generation" in name else config.learner.threads
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    tree = ProcessTree([*command, *flags], env=env, log=folder / f"{name}.out", cwd=REPOSITORY)
    code = tree.wait(limit_s)
    whole = tree.snapshot().cpu_s
    tree.close()
    if code != 0:
        raise RuntimeError(f"{module} ended with code {code}; see {folder / f'{name}.out'}")
    return read_json(result) | {"whole_s": whole}


def summarise(run: TrainingRun, generation: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers, in core-seconds."""
    work = run.evaluated.cpu_s - run.ready.cpu_s
    pure_work = generation["rollouts_s"] + generation["evaluations_s"] + training["training_s"]
    whole, pure_whole = run.end.cpu_s, generation["whole_s"] + training["whole_s"]
    return {
        "ratio_work": work / pure_work,
        "ratio_whole": whole / pure_whole,
        "ratio_whole_over_pure_work": whole / pure_work,
        "run": {"whole": whole, "work": work, "by_process": run.evaluated.since(run.ready)},
        "pure": {"whole": pure_whole, "work": pure_work, "generation": dict(generation), "training": dict(training)},
        "wall_s_of_work": run.evaluated.at_s - run.ready.at_s,
        "learner_idle_s": sum(r.get("time/learner_idle_s", 0.0) for r in run.metrics),
        "start_up_by_process": run.ready.since(run.begin),
        "end_by_process": run.end.since(run.evaluated),
    }


def lines(summary: Mapping[str, Any]) -> list[str]:
    """The report."""
    run, pure = summary["run"], summary["pure"]
    generation, training = pure["generation"], pure["training"]
    generated = generation["rollouts_s"] + generation["evaluations_s"]
    spent = run["by_process"]
    engines = sum(v for k, v in spent.items() if k.startswith("rollout-"))
    learners = sum(v for k, v in spent.items() if k.startswith("learner-"))
    rest = ", ".join(f"{k} {v:.1f}" for k, v in spent.items() if not k.startswith(("rollout-", "learner-")))
    return [
        f"work:  run {run['work']:.1f} core-s / alone {pure['work']:.1f} core-s = {summary['ratio_work']:.3f}",
        f"  rollout workers {engines:.1f} / vLLM alone {generated:.1f} = {engines / generated:.3f}",
        f"  learner {learners:.1f} / plain loop {training['training_s']:.1f} = {learners / training['training_s']:.3f}",
        f"  others: {rest}",
        f"whole: run {run['whole']:.1f} core-s / alone {pure['whole']:.1f} core-s = {summary['ratio_whole']:.3f}",
        f"  (whole run over the work alone: {summary['ratio_whole_over_pure_work']:.3f})",
        f"wall time of the work {summary['wall_s_of_work']:.1f} s, the learner waited for "
        f"{summary['learner_idle_s']:.1f} s of it",
    ]


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "examples/smollm2/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--out", type=Path, default=Path(".cache/bench/end_to_end"), help="folder for everything written"
    )
    parser.add_argument("--logprobs", action="store_true", help="vLLM alone computes log-probabilities too")
    parser.add_argument("--reuse", action="store_true", help="measure the pure programs again for the last run there")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="limit of each of the three parts")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    overrides = [
        f"steps={arguments.steps}",
        "name=end_to_end",
        f"runs_dir={out}",
        "stop_at_accuracy=null",
        "checkpoint.resume=never",
        *arguments.overrides,
    ]
    config = load_config(arguments.config, overrides)
    print(machine(), flush=True)
    if not arguments.reuse:
        run = run_training(config, config_file=arguments.config, overrides=overrides, limit_s=arguments.limit_s)
        run.save(out / "run.json")
    run = TrainingRun.load(out / "run.json")
    read_workload(config).save(out / "workload.json")
    flags = ["--logprobs"] if arguments.logprobs else []
    generation = run_alone("bench.end_to_end.pure_generation", config, out, flags=flags, limit_s=arguments.limit_s)
    training = run_alone("bench.end_to_end.pure_training", config, out, flags=[], limit_s=arguments.limit_s)
    summary = summarise(run, generation, training)
    write_json(out / "result.json", summary)
    print("\n".join(lines(summary)))


if __name__ == "__main__":
    main()
