"""Sender and receiver over a real gloo group in two threads or processes of this test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from s2rl.errors import SyncError
from s2rl.sync import SyncGroup, WeightReceiver, WeightSender, fingerprint, free_port
from s2rl.types import PublishReport, SyncGroupSpec, TensorSpec

MANIFEST = [
    TensorSpec(name="a.weight", shape=(7, 3), dtype="bfloat16"),
    TensorSpec(name="b.empty", shape=(0, 4), dtype="float32"),
    TensorSpec(name="c.large", shape=(1000, 33), dtype="float32"),
    TensorSpec(name="d.scalar", shape=(), dtype="float32"),
    TensorSpec(name="e.weight", shape=(64, 64), dtype="float16"),
    TensorSpec(name="f.last", shape=(129,), dtype="bfloat16"),
]


def make_tensors(manifest: list[TensorSpec], *, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(s.name, torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype))) for s in manifest]


class Members:
    """The members of one group, each in a thread of its own: gloo's waits release the interpreter lock."""

    def __init__(self, *, world_size: int = 2, bucket_bytes: int = 16384, timeout_s: float = 10.0) -> None:
        port = free_port()
        self.groups: list[SyncGroup | None] = [None] * world_size

        def join(rank: int) -> None:
            spec = SyncGroupSpec(
                backend="gloo",
                host="127.0.0.1",
                port=port,
                rank=rank,
                world_size=world_size,
                timeout_s=timeout_s,
                bucket_bytes=bucket_bytes,
            )
            self.groups[rank] = SyncGroup(spec, device="cpu")

        self.run(*(lambda r=r: join(r) for r in range(world_size)))

    @staticmethod
    def run(*calls: Callable[[], object]) -> list[object]:
        """Call all at the same time; a result or the SyncError it raised for each."""
        results: list[object] = [None] * len(calls)

        def call(index: int) -> None:
            try:
                results[index] = calls[index]()
            except SyncError as error:
                results[index] = error

        threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a member hangs"
        return results

    def close(self) -> None:
        for group in self.groups:
            if group is not None:
                group.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def take_all(receiver: WeightReceiver, version: int) -> list[tuple[str, torch.Tensor]]:
    return list(receiver.receive(version))


def test_every_tensor_arrives_bit_for_bit_and_keeps_its_bytes_through_the_next_publication(members: Members) -> None:
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST)
    kept = []
    for version in range(3):
        tensors = make_tensors(MANIFEST, seed=version)
        published, received = members.run(
            lambda t=tensors, v=version: sender.send(iter(t), v), lambda v=version: take_all(receiver, v)
        )
        assert isinstance(published, PublishReport), published
        kept.append((tensors, received))
        assert published.version == version
        assert published.num_bytes == receiver.num_bytes == sum(t.numel() * t.element_size() for _, t in tensors)
        assert dict(published.fingerprints) == receiver.fingerprints == {n: fingerprint(t) for n, t in tensors}
    for tensors, received in kept:
        assert [n for n, _ in received] == [n for n, _ in tensors]
        for (_, sent), (_, got) in zip(tensors, received, strict=True):
            assert got.shape == sent.shape and got.dtype == sent.dtype
            assert torch.equal(got, sent)
