"""Finds answers in texts: numbers, boxed formulas, marked lines. Pure functions, linear in the text."""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![.0-9])\.[0-9]+)"
# Atomic, so that a number with an exponent of four digits or more is none at all, not its first digits.
_DECIMAL = rf"(?>{_DIGITS}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)(?![eE][-+]?[0-9])"
# A minus belongs to the number unless it stands directly behind an operand: 10-5 ends with 5, "= -5" with -5.
_SIGN = r"(?:(?<![A-Za-z0-9_)\]}])[-−]\$?|(?<![A-Za-z0-9_]))"
_TERM = rf"\s*([-−]?{_DECIMAL})\s*"
_TOP, _BOTTOM = (_TERM.replace("([", f"(?P<{name}>[", 1) for name in ("top", "bottom"))
_FRAC = rf"\\[dt]?frac\s*\{{{_TOP}\}}\s*\{{{_BOTTOM}\}}"
_NUMBER = re.compile(rf"(?P<sign>{_SIGN})(?:{_FRAC}|(?P<number>{_DECIMAL})(?:\s?/\s?(?P<over>{_DECIMAL}))?)")
_LONGEST_NUMBER = 400
"""Characters. Nothing sensible is longer, and exact arithmetic on millions of digits takes minutes."""


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None when there is none.

    Read as numbers: `-3`, `−3`, `1,234.5`, `.5`, `2e-3`, `3/4`, `\\frac{3}{4}`; a currency or percent sign is left out.
    Digits that continue a word (`x2`) are not numbers.
    """
    if "\\" in text or "{,}" in text:
        text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def marked_number(text: str, marker: str = "####") -> Fraction | None:
    """The number directly behind the last `marker` (spaces and a currency sign may stand between), or None."""
    _, found, tail = text.rpartition(marker)
    if not found:
        return None
    tail = tail.lstrip().replace("$", "", 1) if tail.lstrip().startswith(("$", "-$")) else tail.lstrip()
    match = _NUMBER.match(tail)
    return _value(match) if match else None


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, with balanced braces; None when there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def has_think_format(text: str) -> bool:
    """Whether the text is `<think>...</think>...\\boxed{...}...`, what `<think>.*</think>.*\\boxed\\{.*\\}.*` matches.

    The order of the parts is looked for one after the other; the regular expression takes polynomial time on bad texts.
    """
    position = 0
    for n, part in enumerate(("<think>", "</think>", "\\boxed{", "}")):
        position = text.find(part, position)
        if position < 0 or (n == 0 and position > 0):
            return False
        position += len(part)
    return True


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    top = _fraction(groups["top"] or groups["number"])
    bottom_text = groups["bottom"] or groups["over"]
    bottom = Fraction(1) if bottom_text is None else _fraction(bottom_text)
    if top is None or not bottom:
        return None
    value = top / bottom
    return -value if groups["sign"] else value


def _fraction(text: str) -> Fraction | None:
    text = text.replace(",", "").replace("−", "-")
    return Fraction(text) if len(text) <= _LONGEST_NUMBER else None
