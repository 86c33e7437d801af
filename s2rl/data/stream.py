"""The endless, seeded, resumable order of prompts.

Epoch e visits every row once, in an order that depends on the seed and e alone. So the cursor is two numbers, and a
stream that is restored at any point gives what the first one would have given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from s2rl.data.rows import PromptRows
from s2rl.errors import DataError
from s2rl.types import Prompt


class PromptStream:
    """Draws prompts one after the other, for ever."""

    def __init__(self, rows: PromptRows, *, seed: int, shuffle: bool = True) -> None:
        if len(rows) == 0:
            raise DataError("the data set is empty; at least one row is needed")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        """Rows of this epoch that were drawn."""
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to."""
        return self._epoch

    @property
    def num_drawn(self) -> int:
        """Prompts drawn since the very first."""
        return self._epoch * len(self._rows) + self._position

    def next(self) -> Prompt:
        """The next prompt; its id is `<epoch>-<row>`."""
        prompt = self._rows.prompt(int(self._order[self._position]), epoch=self._epoch)
        self._position += 1
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return prompt

    def get(self, prompt_id: str) -> Prompt:
        """The prompt that was drawn under this id (outstanding groups of a checkpoint)."""
        epoch, _, row = prompt_id.partition("-")
        if not (epoch.isdecimal() and row.isdecimal() and int(row) < len(self._rows)):
            raise DataError(f"prompt id {prompt_id!r} names no row of this data set ({len(self._rows)} rows)")
        return self._rows.prompt(int(row), epoch=int(epoch))

    def state(self) -> dict[str, int | bool | str]:
        """The cursor, and what it is valid for; JSON types only."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_rows": len(self._rows),
            "digest": self._rows.digest,
        }

    def restore(self, state: Mapping[str, int | bool | str]) -> None:
        """Go on where `state` was taken. Raises DataError when data, seed or shuffling are not the same as then."""
        for key, now in self.state().items():
            if key in ("epoch", "position") or state.get(key) == now:
                continue
            if key in ("num_rows", "digest"):
                then = f"{state.get('num_rows')} rows, digest {str(state.get('digest'))[:12]}"
                raise DataError(
                    f"data.train: the saved position belongs to a data set of other content ({then}) than the present "
                    f"one ({len(self._rows)} rows, digest {self._rows.digest[:12]}): prompts would be repeated or left "
                    f"out. Put the data of that run back, or start a new run under another name"
                )
            raise DataError(
                f"the saved position was taken with {key} = {state.get(key)!r}, and now it is {now!r}: the order of "
                f"prompts would be another. Set it back, or start a new run under another name"
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < len(self._rows):
            raise DataError(
                f"the saved position (epoch {epoch}, position {position}) lies outside of {len(self._rows)} rows"
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._rows))
        # RandomState's stream never changes between numpy versions, a Generator's may. Hashing keeps near seeds apart.
        words = np.frombuffer(hashlib.sha256(f"{self._seed}:{epoch}".encode()).digest(), dtype="<u4").astype(np.uint32)
        return np.random.RandomState(words).permutation(len(self._rows))
