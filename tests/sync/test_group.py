"""The process group: who is missing, who died, what is left behind; vendors' backends against fakes of their API."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from s2rl.errors import SyncError
from s2rl.sync import SyncGroup, WeightReceiver, WeightSender, free_port
from s2rl.types import SyncGroupSpec, TensorSpec

MANIFEST = [TensorSpec(name=f"t{i:02d}", shape=(1 << 20,), dtype="float32") for i in range(20)]


def make_spec(
    rank: int, port: int, *, backend: str = "gloo", world_size: int = 2, timeout_s: float = 5
) -> SyncGroupSpec:
    return SyncGroupSpec(
        backend=backend,
        host="127.0.0.1",
        port=port,
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        bucket_bytes=8 << 20,
    )


def receiver_process(port: int, timeout_s: float, pipe: Connection) -> None:
    """Joins, then takes publications as told; dies by the test's hand."""
    torch.set_num_threads(1)
    group = SyncGroup(make_spec(1, port, timeout_s=timeout_s), device="cpu")
    receiver = WeightReceiver(group, MANIFEST)
    pipe.send("joined")
    version, slow_s = pipe.recv()
    for number, _ in enumerate(receiver.receive(version)):
        if number == 2:
            pipe.send("receiving")
        time.sleep(slow_s)
    pipe.send(receiver.fingerprints)
    pipe.recv()


@pytest.fixture
def start_receiver():
    context = multiprocessing.get_context("spawn")
    started = []

    def start(port: int, timeout_s: float = 60) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=receiver_process, args=(port, timeout_s, theirs), daemon=True)
        process.start()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join(timeout=10)


def make_tensors() -> list[tuple[str, torch.Tensor]]:
    return [(s.name, torch.full(s.shape, float(i))) for i, s in enumerate(MANIFEST)]


@pytest.mark.dist
def test_a_killed_receiver_is_reported_at_once_and_a_new_group_serves_its_replacement(
    start_receiver: Callable[..., tuple[Any, Connection]],
) -> None:
    tensors = make_tensors()
    port = free_port()
    process, pipe = start_receiver(port)
    group = SyncGroup(make_spec(0, port, timeout_s=60), device="cpu")
    assert pipe.recv() == "joined"
    pipe.send((3, 0.2))

    def stream():
        for number, item in enumerate(tensors):
            if number == 6:
                assert pipe.recv() == "receiving"
                os.kill(process.pid, signal.SIGKILL)
                process.join(timeout=10)
            yield item

    started = time.monotonic()
    with pytest.raises(
        SyncError, match=r"sending bucket \d+ of 10 of version 3 failed on rank 0 of 2.*a member is gone"
    ):
        WeightSender(group, MANIFEST).send(stream(), 3)
    assert time.monotonic() - started < 20, "the death was found by the time limit only"
    group.close()

    port = free_port()
    _, pipe = start_receiver(port)
    # A new interpreter imports torch before it joins; on a busy machine that takes longer than a short limit.
    group = SyncGroup(make_spec(0, port, timeout_s=60), device="cpu")
    assert pipe.recv() == "joined"
    pipe.send((4, 0.0))
    published = WeightSender(group, MANIFEST).send(iter(tensors), 4)
    assert pipe.recv() == "receiving"
    assert pipe.recv() == dict(published.fingerprints)
    group.close()


def test_a_member_that_never_comes_is_reported_within_the_limit() -> None:
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"joining the weight-sync group at 127\.0\.0\.1:\d+ as rank 0 of 2 failed"):
        SyncGroup(make_spec(0, free_port(), timeout_s=0.5), device="cpu")
    assert time.monotonic() - started < 5


def test_a_store_that_is_not_there_is_reported_within_the_limit() -> None:
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"as rank 1 of 2 failed"):
        SyncGroup(make_spec(1, free_port(), timeout_s=0.5), device="cpu")
    assert time.monotonic() - started < 10


