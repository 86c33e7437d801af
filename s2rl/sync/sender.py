"""The learner's side of a weight sync: a stream of full tensors goes out in buckets.

consumes   named tensors in manifest order, one at a time
produces   broadcasts over the group; a PublishReport
waits for  every receiver at the start (header and answer), older transfers while six buckets' bytes are in flight
woken by   the receivers' own broadcasts; all waits end within the group's limit
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from s2rl.errors import SyncError
from s2rl.sync.buckets import Bucket, BucketPlan, manifest_digest
from s2rl.sync.fingerprint import Fingerprinter, as_bytes
from s2rl.sync.group import SyncGroup, Transfer
from s2rl.sync.header import ACCEPTED, REASONS, make_header
from s2rl.types import PublishReport, TensorSpec

logger = logging.getLogger(__name__)

_NUM_BUFFERS = 6


class WeightSender:
    """Streams publications to the members of a group. Holds six buffers of one bucket each, no copy of the model.

    What is in flight at once, buffers and large tensors together, is at most six buckets' bytes.
    """

    def __init__(self, group: SyncGroup, manifest: Sequence[TensorSpec]) -> None:
        assert group.rank == 0, "only rank 0 sends"
        self._group = group
        self._plan = BucketPlan.build(manifest, bucket_bytes=group.spec.bucket_bytes)
        self._digest = manifest_digest(manifest, bucket_bytes=group.spec.bucket_bytes)
        self._large = torch.empty(0, dtype=torch.uint8)
        largest = max((b.num_bytes for b in self._plan.buckets if not b.is_slice), default=0)
        self._buffers = deque(
            torch.empty(largest, dtype=torch.uint8, device=group.device) for _ in range(_NUM_BUFFERS if largest else 0)
        )

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> PublishReport:
        """Publish `tensors` as `version`; returns when every byte is handed over.

        They must be those of the manifest, in its order; a tensor must not change until this returns.
        Raises SyncError when the stream differs from the manifest, a receiver refuses, or a member is gone.
        """
        start = time.perf_counter()
        self._open(version)
        stream = _Stream(tensors, manifest=self._plan.manifest, device=self._group.device, version=version)
        flight = _Flight(max_bytes=_NUM_BUFFERS * self._plan.bucket_bytes, max_packed=_NUM_BUFFERS)
        count = len(self._plan.buckets)
        for number, bucket in enumerate(self._plan.buckets):
            flight.make_room(bucket)
            data = self._fill(bucket, stream)
            if bucket.num_bytes:
                label = f"sending bucket {number + 1} of {count} of version {version}"
                flight.add(bucket, self._group.broadcast(data, label=label))
            stream.read_last()
        stream.check_end()
        flight.land()
        seconds = time.perf_counter() - start
        logger.debug("published version %d: %d bytes in %.3f s", version, self._plan.num_bytes, seconds)
        return PublishReport(
            version=version, num_bytes=self._plan.num_bytes, seconds=seconds, fingerprints=stream.fingerprints()
        )

    def _open(self, version: int) -> None:
        header = make_header(version=version, digest=self._digest, plan=self._plan).to(self._group.device)
        self._group.broadcast(header, label=f"sending the header of version {version}").wait()
        answers = self._group.exchange(ACCEPTED, label=f"waiting for the receivers' answer to version {version}")
        refused = [f"rank {r}: {REASONS.get(a, 'unknown answer')}" for r, a in enumerate(answers) if a != ACCEPTED]
        if refused:
            raise SyncError(f"weight sync of version {version} was refused by {'; '.join(refused)}")

    def _fill(self, bucket: Bucket, stream: _Stream) -> torch.Tensor:
        """The bytes of one bucket: a filled buffer, or a slice of the large tensor itself."""
        if bucket.is_slice:
            (piece,) = bucket.pieces
            if piece.tensor_offset == 0:
                self._large = as_bytes(stream.take(piece.tensor))
            end = piece.tensor_offset + piece.num_bytes
            data = self._large[piece.tensor_offset : end]
            if end == self._large.numel():
                self._large = data[:0].clone()  # the transfer keeps the memory that it still needs
            return data
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        for piece in bucket.pieces:
            stream.take(piece.tensor, copy_to=buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes])
        return buffer[: bucket.num_bytes]


class _Flight:
    """The transfers that are not known to be done, oldest first."""

    def __init__(self, *, max_bytes: int, max_packed: int) -> None:
        self._max_bytes = max_bytes
        self._max_packed = max_packed
        self._transfers: deque[tuple[Bucket, Transfer]] = deque()

    def make_room(self, bucket: Bucket) -> None:
        """Wait until `bucket` may start: its bytes fit, and if it needs a buffer, the oldest is free."""
        while self._transfers and (self._num_bytes + bucket.num_bytes > self._max_bytes or self._needs_buffer(bucket)):
            self._transfers.popleft()[1].wait()

    def add(self, bucket: Bucket, transfer: Transfer) -> None:
        """`bucket` is on its way."""
        self._transfers.append((bucket, transfer))

    def land(self) -> None:
        """Wait for all."""
        while self._transfers:
            self._transfers.popleft()[1].wait()

    @property
    def _num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket, _ in self._transfers)

    def _needs_buffer(self, bucket: Bucket) -> bool:
        packed = sum(not flying.is_slice for flying, _ in self._transfers)
        return not bucket.is_slice and packed >= self._max_packed


class _Stream:
    """The tensors as they come, each checked against the manifest and fingerprinted."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        manifest: Sequence[TensorSpec],
        device: torch.device,
        version: int,
    ) -> None:
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(tensors)
        self._manifest = manifest
        self._device = device
        self._where = f"publishing version {version}"
        self._prints = Fingerprinter()
        self._unread: tuple[str, torch.Tensor] | None = None

    def take(self, index: int, *, copy_to: torch.Tensor | None = None) -> torch.Tensor:
        """The next tensor, which must be number `index` of the manifest."""
        spec = self._manifest[index]
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise SyncError(f"{self._where}: the learner's tensors end before {spec.name!r}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (name, tuple(tensor.shape), dtype) != (spec.name, spec.shape, spec.dtype):
            raise SyncError(
                f"{self._where}: the learner hands over {name!r} {tuple(tensor.shape)} {dtype} where the manifest has "
                f"{spec.name!r} {spec.shape} {spec.dtype}"
            )
        tensor = tensor.detach()
        if tensor.device.type != self._device.type:
            tensor = tensor.to(self._device)
        tensor = tensor.contiguous()
        if copy_to is None:
            self._unread = (name, tensor)
        else:
            self._prints.add(name, tensor, copy_to=copy_to)
        return tensor

    def read_last(self) -> None:
        """Fingerprint a tensor that travels in place, once it is on its way: nobody has to wait for that."""
        if self._unread is not None:
            self._prints.add(*self._unread)
            self._unread = None

    def fingerprints(self) -> dict[str, int]:
        """By name, of all tensors taken."""
        return self._prints.results()

    def check_end(self) -> None:
        """Raise SyncError when there are more tensors than the manifest has."""
        name, _ = next(self._tensors, (None, None))
        if name is not None:
            raise SyncError(f"{self._where}: the learner hands over {name!r}, which the manifest does not have")
