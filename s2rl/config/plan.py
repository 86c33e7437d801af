"""The resources that a run will take: processes, devices, threads, memory. Estimates, made without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from s2rl.config.checks import max_outstanding_groups
from s2rl.config.machine import devices_needed, num_cores
from s2rl.config.model_folder import ModelFacts
from s2rl.config.schema import RunConfig

ENGINE_BASE_MB = 900
"""Resident memory of a worker whose model and cache are tiny, measured with vllm 0.32 on a CPU."""
LEARNER_BASE_MB = 500
"""Resident memory of a process that trains a tiny model, measured with torch 2.13."""
CONTROLLER_BASE_MB = 700
"""Ray's own processes included."""
GRADER_BASE_MB = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One kind of process."""

    process: str
    count: int
    devices: int
    """Accelerators of each."""
    threads: int
    """Computing threads of each."""
    host_mb: float
    """Host memory of each, estimated."""
    device_mb: float
    """Accelerator memory of each for weights and optimizer state, estimated; activations and caches come on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run takes and makes."""

    rows: tuple[PlanRow, ...]
    num_parameters: int
    devices: int
    facts: tuple[tuple[str, str], ...]
    """Further lines: a name and a text."""

    @property
    def host_mb(self) -> float:
        """Host memory of all processes together."""
        return sum(row.count * row.host_mb for row in self.rows)


def plan_resources(config: RunConfig, model: ModelFacts) -> Plan:
    """Processes, devices, threads and memory of a run of `config` on a model of this size."""
    on_host = config.device == "cpu"
    learner_mb = _learner_mb(config, model)
    weights_mb = model.num_parameters * _bytes(config.rollout.dtype) / 2**20 / config.rollout.tensor_parallel
    engine_mb = weights_mb + (config.rollout.kv_cache_gb * 1024 if on_host else 0)
    bucket_mb = 6 * config.sync.bucket_mb
    rows = (
        PlanRow(process="controller", count=1, devices=0, threads=1, host_mb=CONTROLLER_BASE_MB, device_mb=0),
        PlanRow(
            process="learner rank",
            count=config.learner.ranks,
            devices=0 if on_host else 1,
            threads=config.learner.threads,
            host_mb=LEARNER_BASE_MB + (learner_mb + bucket_mb if on_host or config.learner.cpu_offload else 0),
            device_mb=0 if on_host or config.learner.cpu_offload else learner_mb,
        ),
        PlanRow(
            process="rollout worker",
            count=config.rollout.workers,
            devices=0 if on_host else config.rollout.tensor_parallel,
            threads=config.rollout.threads,
            host_mb=ENGINE_BASE_MB + (engine_mb + bucket_mb if on_host else 0),
            device_mb=0 if on_host else weights_mb,
        ),
        PlanRow(
            process="grader", count=config.rewards.processes, devices=0, threads=1, host_mb=GRADER_BASE_MB, device_mb=0
        ),
    )
    return Plan(
        rows=rows,
        num_parameters=model.num_parameters,
        devices=0 if on_host else devices_needed(config),
        facts=tuple(_facts(config, model)),
    )


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _learner_mb(config: RunConfig, model: ModelFacts) -> float:
    """Masters, gradients and two moments in float32, sharded; the gathered compute copy is counted once in full."""
    state = 16 * model.num_parameters / config.learner.ranks
    compute = _bytes(config.learner.dtype) * model.num_parameters
    reference = (
        _bytes(config.learner.dtype) * model.num_parameters / config.learner.ranks
        if config.algorithm.kl.coefficient
        else 0
    )
    return (state + compute + reference) / 2**20


def _facts(config: RunConfig, model: ModelFacts) -> Iterator[tuple[str, str]]:
    algorithm = config.algorithm
    samples = algorithm.groups_per_step * algorithm.group_size
    cap = max_outstanding_groups(config)
    depth = config.staleness.depth
    yield (
        "model",
        f"{model.model_type}, {model.num_parameters / 1e6:,.1f} M parameters, {model.num_bytes / 2**20:,.0f} MiB "
        f"on disk",
    )
    yield "batch", f"{algorithm.groups_per_step} groups x {algorithm.group_size} completions = {samples} samples"
    yield (
        "run",
        (
            f"{config.steps} batches, {config.steps * algorithm.updates_per_batch} optimizer steps, "
            f"{config.steps * samples:,} samples, at most "
            f"{config.steps * samples * config.rollout.sampling.max_new_tokens:,} new tokens"
        ),
    )
    yield "outstanding groups", f"at most {cap}" + (" (tuned)" if depth == "auto" else f" (depth {depth})")
    need = (
        "none: everything computes on the CPU"
        if config.device == "cpu"
        else f"{devices_needed(config)} x {config.device}"
    )
    yield "accelerators", need
    yield "this machine", f"{num_cores()} cores, {_total_memory_mb():,.0f} MiB of memory"
    yield "run folder", str(config.run_dir)


def _total_memory_mb() -> float:
    """Physical memory of this machine, or 0 where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) / 1024
    except OSError:
        return 0.0
    return 0.0


def render_plan(plan: Plan) -> list[str]:
    """The plan as lines of plain text."""
    header = ("process", "count", "devices each", "threads each", "memory each", "device memory each")
    table = [header] + [
        (
            row.process,
            str(row.count),
            str(row.devices),
            str(row.threads),
            f"~{row.host_mb:,.0f} MiB",
            f"~{row.device_mb:,.0f} MiB" if row.device_mb else "-",
        )
        for row in plan.rows
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    width = max(len(name) for name, _ in plan.facts)
    lines += ["", *(f"{name.ljust(width)}  {text}" for name, text in plan.facts)]
    return [*lines, f"{'host memory'.ljust(width)}  ~{plan.host_mb:,.0f} MiB in all (estimate)"]
