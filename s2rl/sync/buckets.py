"""How the tensors of a manifest are laid out in fixed-size buckets. Pure Python: the same plan on every side.

Small tensors share a bucket, each whole and aligned, so that the receiver can hand out views. A tensor from 8 MiB on
(or above the bucket size) has buckets of its own, in pieces if it is larger than one, so that neither side copies it
into or out of a buffer: the sender transfers slices of the tensor itself, the receiver fills slices of the final one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from s2rl.types import TensorSpec

ALIGNMENT = 64
"""Bytes. Every whole tensor starts at a multiple of this in its bucket: one cache line, enough for any dtype view."""

DIRECT_BYTES = 8 << 20
"""Tensors of at least this many bytes have buckets of their own. Below, a transfer's fixed cost exceeds that of a
copy, whose source the fingerprint has just brought into the cache."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the dtypes that a manifest may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of bytes of one tensor in one bucket."""

    tensor: int
    """Index into the manifest."""
    tensor_offset: int
    """First byte within the tensor."""
    bucket_offset: int
    """First byte within the bucket."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One transfer. `num_bytes` of it are used; no more than that is sent."""

    pieces: tuple[Piece, ...]
    num_bytes: int
    is_slice: bool = False
    """Whether it is one slice, or all, of a single tensor that is transferred in place (then it has one piece)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """The buckets of one publication, in the order in which they travel."""

    manifest: tuple[TensorSpec, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    num_bytes: int
    """Bytes of all tensors, alignment gaps not counted."""

    @classmethod
    def build(cls, manifest: Sequence[TensorSpec], *, bucket_bytes: int) -> BucketPlan:
        """Lay out `manifest` (sorted by name, names unique). Raises ValueError for a manifest that is not."""
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least {ALIGNMENT}")
        _check_manifest(manifest)
        size = bucket_bytes - bucket_bytes % ALIGNMENT
        buckets: list[Bucket] = []
        open_pieces: list[Piece] = []
        used = 0

        def flush() -> None:
            nonlocal used
            if open_pieces:
                buckets.append(Bucket(pieces=tuple(open_pieces), num_bytes=used))
                open_pieces.clear()
            used = 0

        for index, spec in enumerate(manifest):
            num_bytes = tensor_bytes(spec)
            if num_bytes > size or num_bytes >= DIRECT_BYTES:
                flush()
                buckets.extend(_slices(index, num_bytes, size))
                continue
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            if offset + num_bytes > size:
                flush()
                offset = 0
            open_pieces.append(Piece(tensor=index, tensor_offset=0, bucket_offset=offset, num_bytes=num_bytes))
            used = offset + num_bytes
        flush()
        total = sum(tensor_bytes(spec) for spec in manifest)
        return cls(manifest=tuple(manifest), bucket_bytes=size, buckets=tuple(buckets), num_bytes=total)


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor. Raises ValueError for a dtype outside `DTYPE_BYTES`."""
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {spec.name!r} has dtype {spec.dtype!r}; allowed: {', '.join(sorted(DTYPE_BYTES))}")
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def manifest_digest(manifest: Sequence[TensorSpec], *, bucket_bytes: int) -> int:
    """A 63-bit number of everything that both sides must agree on before the first bucket."""
    content = [[spec.name, list(spec.shape), spec.dtype] for spec in manifest]
    text = json.dumps([bucket_bytes, ALIGNMENT, content], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _check_manifest(manifest: Sequence[TensorSpec]) -> None:
    for before, after in itertools.pairwise(manifest):
        if before.name >= after.name:
            how = "twice" if before.name == after.name else f"after {before.name!r}"
            raise ValueError(f"manifest names {after.name!r} {how}; names must be unique and sorted")


def _slices(index: int, num_bytes: int, size: int) -> list[Bucket]:
    buckets = []
    for start in range(0, num_bytes, size):
        length = min(size, num_bytes - start)
        piece = Piece(tensor=index, tensor_offset=start, bucket_offset=0, num_bytes=length)
        buckets.append(Bucket(pieces=(piece,), num_bytes=length, is_slice=True))
    return buckets
