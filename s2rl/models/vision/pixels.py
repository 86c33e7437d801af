"""Resized images to rows of patches, by the model's own image processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from s2rl.errors import ModelError
from s2rl.types import ImageArray


class PixelProcessor:
    """The image processor of a model folder, without its resizing: images come at the size that the engine sees too."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for a folder without an image processor that cuts images into patches."""
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
            self.patch = int(self._processor.patch_size)
            self.merge = int(self._processor.merge_size)
            """Patches along one side of what becomes one token."""
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise ModelError(
                f"model.path: {folder} has no usable image processor, which its model needs: {error}. Restore "
                "preprocessor_config.json from the original model."
            ) from error

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches in time, height and width of an image of that many pixels.

        Raises ModelError for a size that was not made by the model's resizing rule.
        """
        factor = self.patch * self.merge
        if height <= 0 or width <= 0 or height % factor or width % factor:
            raise ModelError(f"an image has {height} x {width} pixels; both must be multiples of {factor}")
        return 1, height // self.patch, width // self.patch

    def __call__(self, images: Sequence[ImageArray]) -> tuple[Tensor, Tensor]:
        """Patches [P, D] float32 of all images, one after the other, and grids [number of images, 3] int64."""
        made = self._processor(
            images=[torch.from_numpy(image).permute(2, 0, 1) for image in images],
            do_resize=False,
            do_convert_rgb=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )
        grids = torch.as_tensor(made["image_grid_thw"], dtype=torch.int64)
        expected = [self.grid_of(image.shape[0], image.shape[1]) for image in images]
        if [tuple(grid) for grid in grids.tolist()] != expected:
            raise ModelError(f"the image processor made the grids {grids.tolist()} of images that have {expected}")
        return torch.as_tensor(made["pixel_values"], dtype=torch.float32), grids