def test_a_port_in_use_is_reported() -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        sock.listen()
        with pytest.raises(SyncError, match=r"as rank 0 of 1 failed"):
            SyncGroup(make_spec(0, sock.getsockname()[1], world_size=1, timeout_s=1), device="cpu")


def open_files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_closing_releases_sockets_and_threads_and_is_idempotent() -> None:
    SyncGroup(make_spec(0, free_port(), world_size=1), device="cpu").close()  # what torch keeps for good is there now
    before = open_files_and_threads()
    for _ in range(5):
        group = SyncGroup(make_spec(0, free_port(), world_size=1), device="cpu")
        group.close()
        group.close()
    deadline = time.monotonic() + 5
    while open_files_and_threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files_and_threads() <= before
    with pytest.raises(SyncError, match="has already left"):
        group.exchange(1, label="after the end")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SyncError, match=r"no process group backend named 'carrier'; known: .*gloo.*nccl"):
        SyncGroup(make_spec(0, free_port(), backend="carrier"), device="cpu")


class FakeWork:
    """As accelerators' works: `wait` returns when the stream knows the order; `is_completed` tells the truth."""

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.waited = False

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> bool:
        self.waited = True
        return True


class FakeVendorGroup:
    """The part of torch's Backend interface that torch_npu's ProcessGroupHCCL has and the group uses."""

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.broadcasts: list[tuple[int, int]] = []
        self.aborted = False
        self.works: list[FakeWork] = []

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> FakeWork:
        self.broadcasts.append((options.rootRank, tensors[0].numel()))
        self.works.append(FakeWork(self.polls))
        return self.works[-1]

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> FakeWork:
        return FakeWork(0)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A backend registered as torch_npu registers hccl: `extended_api`, options in, process group out."""
    made: dict[str, Any] = {"polls": 3}

    def create(options: Any, pg_options: Any) -> FakeVendorGroup:
        assert pg_options is None
        made.update(
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout.total_seconds(),
            ranks=options.global_ranks_in_group,
        )
        made["group"] = FakeVendorGroup(made["polls"])
        return made["group"]

    plugins = dict(dist.Backend._plugins)
    plugins["FAKECCL"] = dist.Backend._BackendPlugin(create, True)
    monkeypatch.setattr(dist.Backend, "_plugins", plugins)
    return made


def test_a_vendors_registered_backend_is_built_through_torchs_plugin_interface(vendor: dict[str, Any]) -> None:
    group = SyncGroup(make_spec(0, free_port(), backend="fakeccl", world_size=1), device="cpu")
    assert (vendor["rank"], vendor["size"], vendor["timeout"], vendor["ranks"]) == (0, 1, 5.0, [0])
    group.broadcast(torch.zeros(5 << 20, dtype=torch.uint8), label="x").wait()
    assert vendor["group"].broadcasts == [(0, 5 << 20)], "device buffers are not cut into pieces"
    assert vendor["group"].works[0].waited, "the stream must be ordered after the transfer"
    group.close()
    assert vendor["group"].aborted


def test_a_device_operation_that_never_completes_is_reported_within_the_limit(vendor: dict[str, Any]) -> None:
    vendor["polls"] = 10**9
    group = SyncGroup(make_spec(0, free_port(), backend="fakeccl", world_size=1, timeout_s=0.3), device="cpu")
    with pytest.raises(SyncError, match=r"sending bucket 9 failed on rank 0 of 1 .*timed out"):
        group.broadcast(torch.zeros(4), label="sending bucket 9").wait()
    group.close()


def test_nccl_is_built_with_the_limit_as_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class FakeNccl(FakeVendorGroup):
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(polls=0)
            made.update(rank=rank, size=size, timeout=options._timeout.total_seconds())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    SyncGroup(make_spec(0, free_port(), backend="nccl", world_size=1), device="cpu").close()
    assert made == {"rank": 0, "size": 1, "timeout": 5.0}
