"""The built-in reward functions that need nothing but the standard library."""

from __future__ import annotations

from fractions import Fraction

from s2rl.rewards.base import RewardInput
from s2rl.rewards.extract import last_number, marked_number
from s2rl.types import Score


def exact_match(item: RewardInput, *, ignore_case: bool = False, after: str | None = None) -> float:
    """1 when the text is the answer, spaces around both left out; else 0.

    `after`: only what stands behind the last occurrence of this marker counts (up to the end of its line), and a text
    without the marker scores 0.
    """
    text, answer = item.text, item.answer.strip()
    if after is not None:
        _, marker, text = text.rpartition(after)
        if not marker:
            return 0.0
        text = text.strip().partition("\n")[0]
    text = text.strip()
    if ignore_case:
        text, answer = text.casefold(), answer.casefold()
    return float(text == answer)


def numeric(item: RewardInput, *, tolerance: float = 0.0) -> float:
    """1 when the last number of the text equals the answer's last number, within `tolerance` (absolute); else 0.

    Numbers are compared exactly: 0.5 equals 1/2. Raises ValueError when the answer holds no number.
    """
    answer = last_number(item.answer)
    if answer is None:
        raise ValueError(f"the answer {item.answer[:80]!r} holds no number; `numeric` cannot grade it")
    found = last_number(item.text)
    return float(found is not None and abs(found - answer) <= Fraction(tolerance))


def gsm8k(item: RewardInput, *, flexible: bool = False, format_score: float = 0.0) -> Score:
    """1 when the number behind the last `####` equals the answer's; `format_score` for a wrong number there; else 0.

    `flexible`: without a `####`, the last number of the text counts. The answer may be the whole GSM8K solution or the
    bare number. Raises ValueError when the answer holds no number.
    """
    answer = marked_number(item.answer) if "####" in item.answer else last_number(item.answer)
    if answer is None:
        raise ValueError(f"the answer {item.answer[-80:]!r} holds no number; `gsm8k` cannot grade it")
    marked = marked_number(item.text)
    found = last_number(item.text) if marked is None and flexible else marked
    right = found is not None and found == answer
    total = 1.0 if right else format_score * (marked is not None)
    return Score(total=total, parts={"accuracy": float(right), "format": float(marked is not None)})
