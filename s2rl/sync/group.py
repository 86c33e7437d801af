"""The process group of weight sync: built once, apart from torch's default group, which FSDP and vLLM each own.

Rank 0 (learner rank 0) hosts the rendezvous store and is the root of every broadcast. One thread per process issues the
operations, in the same order on every rank; on an accelerator it is the thread that owns the device. Every wait ends
within `spec.timeout_s`; a time-out or a dead peer is a `SyncError` that says in which operation. After that the group
is of no use: close it and build another one with a fresh port.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from s2rl.errors import SyncError
from s2rl.types import SyncGroupSpec

logger = logging.getLogger(__name__)

_POLL_S = 0.0001
_GLOO_THREADS = 4
"""As many operations as gloo runs at once: each begins with an exchange of messages, which the others' bytes hide."""


def free_port(*, host: str = "") -> int:
    """A TCP port that is free on this machine now. Ask on the machine that will host the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


@dataclass(kw_only=True)
class Transfer:
    """One operation in flight. It keeps its tensor alive until it is waited for."""

    tensor: torch.Tensor
    label: str
    _work: Any
    _group: SyncGroup
    _started: float

    def wait(self) -> None:
        """Return when the tensor is sent or filled; raise SyncError after `spec.timeout_s` or when a peer is gone."""
        self._group.finish(self._work, label=self.label, started=self._started)


class SyncGroup:
    """A group of one sender (rank 0) and its receivers. `close()` releases its sockets and threads."""

    def __init__(self, spec: SyncGroupSpec, *, device: str) -> None:
        """Join the group: returns when all `spec.world_size` members are there, or raises SyncError.

        `device` is a torch device string (`cpu`, `cuda:0`, `npu:0`); tensors handed to the group live there.
        """
        if spec.backend not in _BUILDERS and spec.backend.upper() not in dist.Backend._plugins:
            raise SyncError(
                f"no process group backend named {spec.backend!r}; known: "
                f"{', '.join(sorted({*_BUILDERS, *(n.lower() for n in dist.Backend._plugins)}))}"
            )
        self.spec = spec
        self.device = torch.device(device)
        self._timeout = timedelta(seconds=spec.timeout_s)
        # gloo works on the host and its wait blocks; the others return from wait when the stream knows the order.
        self._waits_on_host = spec.backend == "gloo"
        self._pg: Any = None
        self._store: Any = None
        where = f"joining the weight-sync group at {spec.host}:{spec.port} as rank {spec.rank} of {spec.world_size}"
        try:
            self._store = dist.TCPStore(
                spec.host,
                spec.port,
                spec.world_size,
                is_master=spec.rank == 0,
                timeout=self._timeout,
                wait_for_workers=False,
            )
            build = _BUILDERS.get(spec.backend, _build_plugin)
            self._pg = build(spec, self._store, self._timeout)
            self._meet(where)
        except (RuntimeError, ValueError, OSError) as error:
            self.close()
            raise SyncError(f"{where} failed within {spec.timeout_s:g} s: {_first_line(error)}") from error

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self.spec.rank

    @property
    def world_size(self) -> int:
        """Number of members."""
        return self.spec.world_size

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0, label: str) -> Transfer:
        """Start to send (on `root`) or fill (elsewhere) a contiguous flat tensor. `label` names it in errors."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._timeout
        return self._start(label, tensor, lambda pg: pg.broadcast([tensor], options))

    def exchange(self, value: int, *, label: str) -> list[int]:
        """Every member's value, by rank. Collective; waits for all members."""
        values = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        values[self.rank] = value
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._timeout
        self._start(label, values, lambda pg: pg.allreduce([values], options)).wait()
        return [int(v) for v in values.tolist()]

    def close(self) -> None:
        """Leave the group and release its sockets and threads. Operations in flight end with an error. Idempotent."""
        pg, self._pg = self._pg, None
        if pg is not None:
            try:
                pg.abort()
            except (RuntimeError, AttributeError) as error:
                logger.debug("aborting the weight-sync group: %s", error)
        del pg
        self._store = None

    def finish(self, work: Any, *, label: str, started: float) -> None:
        """Wait for one operation; see `Transfer.wait`."""
        try:
            if self._waits_on_host:
                work.wait(self._timeout)
            else:
                deadline = started + self.spec.timeout_s
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("timed out")
                    time.sleep(_POLL_S)
                work.wait()
        except RuntimeError as error:
            raise self._failure(label, error, started) from error

    def _start(self, label: str, tensor: torch.Tensor, call: Callable[[Any], Any]) -> Transfer:
        if self._pg is None:
            raise SyncError(f"{label}: rank {self.rank} has already left the weight-sync group")
        started = time.monotonic()
        try:
            work = call(self._pg)
        except RuntimeError as error:
            raise self._failure(label, error, started) from error
        return Transfer(tensor=tensor, label=label, _work=work, _group=self, _started=started)

    def _meet(self, where: str) -> None:
        """All members are connected when this returns."""
        self.exchange(1, label=where)

    def _failure(self, label: str, error: Exception, started: float) -> SyncError:
        return SyncError(
            f"{label} failed on rank {self.rank} of {self.world_size} after {time.monotonic() - started:.1f} s (limit "
            f"{self.spec.timeout_s:g} s): a member is gone or did not take part. {_first_line(error)}"
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _build_gloo(spec: SyncGroupSpec, store: Any, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:
        # Gloo's own choice is the address that the host name resolves to, which may be another network, or none.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(spec.host, spec.port))]
    options._timeout = timeout
    options._threads = _GLOO_THREADS
    return dist.ProcessGroupGloo(store, spec.rank, spec.world_size, options)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the route to `host`. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def _build_nccl(spec: SyncGroupSpec, store: Any, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, spec.rank, spec.world_size, options)


def _build_plugin(spec: SyncGroupSpec, store: Any, timeout: timedelta) -> Any:
    """A backend that a vendor's package registered with torch (torch_npu registers `hccl` when it is imported)."""
    plugin = dist.Backend._plugins[spec.backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, spec.rank, spec.world_size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = spec.rank
    options.group_size = spec.world_size
    options.timeout = timeout
    options.group_id = f"s2rl-sync-{spec.port}"
    options.global_ranks_in_group = list(range(spec.world_size))
    return plugin.creator_fn(options, None)


_BUILDERS: dict[str, Callable[[SyncGroupSpec, Any, timedelta], Any]] = {"gloo": _build_gloo, "nccl": _build_nccl}
