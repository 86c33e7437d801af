"""Positions and patches are those of transformers' own models and processors; what does not agree is refused."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from s2rl.errors import ModelError
from s2rl.models.small import save_small_model
from s2rl.models.vision.inputs import VisionInputs
from s2rl.models.vision.pixels import PixelProcessor
from s2rl.models.vision.positions import image_positions

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp(request.param), family=request.param)


def _image(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _sequence(image_id, sizes, *, gap=2, last=5):
    """Token ids with runs of placeholders of the given sizes between text."""
    ids = [3, 4]
    for size in sizes:
        ids += [image_id] * size + [7] * gap
    return np.array(ids + [9] * last, dtype=np.int32)


@pytest.mark.parametrize("grids", [[], [(1, 4, 6)], [(1, 2, 2), (1, 2, 10)], [(1, 10, 2), (1, 4, 4), (1, 6, 2)]])
def test_positions_are_those_of_the_models_own_index(made, grids):
    model = getattr(transformers, made.architecture).from_pretrained(made.folder)
    image_id = made.config["image_token_id"]
    ids = _sequence(image_id, [h * w // 4 for _, h, w in grids])
    types = torch.from_numpy((ids == image_id).astype(np.int32))[None]
    theirs, _ = model.model.get_rope_index(
        torch.from_numpy(ids.astype(np.int64))[None],
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    ours = image_positions(ids, grids, image_token_id=image_id, merge=2)
    assert torch.equal(theirs[:, 0], torch.from_numpy(ours))


def test_patches_are_those_of_the_folders_image_processor(made):
    processor = PixelProcessor(made.folder)
    factor = processor.patch * processor.merge
    images = [_image(3 * factor, 4 * factor), _image(5 * factor, 2 * factor, seed=1)]
    pixels_PD, grids = processor(images)
    theirs = transformers.AutoImageProcessor.from_pretrained(made.folder)(
        images=[Image.fromarray(image) for image in images], return_tensors="pt"
    )
    assert torch.equal(pixels_PD, theirs["pixel_values"])
    assert torch.equal(grids, theirs["image_grid_thw"])


@pytest.mark.parametrize("sizes", [[5], [7], [6, 6], []])
def test_placeholders_that_do_not_match_the_images_are_refused(sizes):
    ids = _sequence(11, sizes)
    with pytest.raises(ModelError, match="placeholders"):
        image_positions(ids, [(1, 4, 6)], image_token_id=11, merge=2)


def test_a_run_that_is_torn_apart_is_refused():
    ids = np.array([1, 11, 11, 2, 11, 11, 3], dtype=np.int32)
    with pytest.raises(ModelError, match="one run"):
        image_positions(ids, [(1, 4, 4)], image_token_id=11, merge=2)


def test_a_batch_whose_placeholders_do_not_match_is_refused(made):
    vision = VisionInputs(made.folder, image_token_id=made.config["image_token_id"], forward_arguments=())
    image = vision.dummy_image
    ids = _sequence(vision.image_token_id, [vision.num_dummy_tokens - 1])[None].astype(np.int64)
    with pytest.raises(ModelError, match="placeholders"):
        vision.model_inputs([image], input_ids=ids, device=torch.device("cpu"))


def test_an_image_of_a_size_that_no_resizing_gives_is_refused(made):
    with pytest.raises(ModelError, match="multiples"):
        PixelProcessor(made.folder).grid_of(100, 128)


def test_a_folder_without_image_processor_is_refused(tmp_path):
    save_small_model(tmp_path, family="qwen3")
    with pytest.raises(ModelError, match="image processor"):
        PixelProcessor(tmp_path)
