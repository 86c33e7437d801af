"""The small models' architectures: config.json of the shape that the real model's has, and what else its folder holds.

Sizes keep the inequalities of the real ones (2I != H, I != H), because code that tells orientations apart by shape is
blind when they are equal. The limits that vLLM 0.32 has on a CPU also decide: attention heads of at least 32, gated
delta net heads of 128, a hidden size that 32 divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from s2rl.models.small import templates
from s2rl.models.small.tokenizer import Kind, SmallTokenizer

Layout = Literal["as_is", "per_expert", "transposed", "qwen2_5_vl"]
"""How tensors on disk differ from those of transformers' class: not at all; three matrices for each expert; the fused
experts with their last two dimensions exchanged; or other prefixes."""

HIDDEN = 96
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_INTERMEDIATE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What the image processor's file says."""

    patch: int
    """Side of a patch in pixels."""
    min_pixels: int
    max_pixels: int
    size_format: Literal["size", "pixels"]
    """`size`: {"shortest_edge", "longest_edge"}, which are numbers of pixels; `pixels`: min_pixels and max_pixels."""
    image_processor_type: str
    processor_class: str
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    video_processor: bool = True
    """A video_preprocessor_config.json lies beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of small model."""

    architecture: str
    """Entry of config.json's `architectures`."""
    body: str
    """The class of transformers that makes the tensors."""
    config: Callable[[SmallTokenizer, int], dict[str, Any]]
    """config.json for a tokenizer and a number of vocabulary rows."""
    layout: Layout = "as_is"
    tokenizer: Kind = "qwen"
    chat_template: str
    template_file: Literal["", "chat_template.json", "chat_template.jinja"] = ""
    """A file of its own; "": the template stands in tokenizer_config.json alone."""
    template_in_config: bool = True
    image: ImageLimits | None = None
    shard_name: str = "model-{n:05d}-of-{total:05d}.safetensors"
    shards: int = 2
    """0: one model.safetensors without an index."""
    mtp: Literal["", "dense", "per_expert", "fused"] = ""
    mtp_file: str = ""
    """A file of their own for `mtp.*`; "": among the others."""
    time_series: bool = False
    fp32: tuple[str, ...] = ()
    """Tensors whose name ends so are stored in fp32; the others in bf16."""
    generation: Mapping[str, Any]
    """Sampling defaults of generation_config.json."""


