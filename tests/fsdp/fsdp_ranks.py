"""Runs the scenarios of test_fsdp_two_ranks.py on two gloo ranks in one pair of processes."""

from __future__ import annotations

import math
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fsdp_models import free_port, make_learner, make_samples, rank_batch, weights

from s2rl.errors import CheckpointError

WORLD_SIZE = 2
NUM_STEPS = 3


def run_all(folder: Path) -> list[dict[str, Any]]:
    """Results by scenario, one dictionary per rank; a scenario that raised has its traceback instead."""
    ports = {name: free_port() for name in SCENARIOS}
    torch.multiprocessing.spawn(_rank_main, args=(folder, ports), nprocs=WORLD_SIZE)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]


def _rank_main(rank: int, folder: Path, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        try:
            results[name] = scenario(rank, folder, ports[name])
        except Exception:  # noqa: BLE001  (becomes that scenario's result)
            results[name] = traceback.format_exc()
    torch.save(results, folder / f"results-{rank}.pt")


def step_samples(step: int) -> list[Any]:
    return make_samples(7, seed=step, version=step)


def deal(samples: list[Any], rank: int, step: int) -> Any:
    """Unequal shares; in the second micro-batch rank 1 has nothing."""
    shares = [[samples[:2], samples[2:4]], [samples[4:], []]]
    return rank_batch(shares[rank], everyone=samples, version=step)


def train(rank: int, folder: Path, port: int, *, save_after: int | None = None, **settings: Any) -> dict[str, Any]:
    learner = make_learner(
        folder / settings.pop("model", "qwen3"), rank=rank, world_size=WORLD_SIZE, port=port, **settings
    )
    learner.start()
    metrics = []
    try:
        for step in range(NUM_STEPS):
            metrics.append(dict(learner.train(deal(step_samples(step), rank, step)).metrics))
            if save_after == step + 1:
                learner.save(folder / "two-ranks")
        if save_after is not None:
            learner.save_done()
        sequences = [list(range(1, 2 + n)) for n in range(6)]
        scores = learner.score(sequences, 0.9)
        return {"metrics": metrics, "weights": weights(learner), "scores": scores, "rss": learner.memory()}
    finally:
        learner.close()


def lean(rank: int, folder: Path, port: int) -> dict[str, Any]:
    return train(rank, folder, port, save_after=2, algorithm={"kl": {"coefficient": 0.1}})


def fast(rank: int, folder: Path, port: int) -> dict[str, Any]:
    return train(rank, folder, port, algorithm={"kl": {"coefficient": 0.1}}, reshard_after_forward="off", packing="on")


def offloaded(rank: int, folder: Path, port: int) -> dict[str, Any]:
    return train(
        rank, folder, port, algorithm={"kl": {"coefficient": 0.1}}, cpu_offload=True, activation_checkpointing=True
    )


def untied(rank: int, folder: Path, port: int) -> dict[str, Any]:
    return train(rank, folder, port, model="llama", rollout_dtype="bfloat16")


def experts(rank: int, folder: Path, port: int) -> dict[str, Any]:
    return train(rank, folder, port, model="qwen3_moe")


def poisoned(rank: int, folder: Path, port: int) -> dict[str, Any]:
    """A number on rank 1 that is not finite."""
    learner = make_learner(folder / "qwen3", rank=rank, world_size=WORLD_SIZE, port=port)
    learner.start()
    try:
        before = weights(learner)
        samples = step_samples(0)
        shares = [samples[:3], [replace(samples[3], advantage=math.inf), *samples[4:]]]
        first = learner.train(rank_batch([shares[rank]], everyone=samples))
        after = weights(learner)
        second = learner.train(deal(step_samples(1), rank, 1))
        return {
            "skipped": [first.num_skipped_steps, second.num_skipped_steps],
            "versions": [first.version, second.version],
            "unchanged": all(torch.equal(before[n], after[n]) for n in before),
            "lr": second.metrics["optim/lr"],
        }
    finally:
        learner.close()


def resumed_from_one(rank: int, folder: Path, port: int) -> dict[str, Any]:
    """Two ranks go on from what one rank wrote."""
    learner = make_learner(folder / "qwen3", rank=rank, world_size=WORLD_SIZE, port=port, seed=99)
    learner.start()
    try:
        version = learner.load(folder / "one-rank")
        metrics = learner.train(deal(step_samples(version), rank, version)).metrics
        return {"version": version, "metrics": dict(metrics), "weights": weights(learner)}
    finally:
        learner.close()


def full_disk(rank: int, folder: Path, port: int) -> dict[str, Any]:
    """Rank 1 alone cannot write: both ranks are told, and training goes on."""
    learner = make_learner(folder / "qwen3", rank=rank, world_size=WORLD_SIZE, port=port)
    learner.start()
    try:
        message = ""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file over the limit is an error, not the end
        old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old_limits[1]))
        try:
            learner.save(folder / "full")
            learner.save_done()
        except CheckpointError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
        return {"message": message, "version": learner.train(deal(step_samples(0), rank, 0)).version}
    finally:
        learner.close()


SCENARIOS: dict[str, Callable[[int, Path, int], dict[str, Any]]] = {
    "lean": lean,
    "fast": fast,
    "offloaded": offloaded,
    "untied": untied,
    "experts": experts,
    "poisoned": poisoned,
    "resumed_from_one": resumed_from_one,
    "full_disk": full_disk,
}
