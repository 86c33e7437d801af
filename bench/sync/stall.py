"""Seconds for which generation stands still while a real engine takes new weights.

    OMP_NUM_THREADS=1 python bench/sync/stall.py

One process holds the weights of a model of SmolLM2-135M's shapes (random, bfloat16) and sends them with the real
sender. The other is a rollout worker: a vLLM engine that decodes completions all the time and takes a publication
between two of its steps. Per publication: `stalled_s` as the worker reports it (receiving, fingerprints, vLLM's own
loading and post-processing, cache reset), `publish_s` as the sender does, and the tokens that the engine made between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from s2rl.sync import SyncGroup, WeightSender, check_fingerprints, free_port
from s2rl.types import Encoded, GroupRequest, LoadReport, Prompt, PublishReport, SamplingSpec, SyncGroupSpec, TensorSpec

MIB = 1 << 20


def save_model(folder: Path, *, layers: int) -> None:
    """A random model of SmolLM2-135M's shapes in Hugging Face format, without tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def read_manifest(file: Path) -> list[TensorSpec]:
    """The tensors of a safetensors file, sorted by name."""
    with safe_open(file, framework="pt") as reader:
        tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a dict
    return [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in sorted(tensors.items())
    ]


def requests(round_number: int, *, completions: int, tokens: int) -> list[GroupRequest]:
    """One group that keeps the engine busy."""
    prompt = Prompt(prompt_id=str(round_number), row=0, epoch=0, text="", answer="")
    sampling = SamplingSpec(max_new_tokens=tokens, ignore_eos=True)
    encoded = Encoded(prompt=prompt, token_ids=tuple(range(10, 42)))
    return [
        GroupRequest(
            group_id=f"g{round_number}", encoded=encoded, num_completions=completions, sampling=sampling, seed=1
        )
    ]


async def work(model: Path, spec: SyncGroupSpec, manifest: list[TensorSpec], rounds: int, pipe: Connection) -> None:
    """The rollout worker: loads `rounds` publications while it decodes, then reports."""
    from s2rl.config.schema import ModelConfig, RolloutConfig
    from s2rl.rollout.worker import RolloutWorker

    config = RolloutConfig(max_model_len=2048, max_num_seqs=16)
    worker = RolloutWorker(index=0, model=ModelConfig(path=model), config=config, device="cpu", seed=0)
    await worker.start()
    pipe.send("started")
    await worker.join_sync(spec, manifest)
    reports: list[LoadReport] = []
    made: list[int] = []
    pipe.send("joined")
    await worker.submit(requests(0, completions=16, tokens=1900))
    for version in range(rounds):
        before = (await worker.collect(2.0)).stats.completion_tokens
        pipe.send(version)
        reports.append(await worker.load_weights(version))
        after = (await worker.collect(0.01)).stats
        made.append(after.completion_tokens - before)
        assert after.running == 16, "the engine has nothing to do: the time would not be a stall"
    pipe.send((reports, made))
    await worker.close()


def worker_process(model: Path, spec: SyncGroupSpec, manifest: list[TensorSpec], rounds: int, pipe: Connection) -> None:
    """Entry point of the second process."""
    asyncio.run(work(model, spec, manifest, rounds, pipe))


def stream(file: Path, manifest: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights one by one."""
    with safe_open(file, framework="pt") as reader:
        for spec in manifest:
            yield spec.name, reader.get_tensor(spec.name)


def measure(model: Path, *, bucket_mb: float, rounds: int) -> dict[str, Any]:
    """Publish `rounds` times and report medians; the first publication is not counted."""
    torch.set_num_threads(1)
    file = model / "model.safetensors"
    manifest = read_manifest(file)
    weights = [(name, tensor.clone()) for name, tensor in stream(file, manifest)]
    port = free_port()

    def spec(rank: int) -> SyncGroupSpec:
        return SyncGroupSpec(
            backend="gloo",
            host="127.0.0.1",
            port=port,
            rank=rank,
            world_size=2,
            timeout_s=120,
            bucket_bytes=int(bucket_mb * MIB),
        )

    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker_process, args=(model, spec(1), manifest, rounds, theirs))
    process.start()
    theirs.close()  # so that the end of the worker is the end of the pipe
    assert ours.recv() == "started"
    group = SyncGroup(spec(0), device="cpu")
    assert ours.recv() == "joined"
    sender = WeightSender(group, manifest)
    published: list[PublishReport] = []
    for _ in range(rounds):
        version = ours.recv()
        published.append(sender.send(iter(weights), version))
    reports, made = ours.recv()
    for sent, loaded in zip(published, reports, strict=True):
        check_fingerprints(sent, loaded)
    group.close()
    process.join(timeout=60)
    stalls = [r.stalled_s for r in reports[1:]]
    return {
        "bytes": published[0].num_bytes,
        "stalled_s": statistics.median(stalls),
        "stalled_s_max": max(stalls),
        "publish_s": statistics.median(p.seconds for p in published[1:]),
        "gb_per_s_of_stall": published[0].num_bytes / statistics.median(stalls) / 1e9,
        "tokens_between": made[1:],
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder with one model.safetensors; default: a random one")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch)
        if args.model is None:
            save_model(model, layers=args.layers)
        print(json.dumps(measure(model, bucket_mb=args.bucket_mb, rounds=args.rounds)))


if __name__ == "__main__":
    main()