def _qwen3_dense(*, tied: bool) -> Callable[[SmallTokenizer, int], dict[str, Any]]:
    def config(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": tokenizer.ids["<|endoftext|>"],
            "eos_token_id": tokenizer.ids["<|im_end|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.05,
            "intermediate_size": 160,
            "max_position_embeddings": 40960,
            "max_window_layers": 2,
            "model_type": "qwen3",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": vocab,
        }

    return config


def _qwen3_moe(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
    return _qwen3_dense(tied=False)(tokenizer, vocab) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _llama(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.ids["<|begin_of_text|>"],
        "eos_token_id": [tokenizer.ids[t] for t in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")],
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.05,
        "intermediate_size": 160,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
        "vocab_size": vocab,
    }


def _vision_ids(tokenizer: SmallTokenizer) -> dict[str, int]:
    return {
        "image_token_id": tokenizer.ids["<|image_pad|>"],
        "video_token_id": tokenizer.ids["<|video_pad|>"],
        "vision_end_token_id": tokenizer.ids["<|vision_end|>"],
        "vision_start_token_id": tokenizer.ids["<|vision_start|>"],
    }


def _qwen2_5_vl(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.ids["<|endoftext|>"],
        "eos_token_id": tokenizer.ids["<|im_end|>"],
        **_vision_ids(tokenizer),
        "vision_token_id": tokenizer.ids["<|vision_pad|>"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.05,
        "intermediate_size": 160,
        "max_position_embeddings": 128000,
        "max_window_layers": 2,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 3,  # no head_dim here: it is hidden_size / heads
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 3,
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": HIDDEN,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.05,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vocab_size": vocab,
    }


def _vision(model_type: str, *, deepstack: list[int]) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": deepstack,
        "depth": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "initializer_range": 0.05,
        "intermediate_size": 112,
        "model_type": model_type,
        "num_heads": 2,
        "num_position_embeddings": 144,  # a grid of 12 x 12
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen3_vl(*, moe: bool) -> Callable[[SmallTokenizer, int], dict[str, Any]]:
    def config(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
        model_type = "qwen3_vl_moe" if moe else "qwen3_vl"
        text: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": tokenizer.ids["<|endoftext|>"],
            "dtype": "bfloat16",
            "eos_token_id": tokenizer.ids["<|im_end|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.05,
            "intermediate_size": 160,
            "max_position_embeddings": 262144,
            "model_type": f"{model_type}_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": vocab,
        }
        if moe:
            text |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": EXPERT_INTERMEDIATE,
                "norm_topk_prob": True,
                "num_experts": EXPERTS,
                "num_experts_per_tok": EXPERTS_PER_TOKEN,
            }
        else:
            text["tie_word_embeddings"] = True
        return {
            "architectures": ["Qwen3VLMoeForConditionalGeneration" if moe else "Qwen3VLForConditionalGeneration"],
            "image_token_id": tokenizer.ids["<|image_pad|>"],
            "model_type": model_type,
            "text_config": text,
            "tie_word_embeddings": not moe,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": tokenizer.ids["<|video_pad|>"],
            "vision_config": _vision(model_type, deepstack=[0, 1]),
            "vision_end_token_id": tokenizer.ids["<|vision_end|>"],
            "vision_start_token_id": tokenizer.ids["<|vision_start|>"],
        }

    return config


def _qwen3_5(
    *, moe: bool, tied: bool = False, model_type: str = "", architecture: str = ""
) -> Callable[[SmallTokenizer, int], dict[str, Any]]:
    own_type = "qwen3_5_moe" if moe else "qwen3_5"
    own_architecture = "Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"

    def config(tokenizer: SmallTokenizer, vocab: int) -> dict[str, Any]:
        text: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": tokenizer.ids["<|endoftext|>"],
            "full_attention_interval": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.05,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": f"{own_type}_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "use_cache": True,
            "vocab_size": vocab,
        }
        if moe:
            text |= {
                "mlp_only_layers": [],
                "moe_intermediate_size": EXPERT_INTERMEDIATE,
                "num_experts": EXPERTS,
                "num_experts_per_tok": EXPERTS_PER_TOKEN,
                "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": EXPERT_INTERMEDIATE,
            }
        else:
            text |= {"intermediate_size": 160, "tie_word_embeddings": tied}
        return {
            "architectures": [architecture or own_architecture],
            "image_token_id": tokenizer.ids["<|image_pad|>"],
            "model_type": model_type or own_type,
            "text_config": text,
            "tie_word_embeddings": tied,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": tokenizer.ids["<|video_pad|>"],
            "vision_config": _vision(own_type, deepstack=[]),
            "vision_end_token_id": tokenizer.ids["<|vision_end|>"],
            "vision_start_token_id": tokenizer.ids["<|vision_start|>"],
        }

    return config


_IMAGE_16 = ImageLimits(
    patch=16,
    min_pixels=4 * 32 * 32,
    max_pixels=64 * 32 * 32,
    size_format="size",
    image_processor_type="Qwen2VLImageProcessorFast",
    processor_class="Qwen3VLProcessor",
)
_IMAGE_14 = ImageLimits(
    patch=14,
    min_pixels=4 * 28 * 28,
    max_pixels=64 * 28 * 28,
    size_format="pixels",
    image_processor_type="Qwen2VLImageProcessor",
    processor_class="Qwen2_5_VLProcessor",
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    video_processor=False,
)

_SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
_SAMPLING_VL: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
_SAMPLING_3_5: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}

_QWEN3_5_COMMON: dict[str, Any] = {
    "tokenizer": "qwen3_5",
    "chat_template": templates.QWEN3_5,
    "template_file": "chat_template.jinja",
    "image": _IMAGE_16,
    "shard_name": "model.safetensors-{n:05d}-of-{total:05d}.safetensors",
    "fp32": ("linear_attn.A_log", "linear_attn.norm.weight"),
    "generation": _SAMPLING_3_5,
}
_QWEN3_5_MOE: dict[str, Any] = _QWEN3_5_COMMON | {
    "architecture": "Qwen3_5MoeForConditionalGeneration",
    "body": "Qwen3_5MoeForConditionalGeneration",
    "config": _qwen3_5(moe=True),
    "shards": 3,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        body="LlamaForCausalLM",
        config=_llama,
        tokenizer="llama",
        chat_template=templates.LLAMA3,
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        body="Qwen3ForCausalLM",
        config=_qwen3_dense(tied=True),
        chat_template=templates.QWEN3,
        shards=0,
        generation=_SAMPLING,
    ),
    "qwen3_untied": Family(
        architecture="Qwen3ForCausalLM",
        body="Qwen3ForCausalLM",
        config=_qwen3_dense(tied=False),
        chat_template=templates.QWEN3,
        generation=_SAMPLING,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        body="Qwen3MoeForCausalLM",
        config=_qwen3_moe,
        layout="per_expert",
        chat_template=templates.QWEN3,
        generation=_SAMPLING,
    ),
    "qwen2_5_vl": Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        body="Qwen2_5_VLForConditionalGeneration",
        config=_qwen2_5_vl,
        layout="qwen2_5_vl",
        chat_template=templates.QWEN2_5_VL,
        template_file="chat_template.json",
        image=_IMAGE_14,
        generation={"do_sample": True, "repetition_penalty": 1.05, "temperature": 1e-06},
    ),
    "qwen3_vl": Family(
        architecture="Qwen3VLForConditionalGeneration",
        body="Qwen3VLForConditionalGeneration",
        config=_qwen3_vl(moe=False),
        chat_template=templates.QWEN3_VL,
        template_file="chat_template.json",
        image=_IMAGE_16,
        generation=_SAMPLING_VL,
    ),
    "qwen3_vl_moe": Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        body="Qwen3VLMoeForConditionalGeneration",
        config=_qwen3_vl(moe=True),
        layout="transposed",
        chat_template=templates.QWEN3_VL,
        template_file="chat_template.json",
        image=_IMAGE_16,
        generation=_SAMPLING_VL,
    ),
    "qwen3_5": Family(
        architecture="Qwen3_5ForConditionalGeneration",
        body="Qwen3_5ForConditionalGeneration",
        config=_qwen3_5(moe=False),
        mtp="dense",
        **_QWEN3_5_COMMON,
    ),
    "qwen3_5_tied": Family(
        architecture="Qwen3_5ForConditionalGeneration",
        body="Qwen3_5ForConditionalGeneration",
        config=_qwen3_5(moe=False, tied=True),
        mtp="dense",
        shards=1,
        **_QWEN3_5_COMMON,
    ),
    "qwen3_5_moe": Family(mtp="per_expert", **_QWEN3_5_MOE),
    "qwen3_5_moe_fused_mtp": Family(mtp="fused", mtp_file="mtp.safetensors", **_QWEN3_5_MOE),
    "intern_s2_preview": Family(
        **_QWEN3_5_MOE
        | {
            "architecture": "InternS2PreviewForConditionalGeneration",
            "config": _qwen3_5(
                moe=True,
                model_type="intern_s2_preview",
                architecture="InternS2PreviewForConditionalGeneration",
            ),
            "mtp": "per_expert",
            "time_series": True,
            "shard_name": "model-{n:05d}-of-{total:05d}.safetensors",
            "fp32": (*_QWEN3_5_COMMON["fp32"], "lm_head.weight", "encoder_embed.pos_encoder.pe"),
        }
    ),
}

SMALL_FAMILIES: tuple[str, ...] = tuple(FAMILIES)
"""Names that `save_small_model` takes. `_untied`, `_tied` and `_fused_mtp` are variants that real models also have."""
