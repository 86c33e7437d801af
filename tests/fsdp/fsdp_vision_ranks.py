"""Sequences with images, and two gloo ranks that train them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fsdp_models import free_port, make_learner, rank_batch

from s2rl.models.small import SmallModel
from s2rl.types import Sample

MIXES = (
    (["one", "two"], ["text", "text"]),
    (["text", "text"], ["text", "one"]),
    (["text", "text"], ["text", "text"]),
    (["one", "text"], ["two", "one"]),
    (["text", "one"], []),
)
"""What each rank's samples show, step by step; [] is a rank without work."""
_SIZES = {"text": (), "one": ((2, 3),), "two": ((2, 2), (4, 2)), "large": ((6, 5),)}
"""Images of a sequence, in merged patches."""


def sequences(made: SmallModel, kinds: list[str]) -> tuple[list[np.ndarray], list[tuple[np.ndarray, ...]]]:
    """Token ids and images of one sequence for each kind; the same for the same kinds."""
    rng = np.random.default_rng(len(kinds))
    side = 28 if made.family == "qwen2_5_vl" else 32
    ids_of = made.tokenizer.ids
    all_ids, all_images = [], []
    for kind in kinds:
        ids, images = list(rng.integers(0, 200, 4)), []
        for height, width in _SIZES[kind]:
            pads = [ids_of["<|image_pad|>"]] * (height * width)
            ids += [ids_of["<|vision_start|>"], *pads, ids_of["<|vision_end|>"]]
            images.append(rng.integers(0, 256, (height * side, width * side, 3), dtype=np.uint8))
        ids += list(rng.integers(0, 200, int(rng.integers(5, 9))))
        all_ids.append(np.array(ids, dtype=np.int32))
        all_images.append(tuple(images))
    return all_ids, all_images


def samples(made: SmallModel, kinds: list[str], *, version: int = 0) -> list[Sample]:
    """One for each kind, with a completion of three tokens."""
    rng = np.random.default_rng(version)
    return [
        Sample(
            group_id=f"g{index}",
            token_ids=ids,
            prompt_len=len(ids) - 3,
            logprobs=(-6 + 0.1 * rng.standard_normal(3)).astype(np.float32),
            versions=np.full(3, version, dtype=np.int32),
            advantage=float(rng.standard_normal()),
            images=images,
        )
        for index, (ids, images) in enumerate(zip(*sequences(made, kinds), strict=True))
    ]


def run(made: SmallModel, folder: Path, *, without_dummy: bool = False) -> list[list[dict[str, float]]]:
    """Metrics of each step of MIXES, by rank."""
    context = torch.multiprocessing.spawn(
        _rank_main, args=(made, folder, free_port(), without_dummy), nprocs=2, join=False
    )
    try:
        deadline = time.monotonic() + 120
        while not context.join(timeout=1):  # says True once both have ended
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not finish")
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"vision-{rank}.pt", weights_only=False) for rank in range(2)]


def _rank_main(rank: int, made: SmallModel, folder: Path, port: int, without_dummy: bool) -> None:
    torch.set_num_threads(1)
    learner = make_learner(made.folder, rank=rank, world_size=2, port=port)
    learner._timeout_s = 15 if without_dummy else 60
    learner.start()
    if without_dummy:
        _drop_dummies(learner._started().policy.vision)
    results: list[Any] = []
    for step, mix in enumerate(MIXES):
        everyone = samples(made, [kind for share in mix for kind in share], version=step)
        first = len(mix[0])
        own = everyone[:first] if rank == 0 else everyone[first:]
        results.append(dict(learner.train(rank_batch([own], everyone=everyone, version=step)).metrics))
    torch.save(results, folder / f"vision-{rank}.pt")
    learner.close()


def _drop_dummies(vision: Any) -> None:
    original = vision.model_inputs
    vision.num_dummy_tokens = 0
    vision.model_inputs = lambda images, **kwargs: original(images, **kwargs) if len(images) else {}
