"""Streams the sharded policy as full tensors in the layout that the checkpoint on disk has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from s2rl.config.schema import Dtype
from s2rl.fsdp.model import ShardedPolicy
from s2rl.types import TensorSpec


def export_manifest(policy: ShardedPolicy, *, rollout_dtype: Dtype) -> list[TensorSpec]:
    """The tensors of a publication, sorted by name.

    An engine that computes in float32 gets the masters as they are. Another one would round them anyway, so each goes
    out in the type that the model folder holds it in, which keeps types that were chosen tensor by tensor.
    """
    return [
        TensorSpec(
            name=name, shape=tensor.shape, dtype="float32" if rollout_dtype == "float32" else _storable(tensor.dtype)
        )
        for name, tensor in sorted(policy.disk.items())
    ]


def _storable(dtype: str) -> str:
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


def export_tensors(
    policy: ShardedPolicy, manifest: list[TensorSpec], *, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors on `device` one after the other, in the manifest's order (collective: every rank iterates to
    the end).

    Shards are cast before they are gathered, so that half the bytes travel and no full float32 tensor exists. On one
    rank a tensor may share memory with the policy: it is valid until the next step.
    """
    owners = {part.name: (name, part) for name, parts in policy.stored.items() for part in parts}
    gathered: dict[tuple[str, str], Tensor] = {}
    waiting = Counter((owners[spec.name][0], spec.dtype) for spec in manifest)
    for spec in manifest:
        name, part = owners[spec.name]
        key = (name, spec.dtype)
        if key not in gathered:
            gathered[key] = _gather(policy.parameters[name], dtype=spec.dtype, device=device)
        waiting[key] -= 1
        # A parameter whose parts are many tensors (experts) is kept until the last of them; in the order of names,
        # those of a layer follow each other.
        full = gathered[key] if waiting[key] else gathered.pop(key)
        yield spec.name, part.of(full)


def _gather(parameter: Tensor, *, dtype: str, device: torch.device) -> Tensor:
    shard = parameter.detach()
    assert isinstance(shard, DTensor)
    # Shards that are kept in host memory go to the device first: its collectives do not take host tensors.
    cast = shard.to(device=device, dtype=getattr(torch, dtype))
    assert isinstance(cast, DTensor)
    return cast.full_tensor()
