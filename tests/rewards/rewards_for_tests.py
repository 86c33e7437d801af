"""Reward functions that misbehave; the tests name them by dotted path, and the grading processes import them."""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from s2rl.rewards import RewardInput, Score


def behave(item: RewardInput, *, scale: float = 1.0) -> float:
    """Does what the completion says; otherwise `scale` for the right answer."""
    action, _, argument = item.text.partition(" ")
    if action in _ACTIONS:
        return _ACTIONS[action](argument)
    return scale * (item.text == item.answer)


def constant(item: RewardInput, *, value: float) -> Score:
    return Score(total=value, parts={"half": value / 2})


def everything(item: RewardInput) -> Score:
    """Whether each field arrived."""
    assert item.messages is not None
    return Score(
        total=1.0,
        parts={
            "extra": float(item.extra["index"]),
            "roles": float([m.role for m in item.messages] == ["user"]),
            "cut": float(item.finish_reason == "length"),
            "tokens": float(item.num_tokens),
            "source": float(item.data_source == "here"),
        },
    )


async def asynchronous(item: RewardInput) -> float:
    return 0.0


not_a_function = 3


class Weighted:
    @staticmethod
    def score(item: RewardInput) -> float:
        return 0.25


def _loop_for_ever(_: str) -> float:
    while True:
        pass


def _swallow_everything(_: str) -> float:
    while True:
        try:
            time.sleep(0.05)
        except BaseException:  # noqa: BLE001 - as careless libraries do
            continue


def _hang_in_c(_: str) -> float:
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is not None)


def _hang_with_child(path: str) -> float:
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    return _loop_for_ever("")


def _raise(_: str) -> float:
    raise ValueError("a bad answer")


def _sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


_ACTIONS = {
    "loop": _loop_for_ever,
    "swallow": _swallow_everything,
    "c-loop": _hang_in_c,
    "child": _hang_with_child,
    "exit": lambda _: os._exit(3),
    "sys-exit": lambda _: sys.exit(0),
    "segfault": lambda _: ctypes.string_at(0),
    "raise": _raise,
    "nan": lambda _: float("nan"),
    "none": lambda _: None,
    "text": lambda _: "1.0",
    "print": lambda _: print("said by the grader") or 1.0,
    "sleep": _sleep,
    "pid": lambda _: float(os.getpid()),
    "threads": lambda _: float(int(os.environ["OMP_NUM_THREADS"])),
    "torch": lambda _: float("torch" in sys.modules or "pydantic" in sys.modules),
}
