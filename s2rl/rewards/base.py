"""What a reward function is given and what it gives back. Imported in the grading processes: keep it light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from s2rl.types import FinishReason, Message, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One completion and the row that it answers."""

    text: str
    """The completion, decoded without special tokens. The prompt is not part of it."""
    answer: str
    """The row's reference answer."""
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's further fields."""
    messages: tuple[Message, ...] | None = None
    """The row's chat messages, when it has some."""
    prompt: str | None = None
    """The row's plain prompt, when it has one."""
    finish_reason: FinishReason = FinishReason.STOP
    """`length`: the token budget ended the completion."""
    num_tokens: int = 0
    """Tokens of the completion."""


class RewardFunction(Protocol):
    """A plain function; `args` are the keywords of the configuration.

    A number is taken as `Score(total=number)`. Raising is allowed: the call then scores zero and is counted. The same
    input should give the same score: a call is repeated when its process died before beginning it.
    """

    def __call__(self, item: RewardInput, /, **args: Any) -> Score | float: ...
