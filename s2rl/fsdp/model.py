"""Builds the sharded policy: meta-device construction, `fully_shard`, and each rank's rows read straight from disk.

No rank ever holds an unsharded copy: a parameter goes from the safetensors file into the local shard row range by row
range, one tensor at a time, and is cast on the way.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from s2rl.config.model_folder import architectures_of
from s2rl.config.schema import Device, LearnerConfig, ModelConfig
from s2rl.errors import ModelError
from s2rl.fsdp.policy import Policy
from s2rl.models import DiskTensor, ModelAdapter, StoredPart, adapter_for, read_layout
from s2rl.models.vision.inputs import VisionInputs
from s2rl.types import RowLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedPolicy:
    """A policy whose parameters are sharded, and how they are called and stored on disk."""

    module: Policy
    adapter: ModelAdapter
    parameters: Mapping[str, nn.Parameter]
    """Sharded parameters (DTensors) by their name in the model, in sorted order; tied ones once. The objects stay the
    same for the life of the policy; while FSDP has parameters gathered, the module's own attributes are others."""
    stored: Mapping[str, tuple[StoredPart, ...]]
    """The tensors of the model folder that hold each parameter."""
    disk: Mapping[str, DiskTensor]
    """What the model folder holds under the names of `stored`."""
    vocab_size: int
    layout: RowLayout
    vision: VisionInputs | None
    """What makes the inputs of the vision tower; None for a model without one."""
    keep_gathered: bool
    """Parameters stay gathered from the first forward of a step to its last backward, and gradients are reduced once.
    Otherwise both happen per micro-batch, and no rank holds more than one gathered unit at a time."""

    def gather(self, *, last: bool) -> None:
        """Say whether the coming backward pass is the last of its step."""
        if self.keep_gathered:
            root: Any = self.module
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
            root.set_is_last_backward(last)

    def reshard(self) -> None:
        """Free gathered parameters; needed after parameters change otherwise than by a backward pass and a step."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def resolve_attention(requested: str, *, device: Device) -> str:
    """The attention implementation for `model.attention`."""
    if requested != "auto":
        return requested
    return "flash_attention_2" if device == "cuda" and find_spec("flash_attn") is not None else "sdpa"


def resolve_packing(requested: Literal["auto", "on", "off"], *, attention: str) -> bool:
    """Whether samples share a row. Only variable-length kernels keep packed samples apart without a quadratic mask."""
    return requested == "on" or (requested == "auto" and attention == "flash_attention_2")


def resolve_sharing(
    requested: Literal["auto", "on", "off"], *, packed: bool, attention: str, adapter: ModelAdapter, config: Any
) -> bool:
    """Whether completions share a row with their prompt. Raises ModelError where it was asked for and cannot be."""
    if requested == "off":
        return False
    if packed:
        obstacle = "learner.packing is in use, whose rows are kept apart by position ids only"
    elif attention != "sdpa":
        obstacle = f"attention '{attention}' does not take a mask of our own, 'sdpa' does"
    elif not adapter.shares_prompts(config):
        obstacle = "this model has layers other than full attention, which an attention mask does not reach"
    else:
        return True
    if requested == "on":
        raise ModelError(f"learner.prompt_sharing: 'on' is not possible: {obstacle}. Set it to 'auto' or 'off'.")
    return False


def attention_break_even(causal_lm: Any, config: Any) -> int:
    """Row length at which attention over the row costs as much as all matrix products of the layers.

    A position costs 2 floating point operations for every parameter of a layer, and 4 for every key and element of
    the query heads.
    """
    text = config.get_text_config()
    outside = {id(causal_lm.get_input_embeddings().weight), id(causal_lm.get_output_embeddings().weight)}
    decoder = getattr(causal_lm.base_model, "language_model", causal_lm)
    in_layers = sum(p.numel() for p in decoder.parameters() if id(p) not in outside)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return max(1, in_layers // (2 * text.num_hidden_layers * text.num_attention_heads * head_dim))


def build_policy(
    model: ModelConfig,
    learner: LearnerConfig,
    *,
    device: torch.device,
    mesh: DeviceMesh,
    trainable: bool = True,
) -> ShardedPolicy:
    """The policy of `model`, sharded over `mesh` and loaded.

    Masters are float32; with `trainable=False` (the frozen reference) parameters are held in the compute type instead.
    Raises ModelError for a folder, architecture, class name or tensor that does not fit.
    """
    built = _build(model, learner, device=device.type, trainable=trainable)
    causal_lm, adapter, disk, stored = built.causal_lm, built.adapter, built.disk, built.stored
    policy = Policy(causal_lm, chunk_tokens=learner.logprob_chunk_tokens)
    # Checkpointing is bound to training mode; nothing else is, since every dropout is set to 0.
    policy.train(learner.activation_checkpointing and trainable)
    policy.requires_grad_(trainable)

    keep_gathered = trainable and _keeps_gathered(learner, world_size=mesh.size())
    compute = getattr(torch, learner.dtype)
    _shard(policy, built.wrap_classes, learner, compute=compute, mesh=mesh, reshard=not keep_gathered)
    parameters = _materialise(causal_lm, stored.keys(), device=torch.device("cpu") if learner.cpu_offload else device)
    _load(parameters, stored, disk)
    _fill_buffers(causal_lm, adapter, device=device)
    return ShardedPolicy(
        module=policy,
        adapter=adapter,
        parameters=parameters,
        stored=stored,
        disk={part.name: disk[part.name] for parts in stored.values() for part in parts},
        vocab_size=causal_lm.get_input_embeddings().weight.shape[0],
        layout=built.layout,
        vision=built.vision,
        keep_gathered=keep_gathered,
    )


def check_model(model: ModelConfig, learner: LearnerConfig, *, device: Device) -> int:
    """Raise ModelError for everything that `build_policy` refuses and that headers tell; loads no tensor.

    Returns the number of embedding rows.
    """
    built = _build(model, learner, device=device, trainable=True)
    return int(built.causal_lm.get_input_embeddings().weight.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Built:
    """A model on the meta device, checked against its folder."""

    causal_lm: Any
    adapter: ModelAdapter
    disk: Mapping[str, DiskTensor]
    stored: Mapping[str, tuple[StoredPart, ...]]
    """Tensors on disk by parameter name; without parameters that are not stored."""
    wrap_classes: tuple[str, ...]
    layout: RowLayout
    vision: VisionInputs | None


def _build(model: ModelConfig, learner: LearnerConfig, *, device: str, trainable: bool) -> _Built:
    # First: transformers' own answer to an architecture that it does not know is long and about something else.
    adapter_for(architectures_of(model.path))
    config = _read_config(model)
    adapter, architecture = adapter_for(config.architectures)
    attention = resolve_attention(model.attention, device=device)  # type: ignore[arg-type]
    packed = resolve_packing(learner.packing, attention=attention)
    if packed and not adapter.packable:
        raise ModelError(f"learner.packing: {architecture} cannot keep packed sequences apart; set it to 'off'.")
    shares = resolve_sharing(learner.prompt_sharing, packed=packed, attention=attention, adapter=adapter, config=config)
    held = torch.float32 if trainable else getattr(torch, learner.dtype)
    causal_lm = _build_on_meta(adapter.model_class(architecture), config, attention=attention, dtype=held)
    if learner.activation_checkpointing and trainable:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    disk = read_layout(model.path)
    stored = _stored(causal_lm, adapter, tied=bool(config.tie_word_embeddings), disk=disk)
    _check_layout(causal_lm, stored, disk, folder=model.path)
    wrap = learner.wrap_classes or adapter.wrap_classes
    known = {type(module).__name__ for module in causal_lm.modules()}
    for name in wrap:
        if name not in known:
            raise ModelError(
                f"learner.wrap_classes: the model has no module of class '{name}'; it has {', '.join(sorted(known))}."
            )
    return _Built(
        causal_lm=causal_lm,
        adapter=adapter,
        disk=disk,
        stored=stored,
        wrap_classes=tuple(wrap),
        layout=RowLayout(
            packed=packed, shares_prompts=shares, attention_break_even=attention_break_even(causal_lm, config)
        ),
        vision=_vision(model, adapter, causal_lm, config=config),
    )


def _vision(model: ModelConfig, adapter: ModelAdapter, causal_lm: Any, *, config: Any) -> VisionInputs | None:
    image_token_id = adapter.image_token_id(config)
    if image_token_id is None:
        return None
    arguments = inspect.signature(type(causal_lm.base_model).forward).parameters
    return VisionInputs(model.path, image_token_id=image_token_id, forward_arguments=arguments)


def _read_config(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    if not (model.path / "config.json").is_file():
        raise ModelError(
            f"model.path: {model.path} is not a model folder: it has no config.json. Give the folder that holds "
            "config.json, the tokenizer and safetensors files."
        )
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: {model.path}/config.json cannot be used: {error}") from error


def _build_on_meta(model_class: Any, config: Any, *, attention: str, dtype: torch.dtype) -> Any:
    """The model with shapes only, its dropouts off: a policy's log-probabilities must not be random."""
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise ModelError(f"model.attention: '{attention}' cannot be used here: {error}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _stored(
    model: nn.Module, adapter: ModelAdapter, *, tied: bool, disk: Collection[str]
) -> dict[str, tuple[StoredPart, ...]]:
    """Tensors on disk by parameter name, in the model's order, without parameters that are not stored."""
    named = (
        (name, adapter.stored(name, parameter.shape, tied=tied, disk=disk))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return {name: parts for name, parts in named if parts}


def _check_layout(
    model: nn.Module, stored: Mapping[str, tuple[StoredPart, ...]], disk: Mapping[str, DiskTensor], *, folder: Path
) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = {part.name: part.of(parameters[name]).shape for name, parts in stored.items() for part in parts}
    absent = sorted(expected.keys() - disk.keys())
    if absent:
        raise ModelError(
            f"model.path: {folder} lacks {len(absent)} of the model's tensors, the first is {absent[0]}; the weights "
            "belong to another model or are incomplete."
        )
    for name, shape in expected.items():
        if tuple(shape) != disk[name].shape:
            raise ModelError(
                f"model.path: {name} has shape {list(disk[name].shape)} in {folder}, but config.json asks "
                f"for {list(shape)}."
            )
    unused = sorted(disk.keys() - expected.keys())
    if unused:
        logger.warning("%s holds %d tensors that are not trained, the first is %s", folder, len(unused), unused[0])


def _keeps_gathered(learner: LearnerConfig, *, world_size: int) -> bool:
    setting = learner.reshard_after_forward
    return setting == "off" or (setting == "auto" and world_size == 1)


def _shard(
    policy: Policy,
    wrap_classes: Sequence[str],
    learner: LearnerConfig,
    *,
    compute: torch.dtype,
    mesh: DeviceMesh,
    reshard: bool,
) -> None:
    """One FSDP unit per wrapped class, and the root for the rest: embedding, final norm, output head."""
    on_accelerator = mesh.device_type != "cpu"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_accelerator) if learner.cpu_offload else OffloadPolicy(),
    }
    for module in [m for m in policy.modules() if type(m).__name__ in wrap_classes]:
        fully_shard(module, reshard_after_forward=reshard, **settings)
    # The root's parameters are needed first in the backward pass, so they always stay for it.
    fully_shard(policy, reshard_after_forward=False, **settings)


