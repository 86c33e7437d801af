"""The nearest real key to one that does not exist."""

from __future__ import annotations

import difflib
import re

from s2rl.config.describe import keys

_ELSEWHERE = {
    "batch_size": "algorithm.groups_per_step",
    "train_batch_size": "algorithm.groups_per_step",
    "learning_rate": "learner.optimizer.lr",
    "num_generations": "algorithm.group_size",
    "n": "algorithm.group_size",
    "max_tokens": "rollout.sampling.max_new_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "kl_coef": "algorithm.kl.coefficient",
    "beta": "algorithm.kl.coefficient",
    "world_size": "learner.ranks",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "max_steps": "steps",
    "total_training_steps": "steps",
}
"""What other trainers call it."""


def suggestion(dotted: str) -> str:
    """`. Did you mean ...?` for an unknown dotted key, or the keys that its section has."""
    names = [key.dotted for key in keys()]
    plain = re.sub(r"\.\d+(?=\.|$)", "[]", dotted)
    parent, _, last = plain.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]

    near = _closest(last, {name.rpartition(".")[2]: name for name in siblings}, cutoff=0.7)
    same = [name for name in names if name.rpartition(".")[2] == last]
    if not near and same:
        same_top = [name for name in same if name.partition(".")[0] == plain.partition(".")[0]]
        near = " or ".join((same_top or same)[:3])
    near = (
        near
        or _ELSEWHERE.get(last)
        or _closest(plain, {name: name for name in names if not plain.startswith(name)}, cutoff=0.75)
        or _closest(last, {name.rpartition(".")[2]: name for name in reversed(names)}, cutoff=0.75)
    )
    if near:
        return f". Did you mean {near}?"
    if siblings and parent:
        return f". {parent} has: {', '.join(name.rpartition('.')[2] for name in siblings)}"
    return ". See docs/config.md for all keys."


def _closest(word: str, names: dict[str, str], *, cutoff: float) -> str | None:
    found = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None
