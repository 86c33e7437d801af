"""Bytes per second of a weight sync over a raw gloo broadcast of the same bytes, in one run.

    OMP_NUM_THREADS=1 python bench/sync/run.py

Two processes. One sends the weights of a model of SmolLM2-135M's shapes with the real sender, the other takes them
with the real receiver, both fingerprint every tensor. The raw broadcast moves the same number of bytes into memory that
already exists, with nothing computed, two operations in flight: in buffers of the bucket's size, which is its fastest
way, and in one operation for each tensor, which is how a loop over the parameters would send them. All three alternate;
the ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch

from s2rl.sync import SyncGroup, WeightReceiver, WeightSender, free_port
from s2rl.types import SyncGroupSpec, TensorSpec

MIB = 1 << 20


def smollm_manifest(*, layers: int) -> list[TensorSpec]:
    """SmolLM2-135M's tensors (hidden 576, 9 heads, 3 key-value heads, vocabulary 49,152, tied embeddings), bfloat16."""
    hidden, inner, kv = 576, 1536, 192
    shapes = {"model.embed_tokens.weight": (49152, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
        }
    return [TensorSpec(name=n, shape=s, dtype="bfloat16") for n, s in sorted(shapes.items())]


def raw_broadcast(group: SyncGroup, buffers: Sequence[torch.Tensor]) -> float:
    """Seconds for broadcasting all `buffers`, two in flight. Ends when every member has everything."""
    group.exchange(1, label="raw start")
    start = time.perf_counter()
    flight: list[Any] = []
    for buffer in buffers:
        if len(flight) == 2:
            flight.pop(0).wait()
        flight.append(group._pg.broadcast([buffer], torch.distributed.BroadcastOptions()))
    for work in flight:
        work.wait()
    group.exchange(1, label="raw end")
    return time.perf_counter() - start


def member(rank: int, spec: SyncGroupSpec, layers: int, rounds: int, results: Queue[Any]) -> None:
    """One of the two processes; rank 0 reports (raw, raw by tensor, sync) seconds for each round."""
    torch.set_num_threads(1)
    manifest = smollm_manifest(layers=layers)
    group = SyncGroup(spec, device="cpu")
    torch.manual_seed(rank)
    weights = [(s.name, torch.randn(s.shape).to(torch.bfloat16)) for s in manifest] if rank == 0 else []
    total = sum(2 * torch.Size(s.shape).numel() for s in manifest)
    flat = torch.full((total,), rank, dtype=torch.uint8)
    endpoint: Any = WeightSender(group, manifest) if rank == 0 else WeightReceiver(group, manifest)
    for version in range(rounds + 1):
        raw = raw_broadcast(group, flat.split(spec.bucket_bytes))
        by_tensor = raw_broadcast(group, flat.split([2 * torch.Size(s.shape).numel() for s in manifest]))
        group.exchange(1, label="sync start")
        start = time.perf_counter()
        if rank == 0:
            published = endpoint.send(iter(weights), version)
        else:
            for _name, _tensor in endpoint.receive(version):
                pass
        group.exchange(1, label="sync end")
        seconds = time.perf_counter() - start
        if rank == 0 and version:  # the first round pays for connections and first touches
            results.put((raw, by_tensor, seconds, total))
        elif rank == 1 and version == rounds:
            results.put(endpoint.fingerprints)
    if rank == 0:
        results.put(dict(published.fingerprints))
    group.exchange(1, label="end")
    group.close()


def measure(*, bucket_mb: float, layers: int, rounds: int) -> dict[str, float]:
    """One measurement with one bucket size."""
    context = get_context("spawn")
    results: Queue[Any] = context.Queue()
    port = free_port()
    processes = []
    for rank in range(2):
        spec = SyncGroupSpec(
            backend="gloo",
            host="127.0.0.1",
            port=port,
            rank=rank,
            world_size=2,
            timeout_s=60,
            bucket_bytes=int(bucket_mb * MIB),
        )
        processes.append(context.Process(target=member, args=(rank, spec, layers, rounds, results)))
    for process in processes:
        process.start()
    got = [results.get(timeout=300) for _ in range(rounds + 2)]
    for process in processes:
        process.join(timeout=60)
    prints = [item for item in got if isinstance(item, dict)]
    assert len(prints) == 2 and prints[0] == prints[1], "fingerprints of the two sides differ"
    times = [item for item in got if not isinstance(item, dict)]
    total = times[0][3]
    return {
        "bucket_mb": bucket_mb,
        "bytes": total,
        "raw_gb_per_s": total / statistics.median(t[0] for t in times) / 1e9,
        "raw_by_tensor_gb_per_s": total / statistics.median(t[1] for t in times) / 1e9,
        "sync_gb_per_s": total / statistics.median(t[2] for t in times) / 1e9,
        "ratio": statistics.median(t[0] / t[2] for t in times),
        "ratio_to_raw_by_tensor": statistics.median(t[1] / t[2] for t in times),
    }


def main() -> None:
    """Measure each bucket size and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[16.0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file too")
    args = parser.parse_args()
    rows = []
    for bucket_mb in args.bucket_mb:
        rows.append(measure(bucket_mb=bucket_mb, layers=args.layers, rounds=args.rounds))
        print(json.dumps({k: round(v, 3) for k, v in rows[-1].items()}), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
