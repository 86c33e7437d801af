"""Samples per second and accuracy beside TRL's GRPOTrainer, in one run of this script.

    python bench/trl/setup_env.py                     # TRL in a virtual environment of its own
    python -m bench.trl.run [--steps 10] [--rounds 2]

Both train the same model on the same prompts with the same reward, learning rate, 8 prompts x 8 samples a step and 20
new tokens, in bfloat16 over float32 masters. Each has the machine for itself, one after the other, in turns. The time
counts from loaded models to the end of the last step. What both have learned after equally many samples is measured by
`s2rl eval`, greedily, on the held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.report import machine, read_json, write_json
from bench.training_run import REPOSITORY, run_training
from bench.trl.setup_env import DEFAULT as TRL_ENV
from s2rl.config import RunConfig, load_config


def run_trl(config: RunConfig, *, python: Path, out: Path, flags: list[str], limit_s: float) -> dict[str, Any]:
    """Train with TRL; its result, with the accuracy of the model that it leaves."""
    result = out / "trl.json"
    model = out / "trl_model"
    algorithm, optimizer = config.algorithm, config.learner.optimizer
    command = [
        *(str(python), str(Path(__file__).with_name("train_trl.py"))),
        *("--model", str(config.model.path), "--train", config.data.train[0].path, "--steps", str(config.steps)),
        *("--prompts", str(algorithm.groups_per_step), "--samples", str(algorithm.group_size)),
        *("--max-new-tokens", str(config.rollout.sampling.max_new_tokens), "--lr", str(optimizer.lr)),
        *("--warmup-steps", str(optimizer.warmup_steps), "--threads", str(len(os.sched_getaffinity(0)))),
        *("--seed", str(config.seed), "--save", str(model), "--result", str(result), *flags),
    ]
    threads = str(len(os.sched_getaffinity(0)))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(REPOSITORY)}
    with (out / "trl.out").open("wb") as log:
        subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=limit_s)
    return read_json(result) | {"accuracy": accuracy(config, model, out=out)}


def accuracy(config: RunConfig, model: Path, *, out: Path) -> float:
    """Greedy accuracy of a model folder on the held-out prompts, as `s2rl eval` does it."""
    code = (
        "import json, sys; from pathlib import Path; from s2rl.evaluate import run_evaluation; "
        "ckpt, data, config = map(Path, sys.argv[1:]); "
        "print(json.dumps(run_evaluation(ckpt=ckpt, data=data, config=config)))"
    )
    command = [sys.executable, "-c", code, str(model), config.eval.data[0].path, str(config.run_dir / "config.yaml")]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=900)
    (out / "eval.out").write_text(completed.stdout + completed.stderr)
    completed.check_returncode()
    return float(json.loads(completed.stdout.splitlines()[-1])["eval/accuracy"])


def run_s2rl(config: RunConfig, *, config_file: Path, overrides: list[str], limit_s: float) -> dict[str, Any]:
    """Train with s2rl."""
    run = run_training(config, config_file=config_file, overrides=overrides, limit_s=limit_s)
    samples = config.steps * config.algorithm.groups_per_step * config.algorithm.group_size
    return {
        "samples": samples,
        "seconds": run.training_s,
        "samples_per_s": samples / run.training_s,
        "step_s": [r["time/step_s"] for r in run.metrics if "time/step_s" in r],
        "reward": [r["reward/mean"] for r in run.metrics if "reward/mean" in r],
        "staleness_max": max(r.get("staleness/max", 0) for r in run.metrics),
        "accuracy": next(r["eval/accuracy"] for r in reversed(run.metrics) if "eval/accuracy" in r),
    }


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of s2rl's run")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "examples/smollm2/quickstart.yaml")
    parser.add_argument("--trl-python", type=Path, default=TRL_ENV / "bin" / "python")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--trl-flag", action="append", default=[], help="passed to train_trl.py, as --trl-flag=--weights=bfloat16"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/trl"))
    parser.add_argument("--limit-s", type=float, default=3600.0, help="limit of each run")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    overrides = [
        f"steps={arguments.steps}",
        "name=beside_trl",
        f"runs_dir={out}",
        "stop_at_accuracy=null",
        "checkpoint.resume=never",
        "rollout.sampling.max_new_tokens=20",
        # Once, at the end: TRL is evaluated after its training too.
        f"eval.every={arguments.steps}",
        "eval.at_start=false",
        *arguments.overrides,
    ]
    config = load_config(arguments.config, overrides)
    print(machine(), flush=True)
    rounds: dict[str, list[dict[str, Any]]] = {"s2rl": [], "trl": []}
    for number in range(arguments.rounds):
        rounds["s2rl"].append(
            run_s2rl(config, config_file=arguments.config, overrides=overrides, limit_s=arguments.limit_s)
        )
        rounds["trl"].append(
            run_trl(config, python=arguments.trl_python, out=out, flags=arguments.trl_flag, limit_s=arguments.limit_s)
        )
        for name, results in rounds.items():
            last = results[-1]
            print(
                f"round {number + 1}, {name}: {last['samples']} samples in {last['seconds']:.1f} s, "
                f"{last['samples_per_s']:.2f} samples/s, held-out accuracy {last['accuracy']:.3f}",
                flush=True,
            )
    rates = {name: statistics.median(r["samples_per_s"] for r in results) for name, results in rounds.items()}
    ratio = rates["s2rl"] / rates["trl"]
    write_json(out / "result.json", {"ratio": ratio, "samples_per_s": rates, "rounds": rounds})
    print(f"s2rl {rates['s2rl']:.2f} / TRL {rates['trl']:.2f} samples/s = {ratio:.2f}")


if __name__ == "__main__":
    main()
