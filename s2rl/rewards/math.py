"""Mathematics in `\\boxed{}`, graded by mathruler. Importing it takes a third of a second (sympy)."""

from __future__ import annotations

from mathruler.grader import grade_answer

from s2rl.rewards.base import RewardInput
from s2rl.rewards.extract import has_think_format, last_boxed
from s2rl.types import Score

_LONGEST_ANSWER = 1000
"""Characters. Longer formulas are never right, and sympy takes minutes over them."""


def math_boxed(item: RewardInput, *, format_weight: float = 0.0) -> Score:
    """(1 - format_weight) x accuracy + format_weight x format.

    accuracy: the content of the last `\\boxed{...}` equals the answer for mathruler (Hendrycks' normalisation, or sympy
    finds the difference to be zero). format: the text is `<think>...</think>...\\boxed{...}...`.
    """
    found = last_boxed(item.text)
    answer = item.answer
    if "\\boxed{" in answer:
        answer = last_boxed(answer) or answer
    right = found is not None and len(found) <= _LONGEST_ANSWER and bool(grade_answer(found, answer))
    well_formed = has_think_format(item.text)
    return Score(
        total=(1.0 - format_weight) * right + format_weight * well_formed,
        parts={"accuracy": float(right), "format": float(well_formed)},
    )
