"""The one thread that owns an engine: everything that touches it, collectives of weight sync included, runs here.

    consumes   commands, in the order in which they were given, all of them between two engine steps
    produces   their results (futures), what finished (the loop's `deliver`)
    waits for  a command, while there is nothing to sample; for nothing else
    woken by   any command; `close` is one

An error that leaves the engine unusable ends the thread: every command that waits, and every later one, gets it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from s2rl.errors import WorkerDied
from s2rl.rollout.loop import RolloutLoop

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    run: Callable[[RolloutLoop], Any]
    future: Future[Any]
    fatal: bool
    """Whether an error leaves the engine unusable."""


class EngineThread:
    """Runs a `RolloutLoop`. Methods may be called from any thread."""

    def __init__(self, *, name: str, on_death: Callable[[], None]) -> None:
        """`on_death` is called in the thread when it ends with an error."""
        self._name = name
        self._on_death = on_death
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.loop: RolloutLoop | None = None
        """Set once the engine is built."""

    def start(self, build: Callable[[], RolloutLoop]) -> Future[None]:
        """Build the loop in the thread; the future tells when that is done."""
        ready: Future[None] = self.promise()
        # A daemon, so that a process that ends without `close` is not kept alive by an engine that waits for work.
        self._thread = threading.Thread(target=self._main, args=(build, ready), name=self._name, daemon=True)
        self._thread.start()
        return ready

    def call(self, run: Callable[[RolloutLoop], T], *, fatal: bool = False) -> Future[T]:
        """Run something between two steps. With `fatal`, an error in it ends the thread."""
        future: Future[T] = self.promise()
        if not future.done():
            self._commands.put(_Command(run=run, future=future, fatal=fatal))
        return future

    def promise(self) -> Future[Any]:
        """A future that fails when the thread ends before it is resolved."""
        future: Future[Any] = Future()
        with self._lock:
            if self._error is not None or self._closing:
                future.set_exception(self.death())
            else:
                self._pending.add(future)
                future.add_done_callback(self._forget)
        return future

    @property
    def is_dead(self) -> bool:
        """Whether the thread ended with an error."""
        return self._error is not None

    @property
    def is_closed(self) -> bool:
        """Whether the thread ended because it was told to."""
        return self._closing

    def death(self) -> WorkerDied:
        """An exception that says why nothing can be asked of this engine any more."""
        if self._error is None:
            return WorkerDied(f"{self._name} is closed")
        died = WorkerDied(f"{self._name}: the engine ended with {type(self._error).__name__}: {self._error}")
        died.__cause__ = self._error
        return died

    def close(self, *, timeout_s: float) -> bool:
        """End after the current step, release the engine. False when the thread did not end in time. Idempotent."""
        if self._thread is None:
            return True
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self, build: Callable[[], RolloutLoop], ready: Future[None]) -> None:
        try:
            loop = self.loop = build()
            ready.set_result(None)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread must reach those who wait for it
            self._die(error, first=ready)
            return
        try:
            while self._run_commands(loop):
                if loop.has_work:
                    loop.step()
        except BaseException as error:  # noqa: BLE001 - as above
            self._die(error)
        finally:
            self._end(loop)

    def _run_commands(self, loop: RolloutLoop) -> bool:
        """Run what is queued; with nothing to sample, wait for the next command. False when told to close."""
        while True:
            try:
                # Blocks without limit only while idle, and only this process can give the next command.
                command = self._commands.get(block=not loop.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            try:
                result = command.run(loop)
            except Exception as error:
                if command.fatal:
                    self._die(error, first=command.future)
                    raise
                command.future.set_exception(error)
            else:
                command.future.set_result(result)

    def _die(self, error: BaseException, *, first: Future[Any] | None = None) -> None:
        """Remember the error and fail all who wait; `first` gets the error itself."""
        with self._lock:
            if self._error is None:
                self._error = error
            pending, self._pending = self._pending, set()
        logger.error("%s ends: %s: %s", self._name, type(error).__name__, error, exc_info=error)
        if first is not None and not first.done():
            first.set_exception(error)
        for future in pending:
            if not future.done():
                future.set_exception(self.death())
        self._on_death()

    def _end(self, loop: RolloutLoop) -> None:
        with self._lock:
            self._closing = True
            pending, self._pending = self._pending, set()
        for future in pending:
            if not future.done():
                future.set_exception(self.death())
        try:
            loop.close()
        except Exception as error:  # noqa: BLE001 - closing goes on: the process ends next
            logger.warning("%s: closing the engine: %s: %s", self._name, type(error).__name__, error)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)
