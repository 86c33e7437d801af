"""A reward function of one's own, for sums that are worked out step by step: "23 + 45 = 68, 68 - 12 = 56"."""

from __future__ import annotations

import re

from s2rl.rewards import RewardInput, Score

EQUATION = re.compile(r"(-?\d+) *([+-]) *(\d+) *= *(-?\d+)")


def running_sum(item: RewardInput, *, step_credit: float = 0.5) -> Score:
    """1 when the last number is the answer; else `step_credit` times the share of things done right on the way.

    Each step has two of them: it takes up the total before and the next term of the problem, and if so, its own result
    holds (an easier calculation that the problem does not ask for earns nothing). The untrained model is almost never
    right after two steps, but often does one of these things: without credit for them, most groups would have no reward
    at all and so nothing to learn from.
    """
    first, *rest = str(item.extra["expression"]).split()
    terms = list(zip(rest[::2], rest[1::2], strict=True))
    equations = EQUATION.findall(item.text)[: len(terms)]
    set_up = calculated = 0
    total = first
    for (left, sign, right, result), term in zip(equations, terms, strict=False):
        if left == total and (sign, right) == term:
            set_up += 1
            calculated += int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        total = result
    numbers = re.findall(r"-?\d+", item.text)
    answered = float(bool(numbers) and int(numbers[-1]) == int(item.answer))
    share = (set_up + calculated) / (2 * len(terms))
    parts = {"right": answered, "set_up": set_up / len(terms), "calculated": calculated / len(terms)}
    return Score(total=max(answered, step_credit * share), parts=parts)
