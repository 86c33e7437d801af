"""Positions of text and image tokens in time, height and width (multimodal rotary embedding, Qwen2-VL section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from s2rl.errors import ModelError
from s2rl.types import IntArray


def image_positions(
    token_ids: IntArray, grids: Sequence[tuple[int, int, int]], *, image_token_id: int, merge: int
) -> NDArray[np.int64]:
    """Temporal, height and width positions [3, S] of the tokens [S] of one sequence.

    Text counts on in all three. An image starts where the text before it ends; its tokens lie on its grid of merged
    patches, and the text behind it goes on after the longer side. `grids` are in patches, in the order of the images.
    Raises ModelError when the placeholders do not match the grids.
    """
    is_image = token_ids == image_token_id
    starts = iter(np.flatnonzero(is_image))
    parts: list[NDArray[np.int64]] = []
    done, position = 0, 0
    for frames, height, width in grids:
        shape = (frames, height // merge, width // merge)
        start, size = int(next(starts, -1)), int(np.prod(shape))
        if start < 0 or not is_image[start : start + size].all() or start + size > len(token_ids):
            raise ModelError(
                f"a sequence has {int(is_image.sum())} image placeholders, but its {len(grids)} images take "
                f"{sum(int(np.prod(grid)) for grid in grids) // merge**2}, each as one run"
            )
        parts.append(np.broadcast_to(position + np.arange(start - done), (3, start - done)))
        position += start - done
        parts.append(position + np.indices(shape).reshape(3, size))
        position += max(shape[1:])
        done = start + size
        for _ in range(size - 1):
            next(starts)
    if next(starts, None) is not None:
        raise ModelError(
            f"a sequence has {int(is_image.sum())} image placeholders, more than its {len(grids)} images take"
        )
    parts.append(np.broadcast_to(position + np.arange(len(token_ids) - done), (3, len(token_ids) - done)))
    return np.concatenate(parts, axis=1).astype(np.int64)
