"""Waiting with an owner and a deadline, and the record of what moved last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from s2rl.errors import StalledError

T = TypeVar("T")


async def within(awaitable: Awaitable[T], *, limit_s: float, who: str, what: str) -> T:
    """Await with a limit; `StalledError` says who waited for what."""
    # Not `asyncio.wait_for`: up to Python 3.11 it loses a cancellation that meets the result.
    try:
        async with asyncio.timeout(limit_s):
            return await awaitable
    except TimeoutError as error:
        raise StalledError(f"{who} waited {limit_s:.0f} s for {what}") from error


@dataclass(slots=True, kw_only=True)
class Progress:
    """When each kind of thing last moved; the watchdog reads it, messages quote it."""

    limit_s: float
    _last: dict[str, float] = field(default_factory=dict)
    _errors: dict[str, str] = field(default_factory=dict)

    def moved(self, what: str) -> None:
        """Something of this kind happened now."""
        self._last[what] = time.monotonic()

    def failed(self, who: str, error: BaseException) -> None:
        """Remember the last error of a counterpart."""
        self._errors[who] = f"{type(error).__name__}: {error}"

    def check(self, waiting_for: str) -> None:
        """Raise `StalledError` when nothing at all moved for the limit."""
        if not self._last:
            self.moved("start")
        now = time.monotonic()
        quiet = now - max(self._last.values())
        if quiet <= self.limit_s:
            return
        seen = ", ".join(f"{what} {now - at:.0f} s ago" for what, at in sorted(self._last.items(), key=lambda i: -i[1]))
        errors = "; ".join(f"{who}: {error}" for who, error in self._errors.items()) or "none"
        raise StalledError(
            f"nothing moved for {quiet:.0f} s (limits.progress_s={self.limit_s:.0f}). Waiting: {waiting_for}. "
            f"Last seen: {seen}. Last errors: {errors}"
        )