def _materialise(model: nn.Module, names: Collection[str], *, device: torch.device) -> dict[str, nn.Parameter]:
    """Give every sharded parameter memory for its local rows; those in `names`, sorted.

    `Module.to_empty` would do this too, but it unties tied parameters.
    """
    made: dict[int, nn.Parameter] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, meta in list(model.named_parameters(remove_duplicate=False)):
        assert isinstance(meta, DTensor)
        if id(meta) not in made:
            local = torch.empty(meta.to_local().shape, dtype=meta.dtype, device=device)
            sharded = DTensor.from_local(
                local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
            )
            made[id(meta)] = nn.Parameter(sharded, requires_grad=meta.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[id(meta)])
        if name in names:
            parameters[name] = made[id(meta)]
    if len({id(p) for p in parameters.values()}) != len(made):
        raise ModelError("model.path: two of the model's parameters share a tensor that the adapter does not know.")
    return dict(sorted(parameters.items()))


def _load(
    parameters: Mapping[str, nn.Parameter],
    stored: Mapping[str, tuple[StoredPart, ...]],
    disk: Mapping[str, DiskTensor],
) -> None:
    """Read this rank's rows of every parameter."""
    from safetensors import safe_open

    by_file: dict[Path, list[tuple[nn.Parameter, StoredPart]]] = {}
    for name, parameter in parameters.items():
        for part in stored[name]:
            by_file.setdefault(disk[part.name].file, []).append((parameter, part))
    with torch.no_grad():
        for file, entries in sorted(by_file.items(), key=lambda item: item[0]):
            with safe_open(file, framework="pt", device="cpu") as reader:
                for parameter, part in entries:
                    if not _read_part(parameter, part, reader):
                        raise ModelError(
                            f"model.path: {part.name} in {file} holds values that are not finite: nothing can be "
                            "trained from it. Restore the file, or use another checkpoint of the model."
                        )


def _read_part(parameter: nn.Parameter, part: StoredPart, reader: Any) -> bool:
    """Read what this rank holds of one stored tensor; whether all of it is finite."""
    local = local_shard(parameter)
    if not local.numel():
        return True
    start = _first_row(parameter)
    if part.index and isinstance(part.index[0], int):
        row = part.index[0] - start
        if not 0 <= row < local.shape[0]:
            return True
        target = dataclasses.replace(part, index=(row, *part.index[1:])).of(local)
        target.copy_(reader.get_tensor(part.name))
    else:
        assert not part.index and (local.ndim > 2 or not part.transposed), "dimension 0 is read in rows"
        target = part.of(local)
        target.copy_(reader.get_slice(part.name)[start : start + local.shape[0]])
    return bool(torch.isfinite(target).all())


def local_shard(parameter: Tensor) -> Tensor:
    """This rank's rows of a sharded parameter or gradient; shares memory with it."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _first_row(parameter: Tensor) -> int:
    """Index of this rank's first row. FSDP deals rows like torch.chunk: equal parts, the last ones smaller or empty."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    rows_per_rank = -(-parameter.shape[0] // mesh.size())
    return rows_per_rank * mesh.get_local_rank()


def _fill_buffers(model: nn.Module, adapter: ModelAdapter, *, device: torch.device) -> None:
    """Replace buffers that exist by shape only, and refuse a model with one whose value nobody knows."""
    for path, module in model.named_modules():
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        fresh = adapter.fresh_buffers(module)
        for name, buffer in _meta_buffers(module):
            if name not in fresh:
                raise ModelError(
                    f"model.path: the value of buffer {path}.{name} is not known; its model's adapter in s2rl/models/ "
                    "has to supply it."
                )
            value = fresh[name].to(device)
            assert value.shape == buffer.shape
            module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


def _meta_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, b) for n, b in list(module.named_buffers(recurse=False)) if b.is_meta)


def forget_forward_order(policy: nn.Module) -> None:
    """Drop the list of units that FSDP expects a backward pass for.

    FSDP appends to it in every forward and clears it in the backward pass; for a frozen model it would only grow.
    There is no public call for this (torch 2.13 has `reset_iter_state`, earlier releases have nothing).
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                if group is not None:
                    group._post_forward_indices.clear()
