"""Speed and memory of an export beside `cp -r` of the same folder, in one run.

    python -m bench.export.run [--gb 4] [--rounds 3] [--experts fused|per-expert]

A synthetic Qwen3-MoE folder in bfloat16 with shards of 1 GB, and a checkpoint of all its parameters in float32, both
without a model object. Copy and export alternate; each ends with its files on disk. The export also reads the
checkpoint twice, for its checksums and its values, which are twice the folder's bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.report import machine
from s2rl.ckpt import CheckpointStore

HIDDEN, INNER, EXPERTS, VOCAB, HEAD_DIM, HEADS, KV_HEADS = 2048, 768, 32, 32000, 128, 16, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
}


def parameter_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Parameters of the model by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate.weight": (EXPERTS, HIDDEN),
            prefix + "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
            prefix + "mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
        }
    return shapes


def stored(name: str, tensor: torch.Tensor, *, experts: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors on disk of one parameter."""
    if experts == "fused" or ".experts." not in name:
        yield name, tensor
        return
    prefix, _, kind = name.rpartition(".")
    for index, expert in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{index}.down_proj.weight", expert.clone()
        else:
            for part, matrix in zip(("gate", "up"), expert.chunk(2), strict=True):
                yield f"{prefix}.{index}.{part}_proj.weight", matrix.clone()


def make(folder: Path, *, gigabytes: float, experts: str) -> tuple[Path, Path]:
    """Source folder and run folder."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    source, run = folder / "source", folder / "run"
    source.mkdir(parents=True)
    per_layer = 2 * EXPERTS * 3 * INNER * HIDDEN
    shapes = parameter_shapes(max(1, round(gigabytes * 1e9 / per_layer)))
    (source / "config.json").write_text(json.dumps(CONFIG))
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    masters: dict[str, Any] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, source / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        value = torch.empty(shape, dtype=torch.bfloat16).normal_()
        masters[f"model.{name}"] = value.float().add_(0.01)
        shard.update(stored(name, value, experts=experts))
        if sum(t.numel() * 2 for t in shard.values()) > 1e9:
            flush()
    if shard:
        flush()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    store = CheckpointStore(run / "checkpoints", keep=1, config_digest="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(masters, storage_writer=dcp.FileSystemWriter(store.begin(1)), no_dist=True)
    store.commit(1, state={}, outstanding=())
    return source, run


EXPORT = """
import json, re, sys, time
from pathlib import Path
from s2rl.export import export_model
start = time.perf_counter()
export_model(Path(sys.argv[1]), source=Path(sys.argv[2]), out=Path(sys.argv[3]), workers=int(sys.argv[4]))
seconds = time.perf_counter() - start
status = Path("/proc/self/status").read_text()  # of this program alone; the resource usage counts its parent's memory
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
print(json.dumps({"seconds": seconds, "peak_mb": peak}))
"""


def export_once(run: Path, source: Path, out: Path, *, workers: int) -> dict[str, float]:
    """Seconds and peak memory of an export in a process of its own, without starting Python."""
    command = [sys.executable, "-c", EXPORT, str(run), str(source), str(out), str(workers)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(printed.splitlines()[-1])
    return result


def copy_once(source: Path, out: Path) -> float:
    """Seconds of `cp -r`, until the bytes are on disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    subprocess.run(["sync", *(str(f) for f in out.iterdir())], check=True)
    return time.perf_counter() - start


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--experts", choices=("fused", "per-expert"), default="fused")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder when not given")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, run = make(folder, gigabytes=arguments.gb, experts=arguments.experts)
        num_bytes = sum(f.stat().st_size for f in source.iterdir())
        copies, exports = [], []
        for _ in range(arguments.rounds):
            copies.append(copy_once(source, folder / "copy"))
            shutil.rmtree(folder / "copy")
            exports.append(export_once(run, source, folder / "out", workers=arguments.workers))
            shutil.rmtree(folder / "out")
    copied = statistics.median(copies)
    exported = statistics.median(e["seconds"] for e in exports)
    ratio = statistics.median(c / e["seconds"] for c, e in zip(copies, exports, strict=True))
    largest = 4 * max(torch.Size(s).numel() for s in parameter_shapes(1).values()) / 2**20
    print(
        f"{num_bytes / 1e9:.2f} GB, experts {arguments.experts}: cp -r {num_bytes / copied / 1e9:.2f} GB/s, export "
        f"{num_bytes / exported / 1e9:.2f} GB/s, ratio {ratio:.2f}; peak memory "
        f"{max(e['peak_mb'] for e in exports):.0f} MiB, largest parameter {largest:.0f} MiB"
    )


if __name__ == "__main__":
    main()
