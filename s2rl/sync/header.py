"""What is said before the first bucket: the sender announces, every receiver answers. Fixed-size int64 tensors."""

from __future__ import annotations

import torch

from s2rl.sync.buckets import BucketPlan

HEADER_WORDS = 6
_MAGIC = 0x53325357_00000001  # "S2SW", format 1

ACCEPTED = 1
WRONG_FORMAT = 2
WRONG_VERSION = 3
WRONG_MANIFEST = 4

REASONS = {
    WRONG_FORMAT: "the header is not one of this format (do both sides run the same s2rl?)",
    WRONG_VERSION: "it expects another version",
    WRONG_MANIFEST: "it expects other tensors or another bucket size",
}


def make_header(*, version: int, digest: int, plan: BucketPlan) -> torch.Tensor:
    """[HEADER_WORDS] int64: magic, version, digest, tensors, buckets, bytes."""
    values = [_MAGIC, version, digest, len(plan.manifest), len(plan.buckets), plan.num_bytes]
    return torch.tensor(values, dtype=torch.int64)


def check_header(header: torch.Tensor, *, version: int, digest: int, plan: BucketPlan) -> tuple[int, str]:
    """(answer, explanation) of a receiver that expects `version` of `plan`. No explanation when it accepts."""
    magic, got_version, got_digest, num_tensors, num_buckets, num_bytes = header.tolist()
    if magic != _MAGIC:
        return WRONG_FORMAT, f"its header starts with {magic:#x} instead of {_MAGIC:#x}"
    if got_version != version:
        return WRONG_VERSION, f"it is version {got_version}"
    if got_digest != digest:
        return WRONG_MANIFEST, (
            f"it has {num_tensors} tensors, {num_bytes} bytes in {num_buckets} buckets (digest {got_digest:016x}), "
            f"expected {len(plan.manifest)} tensors, {plan.num_bytes} bytes in {len(plan.buckets)} buckets "
            f"(digest {digest:016x}): names, shapes, dtypes or the bucket size differ"
        )
    return ACCEPTED, ""
