"""A reward function of one's own, for sums that are worked out step by step: "23 + 45 = 68, 68 - 12 = 56"."""

from __future__ import annotations

import re

from s2rl.rewards import RewardInput, Score


def running_sum(item: RewardInput, *, step_credit: float = 0.4) -> Score:
    """1 when the last number is the answer; else `step_credit` times the share of right totals on the way.

    The untrained model is almost never right after two steps, but often after one: without credit for that, most groups
    would have no reward at all and so nothing to learn from.
    """
    expected = running_totals(str(item.extra["expression"]))[:-1]
    found = [int(number) for number in re.findall(r"= *(-?\d+)", item.text)]
    right_steps = sum(a == b for a, b in zip(expected, found, strict=False)) / len(expected)
    numbers = re.findall(r"-?\d+", item.text)
    right = float(bool(numbers) and int(numbers[-1]) == int(item.answer))
    return Score(total=max(right, step_credit * right_steps), parts={"right": right, "steps": right_steps})


def running_totals(expression: str) -> list[int]:
    """`23 + 45 - 12` -> [68, 56]."""
    first, *rest = expression.split()
    totals = [int(first)]
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        totals.append(totals[-1] + (int(number) if sign == "+" else -int(number)))
    return totals[1:]
