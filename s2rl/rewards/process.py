"""One grading process as the controller sees it: start, send, receive, kill. No policy: that is `pool.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s2rl.rewards.wire import Unpacker, pack

_BOOT = (
    "import json, sys; path, fd, parent = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from s2rl.rewards.worker import main; main(fd=fd, parent=parent)"
)
_REAP_LIMIT_S = 10.0


class GraderProcess(asyncio.Protocol):
    """A child process and the socket to it. All callbacks run in the event loop's thread.

    `on_message(process, message)` for each message; `on_lost(process)` once, when the other side is gone for whatever
    reason, `kill` included.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[GraderProcess, Any], None],
        on_lost: Callable[[GraderProcess], None],
        log_path: Path | None,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._log_path = log_path
        self._unpacker = Unpacker()
        self._transport: asyncio.Transport | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start the child and connect; it has not loaded anything yet."""
        ours = self._launch()
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    def _launch(self) -> socket.socket:
        """Start the child (a few milliseconds); our end of the socket to it."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            output: Any = sys.__stderr__ or subprocess.DEVNULL
            if self._log_path is not None:
                output = stack.enter_context(self._log_path.open("ab"))
            boot = json.dumps([[os.path.abspath(p) if p else "" for p in sys.path], theirs.fileno(), os.getpid()])
            self._child = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-c", _BOOT, boot],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **{name: os.environ.get(name, "1") for name in _ONE_THREAD}},
                start_new_session=True,
            )
        return ours

    def send(self, message: object) -> None:
        """Hand over one message; never blocks. Raises what pickling raises."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    def kill(self) -> None:
        """End the child, and what it started, at once."""
        child = self._child
        if child is not None and child.returncode is None:
            # The child leads a session of its own, so its group holds what reward functions started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    async def wait(self) -> int | None:
        """Reap the child; its exit code (negative: signal), or None when it does not end in time."""
        child = self._child
        if child is None:
            return None
        deadline = asyncio.get_running_loop().time() + _REAP_LIMIT_S
        pause = 0.001
        while child.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        return child.returncode

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)


_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Grading is one call at a time; a pool of threads per process would only be in the way of the engines."""
