"""Sender and receiver over a real gloo group in two threads or processes of this test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from s2rl.errors import SyncError
from s2rl.sync import SyncGroup, WeightReceiver, WeightSender, check_fingerprints, fingerprint, free_port
from s2rl.sync.memory import MemoryPool
from s2rl.types import LoadReport, PublishReport, SyncGroupSpec, TensorSpec

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


def test_tensors_of_a_megabyte_travel_in_place_and_in_pieces() -> None:
    manifest = [
        TensorSpec(name="a", shape=(3, 700, 1000), dtype="bfloat16"),
        TensorSpec(name="b", shape=(17,), dtype="float32"),
        TensorSpec(name="c", shape=(1 << 19,), dtype="float32"),
    ]
    members = Members(world_size=3, bucket_bytes=(1 << 20) + 64)
    tensors = make_tensors(manifest)
    transposed = [(n, t.movedim(-1, 0).contiguous().movedim(0, -1)) for n, t in tensors]  # not contiguous
    sender = WeightSender(members.groups[0], manifest)
    receivers = [WeightReceiver(g, manifest) for g in members.groups[1:]]
    published, *received = members.run(
        lambda: sender.send(iter(transposed), 1), *(lambda r=r: take_all(r, 1) for r in receivers)
    )
    assert isinstance(published, PublishReport), published
    for tensors_of_one, receiver in zip(received, receivers, strict=True):
        assert all(torch.equal(t, want) for (_, t), (_, want) in zip(tensors_of_one, tensors, strict=True))
        assert receiver.fingerprints == dict(published.fingerprints)
    members.close()


def test_a_manifest_without_tensors_is_published(members: Members) -> None:
    sender, receiver = WeightSender(members.groups[0], []), WeightReceiver(members.groups[1], [])
    published, received = members.run(lambda: sender.send(iter([]), 3), lambda: take_all(receiver, 3))
    assert received == [] and published.num_bytes == 0 and published.fingerprints == {}


def test_a_receiver_that_expects_another_version_refuses_and_both_sides_say_so(members: Members) -> None:
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST)
    sent, received = members.run(lambda: sender.send(iter(make_tensors(MANIFEST)), 7), lambda: take_all(receiver, 8))
    assert isinstance(sent, SyncError) and isinstance(received, SyncError)
    assert "version 7 was refused by rank 1: it expects another version" in str(sent)
    assert "expects version 8" in str(received) and "it is version 7" in str(received)
    # Nothing was sent, so the group is still of use.
    again = members.run(lambda: sender.send(iter(make_tensors(MANIFEST)), 8), lambda: take_all(receiver, 8))
    assert isinstance(again[0], PublishReport)


def test_a_receiver_with_another_manifest_refuses(members: Members) -> None:
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST[:-1])
    sent, received = members.run(lambda: sender.send(iter(make_tensors(MANIFEST)), 1), lambda: take_all(receiver, 1))
    assert "rank 1: it expects other tensors or another bucket size" in str(sent)
    assert f"it has {len(MANIFEST)} tensors" in str(received) and f"expected {len(MANIFEST) - 1}" in str(received)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], r"end before 'f\.last'"),
        (lambda t: [*t, ("g.more", torch.zeros(1))], r"'g\.more', which the manifest does not have"),
        (lambda t: [t[1], t[0], *t[2:]], r"hands over 'b\.empty' .* where the manifest has 'a\.weight'"),
        (lambda t: [(n, x.float()) for n, x in t], r"'a\.weight' \(7, 3\) float32 where .* \(7, 3\) bfloat16"),
        (lambda t: [(n, x.t() if x.dim() == 2 else x) for n, x in t], r"'a\.weight' \(3, 7\) bfloat16 where"),
    ],
    ids=["missing", "extra", "order", "dtype", "shape"],
)
def test_tensors_that_differ_from_the_manifest_are_not_published(change, message: str) -> None:
    members = Members(timeout_s=1.0)
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST)
    sent, _ = members.run(lambda: sender.send(iter(change(make_tensors(MANIFEST))), 1), lambda: take_all(receiver, 1))
    assert isinstance(sent, SyncError)
    with pytest.raises(SyncError, match=message):
        raise sent
    members.close()


def test_one_tensor_that_changes_on_the_way_is_named(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's buffer is damaged after the fingerprint was taken, as faulty memory or a reused buffer would."""
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST)
    fill = WeightSender._fill

    def damaged_fill(self: WeightSender, bucket, stream) -> torch.Tensor:
        data = fill(self, bucket, stream)
        if any(self._plan.manifest[p.tensor].name == "e.weight" for p in bucket.pieces):
            data[100] ^= 16
        return data

    monkeypatch.setattr(WeightSender, "_fill", damaged_fill)
    published, _ = members.run(lambda: sender.send(iter(make_tensors(MANIFEST)), 4), lambda: take_all(receiver, 4))
    loaded = LoadReport(
        worker=2, version=4, num_bytes=receiver.num_bytes, stalled_s=0.1, fingerprints=receiver.fingerprints
    )
    with pytest.raises(SyncError, match=r"rollout worker 2, version 4.*1 tensors arrived .*: e\.weight$"):
        check_fingerprints(published, loaded)


def test_a_sender_that_is_silent_is_reported_within_the_limit() -> None:
    members = Members(timeout_s=0.5)
    receiver = WeightReceiver(members.groups[1], MANIFEST)
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"waiting for the header of version 5 failed on rank 1 .*limit 0\.5 s"):
        take_all(receiver, 5)
    assert time.monotonic() - started < 3
    members.close()


def test_a_receiver_that_stops_taking_part_is_reported_within_the_limit() -> None:
    members = Members(timeout_s=0.5)
    manifest = [TensorSpec(name=f"t{i:02d}", shape=(1 << 20,), dtype="float32") for i in range(16)]
    sender, receiver = WeightSender(members.groups[0], manifest), WeightReceiver(members.groups[1], manifest)
    (sent, _) = members.run(
        lambda: sender.send(iter(make_tensors(manifest)), 1), lambda: next(iter(receiver.receive(1)))
    )
    with pytest.raises(SyncError, match=r"sending bucket \d+ of \d+ of version 1 failed on rank 0"):
        raise sent
    members.close()


def test_memory_is_used_again_only_when_no_tensor_shares_it() -> None:
    pool = MemoryPool(max_idle_bytes=300)
    first = pool.take(100)
    view = first[10:20]
    view.fill_(7)
    address = first.data_ptr()
    del first
    assert pool.idle_bytes == 0, "a view still shares the memory"
    assert pool.take(100).data_ptr() != address
    assert view.tolist() == [7] * 10
    del view
    assert pool.idle_bytes == 200
    held = [pool.take(100) for _ in range(5)]
    del held
    assert pool.idle_bytes == 300, "no more than the limit is kept"
    assert pool.take(60).untyped_storage().nbytes() == 100
    assert pool.take(40).untyped_storage().nbytes() == 40, "a block twice too large is not wasted"


def test_a_consumer_that_forgets_tensors_makes_the_receiver_need_no_new_memory(members: Members) -> None:
    sender, receiver = WeightSender(members.groups[0], MANIFEST), WeightReceiver(members.groups[1], MANIFEST)
    addresses = []

    def consume(version: int) -> None:
        addresses.append({t.data_ptr() for _, t in receiver.receive(version) if t.numel()})

    for version in range(4):
        members.run(lambda v=version: sender.send(iter(make_tensors(MANIFEST)), v), lambda v=version: consume(v))
    assert addresses[3] <= addresses[1] | addresses[2]
