"""Which reward functions apply to a row, and how their scores become one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from s2rl.config.schema import RewardConfig
from s2rl.errors import DataError
from s2rl.types import Score

log = logging.getLogger(__name__)


class RewardPlan:
    """The configured reward functions with weights and data sources. Function i is `functions[i]` everywhere."""

    def __init__(self, functions: Sequence[RewardConfig]) -> None:
        self.functions = tuple(functions)
        self.names = _unique_names([f.function for f in functions])
        self._applicable: dict[str, tuple[int, ...]] = {}

    def applicable(self, data_source: str) -> tuple[int, ...]:
        """Functions for rows of this data source."""
        found = self._applicable.get(data_source)
        if found is None:
            every = enumerate(self.functions)
            found = tuple(i for i, f in every if not f.data_sources or data_source in f.data_sources)
            self._applicable[data_source] = found
        return found

    def check(self, places: Mapping[str, str]) -> None:
        """Refuse data to which no reward applies. `places`: data source to a row that has it, for the message."""
        named = sorted({name for f in self.functions for name in f.data_sources})
        for data_source, place in places.items():
            if not self.applicable(data_source):
                raise DataError(
                    f"{place}: no reward function applies to data source {data_source!r}; the data_sources in "
                    f"rewards.functions name {', '.join(map(repr, named))}. Add it there, or leave data_sources out of "
                    f"one function"
                )
        for function in self.functions:
            if function.data_sources and not set(function.data_sources) & set(places):
                log.warning(
                    "reward function %s applies to no row: its data_sources are %s, the data has %s",
                    function.function,
                    ", ".join(function.data_sources),
                    ", ".join(map(repr, places)),
                )

    def combine(self, scores: Mapping[int, Score]) -> Score:
        """The weighted sum. Parts: each function's own total by its name, and its parts as `name/part`."""
        total = 0.0
        parts: dict[str, float] = {}
        for i, score in scores.items():
            total += self.functions[i].weight * score.total
            parts[self.names[i]] = score.total
            for part, value in score.parts.items():
                parts[f"{self.names[i]}/{part}"] = value
        return Score(total=total, parts=parts)


def _unique_names(functions: Sequence[str]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        base = function.rpartition(":")[2]
        name, n = base, 2
        while name in names:
            name, n = f"{base}_{n}", n + 1
        names.append(name)
    return tuple(names)
