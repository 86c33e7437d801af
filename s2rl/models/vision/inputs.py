"""What the forward of a vision-language model takes besides token ids: patches, grids, token types, positions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from s2rl.errors import ModelError
from s2rl.models.vision.pixels import PixelProcessor
from s2rl.models.vision.positions import image_positions
from s2rl.types import ImageArray, IntArray

_IMAGE = 1
"""Token type of image placeholders; text is 0."""


class VisionInputs:
    """The images of one model's samples, as its forward wants them.

    Placeholders, grids and rows of patches are counted against each other for every sample; what does not agree raises
    ModelError before anything is computed.
    """

    def __init__(self, folder: Path, *, image_token_id: int, forward_arguments: Collection[str]) -> None:
        """`folder` holds the image processor; `forward_arguments` are those that the model's forward has."""
        self.image_token_id = image_token_id
        self._process = PixelProcessor(folder)
        self._takes_token_types = "mm_token_type_ids" in forward_arguments
        side = 2 * self._process.patch * self._process.merge
        self.dummy_image: ImageArray = np.full((side, side, 3), 127, dtype=np.uint8)
        self.num_dummy_tokens = self._num_tokens(self.dummy_image)

    def positions(self, token_ids: IntArray, images: Sequence[ImageArray]) -> NDArray[np.int64]:
        """Temporal, height and width positions [3, S] of the tokens [S] of one sequence with `images`."""
        grids = [self._grid(image) for image in images]
        return image_positions(token_ids, grids, image_token_id=self.image_token_id, merge=self._process.merge)

    def model_inputs(
        self, images: Sequence[ImageArray], *, input_ids: NDArray[np.int64], device: torch.device
    ) -> dict[str, Tensor]:
        """Keyword arguments of the forward for `images`, in the order of their placeholders in `input_ids` [B, S]."""
        pixels_PD, grids = self._process(images)
        is_image = input_ids == self.image_token_id
        expected = sum(self._num_tokens(image) for image in images)
        patches = expected * self._process.merge**2
        if int(is_image.sum()) != expected or len(pixels_PD) != patches:
            raise ModelError(
                f"a batch has {int(is_image.sum())} image placeholders and {len(pixels_PD)} patches, but its "
                f"{len(images)} images take {expected} placeholders and {patches} patches"
            )
        inputs = {
            "pixel_values": pixels_PD.to(device),
            "image_grid_thw": grids.to(device),
        }
        if self._takes_token_types:
            inputs["mm_token_type_ids"] = torch.from_numpy(np.where(is_image, _IMAGE, 0)).to(device)
        return inputs

    def _grid(self, image: ImageArray) -> tuple[int, int, int]:
        return self._process.grid_of(image.shape[0], image.shape[1])

    def _num_tokens(self, image: ImageArray) -> int:
        frames, height, width = self._grid(image)
        return frames * height * width // self._process.merge**2
