"""Resident memory over many batches, in a process of its own: the settings for it have to precede all computation."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from fsdp_models import make_learner, make_samples, rank_batch

pytestmark = pytest.mark.slow

NUM_STEPS = 160


def measure(folder: Path, results) -> None:
    learner = make_learner(folder, dtype="bfloat16", algorithm={"kl": {"coefficient": 0.01}})
    learner.start()
    resident = []
    for step in range(NUM_STEPS):
        samples = make_samples(16, seed=step, version=step, prompt=(5, 40), completion=(5, 40))
        learner.train(rank_batch([samples[i : i + 4] for i in range(0, 16, 4)], version=step))
        learner.score([list(range(30))], 1.0)
        resident.append(learner.memory())
    learner.close()
    results.put(resident)


def test_memory_is_flat_over_batches_of_ever_new_shapes(qwen3):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(qwen3, results))
    process.start()
    resident = results.get(timeout=280)
    process.join(timeout=20)
    assert max(resident[NUM_STEPS // 2 :]) < 1.03 * resident[NUM_STEPS // 2]
    assert resident[-1] < resident[0] + 150
