"""How the controller and a grading process talk: length-prefixed pickles over one socket pair.

To the process: lists of `CallMessage`. Back: `BEGAN` when a list arrived, then one `ResultMessage` per call, in order.
The first message in each direction is `StartMessage` and `ReadyMessage`. Plain tuples: they pickle fastest.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, NamedTuple

from s2rl.rewards.base import RewardInput

_HEADER = struct.Struct("<I")
BEGAN = "began"


class StartMessage(NamedTuple):
    """What a process needs to load its functions."""

    functions: tuple[tuple[str, dict[str, Any]], ...]
    """Name and args of each."""


class ReadyMessage(NamedTuple):
    """The functions are loaded, or why not."""

    refusal: str | None


class CallMessage(NamedTuple):
    """One function on one completion."""

    call_id: int
    function: int
    item: RewardInput


class ResultMessage(NamedTuple):
    """What became of one call."""

    call_id: int
    total: float
    parts: dict[str, float]
    error: str | None
    seconds: float


def pack(message: object) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """All messages that `data` completes."""
        self._buffer += data
        messages: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages
