"""Write a small model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from s2rl.errors import ModelError
from s2rl.models.small.families import FAMILIES, Family, ImageLimits
from s2rl.models.small.layout import stored_tensors
from s2rl.models.small.tokenizer import CORPUS, SmallTokenizer, save_tokenizer, write_json

if TYPE_CHECKING:
    import torch

_SPREAD = 0.05
"""Standard deviation that vectors (norms, biases) are moved by, so that none of them is what a class starts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A folder that was written."""

    folder: Path
    family: str
    architecture: str
    config: Mapping[str, Any]
    """What config.json holds."""
    tokenizer: SmallTokenizer
    names: tuple[str, ...]
    """Names of the tensors on disk, sorted."""

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return FAMILIES[self.family].image is not None


def save_small_model(
    folder: str | Path,
    *,
    family: str = "qwen3_vl_moe",
    seed: int = 0,
    config_changes: Mapping[str, Any] | None = None,
    corpus: Sequence[str] = (),
) -> SmallModel:
    """Write a model of random weights with everything that belongs to it into `folder`, which is made if need be.

    The same arguments give the same bytes. `config_changes` replaces values of config.json, inside its sections too
    ({"text_config": {"num_hidden_layers": 4}}); `corpus` is text that the tokenizer learns from besides its own.
    Raises ModelError for a family that is not in SMALL_FAMILIES.
    """
    folder = Path(folder)
    chosen = _family(family)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(
        folder,
        kind=chosen.tokenizer,
        chat_template=chosen.chat_template,
        template_in_config=chosen.template_in_config,
        corpus=(*CORPUS, *corpus),
        num_merges=400,
    )
    # Like the real ones a few rows longer than the tokenizer.
    config = chosen.config(tokenizer, (tokenizer.size + 32) & ~31)
    _update(config, config_changes or {})
    write_json(folder / "config.json", config)
    _save_small_files(folder, chosen, tokenizer, version=str(config["transformers_version"]))
    weights = new_weights(chosen, config=config, seed=seed)
    names = save_weights(folder, family=family, weights=weights, seed=seed)
    return SmallModel(
        folder=folder,
        family=family,
        architecture=chosen.architecture,
        config=config,
        tokenizer=tokenizer,
        names=names,
    )


def new_weights(family: Family, *, config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors with the names and shapes of transformers' class. Leaves torch's random state as it was."""
    import torch
    import transformers

    model_class = getattr(transformers, family.body, None)
    if model_class is None:
        raise ModelError(f"transformers {transformers.__version__} has no class {family.body}; install a newer one")
    own = {key: value for key, value in config.items() if key not in ("torch_dtype", "architectures", "model_type")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class.from_dict(json.loads(json.dumps(own)))).float()
    weights = dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(weights):
        tensor = weights[name]
        if tensor.ndim == 1 and not name.endswith("A_log"):
            weights[name] = tensor + _SPREAD * torch.randn(tensor.shape, generator=generator)
    return weights


def save_weights(
    folder: str | Path, *, family: str, weights: Mapping[str, torch.Tensor], seed: int = 0
) -> tuple[str, ...]:
    """Write the tensors of transformers' class into a folder that `save_small_model` made, in place of its own.

    For a model that was trained a little with transformers. `seed` is that of the tensors which the class lacks.
    Returns the names on disk, sorted.
    """
    folder = Path(folder)
    chosen = _family(family)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = stored_tensors(chosen, weights=weights, config=config, seed=seed)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    _save_shards(folder, chosen, tensors)
    return tuple(sorted(tensors))


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ModelError(f"small model: family {name!r} is not known; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _update(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _update(config[key], value)
        else:
            config[key] = value


def _save_shards(folder: Path, family: Family, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    own_file = {name for name in tensors if family.mtp_file and name.startswith("mtp.")}
    main = [name for name in tensors if name not in own_file]
    if family.shards == 0:
        save_file({name: tensors[name] for name in main}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    limit = sum(tensors[name].nbytes for name in main) / family.shards
    shards: list[list[str]] = [[]]
    size = 0
    for name in main:
        if size >= limit and len(shards) < family.shards:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    files = {
        family.shard_name.format(n=n, total=len(shards)): names for n, names in enumerate(shards, start=1) if names
    }
    if own_file:
        files[family.mtp_file] = sorted(own_file)
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted((name, file) for file, names in files.items() for name in names)),
    }
    write_json(folder / "model.safetensors.index.json", index)


def _save_small_files(folder: Path, family: Family, tokenizer: SmallTokenizer, *, version: str) -> None:
    if family.template_file == "chat_template.json":
        write_json(folder / "chat_template.json", {"chat_template": family.chat_template})
    elif family.template_file:
        (folder / family.template_file).write_text(family.chat_template, encoding="utf-8")
    write_json(folder / "generation_config.json", _generation(family, tokenizer, version=version))
    if family.image is None:
        return
    write_json(folder / "preprocessor_config.json", _image_processor(family.image))
    if family.image.video_processor:
        write_json(folder / "video_preprocessor_config.json", _video_processor(family.image))


def _generation(family: Family, tokenizer: SmallTokenizer, *, version: str) -> dict[str, Any]:
    ids = tokenizer.ids
    if family.tokenizer == "llama":
        tokens: dict[str, Any] = {
            "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": [ids[t] for t in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")],
        }
    else:
        tokens = {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        }
    return {**tokens, **family.generation, "transformers_version": version}


def _image_processor(image: ImageLimits) -> dict[str, Any]:
    limits: dict[str, Any] = (
        {"size": {"longest_edge": image.max_pixels, "shortest_edge": image.min_pixels}}
        if image.size_format == "size"
        else {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels}
    )
    return {
        **limits,
        **_patches(image),
        "processor_class": image.processor_class,
        "image_processor_type": image.image_processor_type,
    }


def _video_processor(image: ImageLimits) -> dict[str, Any]:
    return {
        "size": {"longest_edge": 2 * image.max_pixels, "shortest_edge": image.min_pixels},
        **_patches(image),
        "processor_class": image.processor_class,
        "video_processor_type": "Qwen3VLVideoProcessor",
    }


def _patches(image: ImageLimits) -> dict[str, Any]:
    return {
        "patch_size": image.patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": list(image.mean),
        "image_std": list(image.std),
    }
