"""Idle time of the learner and CPU time of the controller, on processes that sleep.

    OMP_NUM_THREADS=1 python -m bench.controller.run

The real queue, pool, rollouts, sync, planner and loop drive rollout workers and a learner that sleep for as long as
real ones would compute. The same lengths and costs go through `ideal.py`, which has no overhead, so the difference is
what the controller itself costs the learner. All runs take place in real time in this process, so its CPU
time holds the controller and the simulated processes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import pstats
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.controller.ideal import any_policy_bounds, ideal_run
from bench.controller.simulated import Costs, lognormal_length
from bench.controller.wiring import SimulatedGrader, SimulatedRun, simulated_config
from bench.report import machine, write_json
from s2rl.config import RunConfig
from s2rl.rewards.pool import GradingPool

GROUP_SIZE, GROUPS_PER_STEP, WORKERS, SLOTS, LONGEST = 8, 16, 4, 32, 800
COSTS = Costs(token_s=0.003, train_s=0.6, load_s=0.03, score_s=0.01, start_s=0.1)
IDLE_LIMIT, CPU_LIMIT_MS = 0.03, 1.0


@functools.cache
def length(group_id: str, index: int) -> int:
    """Median 100 tokens (0.3 s), mean 137, one in a hundred over 640 (1.9 s = 3 steps), at most 800."""
    return _length(group_id, index)


_length = lognormal_length(median=100, sigma=0.8, longest=LONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run beside its bounds. Shares are of the time of all steps.

    Idle is every second in which the learner neither trains nor publishes: waiting for a batch
    (`time/learner_idle_s`) and whatever the controller does before it calls the learner and after.
    """

    max_staleness: int
    depth: str
    grading: str
    num_completions: int
    seconds: float
    idle_share: float
    waiting_share: float
    """The part of it that the run logs: waiting for a batch."""
    ideal_idle_share: float
    """Zero overhead, same rules, same lengths, greatest depth."""
    ideal_seconds: float
    blind_bound: float
    clairvoyant_bound: float
    staleness_mean: float
    staleness_max: int
    depth_mean: float
    cpu_ms_per_completion: float

    @property
    def above_ideal(self) -> float:
        """Points of idle share that the controller adds."""
        return self.idle_share - self.ideal_idle_share


def workload(*, groups: int, max_staleness: int, depth: int | str) -> RunConfig:
    """The configuration of one run."""
    return simulated_config(
        steps=groups // GROUPS_PER_STEP,
        algorithm__group_size=GROUP_SIZE,
        algorithm__groups_per_step=GROUPS_PER_STEP,
        rollout__workers=WORKERS,
        rollout__max_num_seqs=SLOTS,
        rollout__sampling__max_new_tokens=LONGEST,
        staleness__max_staleness=max_staleness,
        staleness__depth=depth,
    )


def measure(*, groups: int, max_staleness: int, depth: int | str, grading: str) -> Result:
    """One run in real time, and its bounds."""
    config = workload(groups=groups, max_staleness=max_staleness, depth=depth)
    ideal = ideal_run(config, COSTS, length)  # also fills the cache of lengths
    bounds = any_policy_bounds(config, COSTS, length)
    grader = GradingPool(config.rewards) if grading == "pool" else SimulatedGrader()
    run = SimulatedRun(config=config, costs=COSTS, length=length, grader=grader)
    cpu = time.process_time()
    asyncio.run(run.main())
    cpu = time.process_time() - cpu
    rows = run.log.rows
    seconds = sum(float(row["time/step_s"] or 0) for row in rows)
    num_completions = sum(len(g.rollouts_G) for g, _ in run.log.groups)

    def mean(key: str) -> float:
        return sum(float(row[key] or 0) for row in rows) / len(rows)

    return Result(
        max_staleness=max_staleness,
        depth=str(depth),
        grading=grading,
        num_completions=num_completions,
        seconds=seconds,
        idle_share=1 - len(rows) * (COSTS.train_s + COSTS.load_s + COSTS.score_s) / seconds,
        waiting_share=sum(float(row["time/learner_idle_s"] or 0) for row in rows) / seconds,
        ideal_idle_share=ideal.idle_share,
        ideal_seconds=ideal.seconds,
        blind_bound=bounds.blind,
        clairvoyant_bound=bounds.clairvoyant,
        staleness_mean=mean("staleness/mean"),
        staleness_max=max(int(row["staleness/max"] or 0) for row in rows),
        depth_mean=mean("queue/depth"),
        cpu_ms_per_completion=1e3 * cpu / num_completions,
    )


def profile(*, groups: int, max_staleness: int) -> None:
    """Where the CPU time goes, by package and by function. Profiling itself slows the run."""
    config = workload(groups=groups, max_staleness=max_staleness, depth="auto")
    run = SimulatedRun(config=config, costs=COSTS, length=length)
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(asyncio.run, run.main())
    stats = pstats.Stats(profiler)
    shares: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        parts = Path(file).parts
        name = next((p for p in ("bench", "s2rl", "asyncio", "numpy") if p in parts), "other")
        if name == "s2rl":
            name = "/".join(parts[-2:])
        shares[name] += own_s
    total = sum(shares.values())
    for name, own_s in shares.most_common(14):
        print(f"{own_s / total:6.1%}  {name}")
    stats.sort_stats("tottime").print_stats(25)


def show(result: Result) -> None:
    """One line of the table."""
    cells = (
        str(result.max_staleness),
        result.depth,
        result.grading,
        f"{result.seconds:.1f} s",
        f"{result.seconds / result.ideal_seconds - 1:+.1%}",
        f"{result.waiting_share:.1%}",
        f"{result.idle_share:.1%}",
        f"{result.ideal_idle_share:.1%}",
        f"{100 * result.above_ideal:+.1f}",
        f"{result.blind_bound:.1%}",
        f"{result.clairvoyant_bound:.1%}",
        f"{result.staleness_mean:.2f}",
        f"{result.depth_mean:.0f}",
        f"{result.cpu_ms_per_completion:.2f} ms",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Print the table; exit code 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[4, 2, 1, 0], help="bounds to run; the first in all ways"
    )
    parser.add_argument("--profile", action="store_true", help="show where the CPU time goes, and nothing else")
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    args = parser.parse_args()
    if args.profile:
        profile(groups=args.groups, max_staleness=args.staleness[0])
        return 0
    print(f"{args.groups} groups of {GROUP_SIZE}, {GROUPS_PER_STEP} a step, {WORKERS} workers of {SLOTS} slots")
    print(f"{machine()}\n")
    columns = (
        "bound",
        "depth",
        "grading",
        "time",
        "over ideal",
        "learner waits",
        "learner idle",
        "ideal",
        "above it, points",
        "any policy, blind",
        "any policy, clairvoyant",
        "mean staleness",
        "mean depth",
        "CPU per completion",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    first = args.staleness[0]
    most = GROUPS_PER_STEP * (first + 1)
    ways = [(s, "auto", "none") for s in args.staleness]
    ways += [(first, most, "none"), (first, "auto", "pool")]
    results = []
    for bound, depth, grading in ways:
        results.append(measure(groups=args.groups, max_staleness=bound, depth=depth, grading=grading))
        show(results[-1])
    if args.out is not None:
        write_json(args.out, {"results": [asdict(r) for r in results]})
    missed = [r for r in results if r.above_ideal > IDLE_LIMIT or r.cpu_ms_per_completion > CPU_LIMIT_MS]
    print(
        f"\nlimits: {100 * IDLE_LIMIT:.0f} points above the ideal run, {CPU_LIMIT_MS:g} ms; {len(missed)} runs missed"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
