"""Reward functions, by name or dotted path, and the process pool that runs them under a time limit.

A reward function takes one `RewardInput`, and its `args` from the configuration as keywords:

    from s2rl.rewards import RewardInput, Score

    def short_and_right(item: RewardInput, *, budget: int = 100) -> Score:
        right = float(item.answer in item.text)
        short = float(item.num_tokens <= budget)
        return Score(total=right * (0.5 + 0.5 * short), parts={"right": right, "short": short})
"""

from s2rl.rewards.base import RewardFunction, RewardInput
from s2rl.types import Score

__all__ = ["RewardFunction", "RewardInput", "Score"]
