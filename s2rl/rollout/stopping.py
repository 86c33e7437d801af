"""Stop strings, found in the decoded text as it grows, so that ids, log-probabilities and versions are cut together.

The engine runs without a tokenizer and knows stop token ids only.
"""

from __future__ import annotations

from typing import Any


class StopStrings:
    """Watches one sequence. Feed it every sampled token in order."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any) -> None:
        """`tokenizer` is a Hugging Face tokenizer."""
        self._stop = stop
        self._keep = max(len(s) for s in stop) - 1
        self._decode = _stepwise(tokenizer)
        self._tail = ""

    def feed(self, token_id: int) -> bool:
        """Whether the text, with this token, holds one of the strings. The token itself still belongs to the text."""
        text = self._tail + self._decode(token_id)
        if any(s in text for s in self._stop):
            return True
        self._tail = text[-self._keep :] if self._keep else ""
        return False


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the earliest stop string, which is left out."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else text


def _stepwise(tokenizer: Any) -> Any:
    """A function that takes one token id and returns the text that became certain."""
    if getattr(tokenizer, "is_fast", False):
        from tokenizers.decoders import DecodeStream

        backend = tokenizer.backend_tokenizer
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(backend, token_id) or ""
    ids: list[int] = []
    length = 0

    def decode(token_id: int) -> str:
        nonlocal length
        ids.append(token_id)
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # part of a character: more bytes are to come
            return ""
        new, length = text[length:], len(text)
        return new

    return decode
