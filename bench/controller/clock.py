"""An event loop whose clock jumps: simulated hours pass in seconds, and the same schedule runs the same way each time.

While anything is ready to run, no time passes. When nothing is, the clock jumps to the next timer. When there is no
timer either, nothing can ever happen again, and that is an error rather than a hang. `run_in_virtual_time` also points
`time.monotonic` at this clock, because the controller reads that.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingCanHappen(RuntimeError):
    """Every task waits and no timer runs."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """See the module docstring. What would run in a thread runs at once instead, and takes no time."""

    # Of asyncio's base loop, CPython 3.11 to 3.13.
    _scheduled: list[Any]
    _ready: Any
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call it now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - an executor hands every failure to the one who waits
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready:
            if not self._scheduled:
                raise NothingCanHappen("every task waits and no timer runs")
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on a clock that jumps."""
    real = time.monotonic
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        loop = runner.get_loop()
        time.monotonic = loop.time
        try:
            return runner.run(main)
        finally:
            time.monotonic = real
