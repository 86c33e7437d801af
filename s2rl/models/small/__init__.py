"""Small model folders of every architecture, with random weights, in the layout that the real model has on the hub.

For tests and for rehearsing a run where the real model does not fit: the classes, the names and orientations of the
tensors on disk, tokenizer, processor and chat template are those of the real model, only the sizes are not.

    from s2rl.models.small import save_small_model

    save_small_model("tiny-vl", family="qwen3_vl_moe")
"""

from s2rl.models.small.build import SmallModel, save_small_model, save_weights
from s2rl.models.small.families import SMALL_FAMILIES

__all__ = ["SMALL_FAMILIES", "SmallModel", "save_small_model", "save_weights"]
