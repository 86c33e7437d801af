"""The rollout worker's side of a weight sync: buckets come in, named tensors in checkpoint layout come out.

    consumes   broadcasts of the group's rank 0
    produces   named tensors in manifest order, each with memory that is never written again
    waits for  the sender's next bucket
    woken by   the sender; all waits end within the group's limit

An engine may keep tensors until a whole layer is there (vLLM's layerwise reload does), so a receive buffer that is used
again would silently change weights that are not loaded yet. Each bucket therefore has memory of its own, which is given
up with the last tensor of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from s2rl.errors import SyncError
from s2rl.sync.buckets import Bucket, BucketPlan, manifest_digest, tensor_bytes
from s2rl.sync.fingerprint import Fingerprinter
from s2rl.sync.group import SyncGroup, Transfer
from s2rl.sync.header import ACCEPTED, HEADER_WORDS, check_header
from s2rl.sync.memory import MemoryPool
from s2rl.types import TensorSpec

_AHEAD_BUCKETS = 6
_IDLE_BUCKETS = 12
_NOTHING = torch.empty(0, dtype=torch.uint8)


class WeightReceiver:
    """Receives publications. After `receive` is exhausted, `fingerprints` and `num_bytes` describe what came."""

    def __init__(self, group: SyncGroup, manifest: Sequence[TensorSpec]) -> None:
        assert group.rank > 0, "rank 0 sends"
        self._group = group
        self._plan = BucketPlan.build(manifest, bucket_bytes=group.spec.bucket_bytes)
        self._digest = manifest_digest(manifest, bucket_bytes=group.spec.bucket_bytes)
        largest = max((tensor_bytes(spec) for spec in manifest), default=0)
        self._pool = MemoryPool(max_idle_bytes=_IDLE_BUCKETS * self._plan.bucket_bytes + largest)
        self._ahead_bytes = _AHEAD_BUCKETS * self._plan.bucket_bytes
        self._large = _NOTHING
        self._prints = Fingerprinter()
        self._fingerprints: dict[str, int] = {}
        self._complete = False

    @property
    def fingerprints(self) -> dict[str, int]:
        """Per tensor name, of what was handed over by the last `receive`."""
        assert self._complete, "the last publication was not received to its end"
        return self._fingerprints

    @property
    def num_bytes(self) -> int:
        """Bytes of one publication."""
        return self._plan.num_bytes

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of `version` in manifest order. Collective with the sender's `send`.

        Up to six buckets' bytes are received while the caller works on a tensor. Raises SyncError when the sender
        announces another version or other tensors, when it is gone or silent for longer than the group's limit. The
        caller must take all tensors: stopping early leaves the group unusable.
        """
        self._complete = False
        self._fingerprints = {}
        self._prints = Fingerprinter()
        self._open(version)
        posted: deque[_Arriving] = deque()
        for number, bucket in enumerate(self._plan.buckets):
            while posted and sum(a.bucket.num_bytes for a in posted) + bucket.num_bytes > self._ahead_bytes:
                yield from self._take(posted.popleft())
            posted.append(self._post(number, version=version))
        while posted:
            yield from self._take(posted.popleft())
        self._fingerprints = self._prints.results()
        self._complete = True

    def _open(self, version: int) -> None:
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=self._group.device)
        self._group.broadcast(header, label=f"waiting for the header of version {version}").wait()
        answer, explanation = check_header(header, version=version, digest=self._digest, plan=self._plan)
        self._group.exchange(answer, label=f"answering the header of version {version}")
        if answer != ACCEPTED:
            raise SyncError(
                f"receiver rank {self._group.rank} expects version {version} and refuses what the learner announces: "
                f"{explanation}"
            )

    def _post(self, number: int, *, version: int) -> _Arriving:
        """Start to receive bucket `number`."""
        buckets = self._plan.buckets
        bucket = buckets[number]
        if bucket.is_slice:
            (piece,) = bucket.pieces
            if piece.tensor_offset == 0:
                self._large = self._allocate(tensor_bytes(self._plan.manifest[piece.tensor]))
            memory = self._large
            end = piece.tensor_offset + piece.num_bytes
            target = memory[piece.tensor_offset : end]
            if end == memory.numel():
                self._large = _NOTHING
        else:
            target = memory = self._allocate(bucket.num_bytes)
        label = f"receiving bucket {number + 1} of {len(buckets)} of version {version}"
        transfer = self._group.broadcast(target, label=label) if bucket.num_bytes else None
        return _Arriving(bucket=bucket, memory=memory, transfer=transfer)

    def _take(self, arriving: _Arriving) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for a bucket and hand over what is complete with it."""
        if arriving.transfer is not None:
            arriving.transfer.wait()
        for name, tensor in self._tensors(arriving):
            self._prints.add(name, tensor)
            yield name, tensor

    def _tensors(self, arriving: _Arriving) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete with this bucket."""
        for piece in arriving.bucket.pieces:
            spec = self._plan.manifest[piece.tensor]
            if arriving.bucket.is_slice:
                if piece.tensor_offset + piece.num_bytes < arriving.memory.numel():
                    return
                data = arriving.memory
            else:
                data = arriving.memory[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            yield spec.name, data.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self._group.device.type == "cpu":
            return self._pool.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arriving:
    """A bucket that is on its way."""

    bucket: Bucket
    memory: torch.Tensor
    """uint8; of the bucket, or of the whole large tensor that the bucket is a part of."""
    transfer: Transfer | None
