"""Tiny random models, samples and learners for the tests of the learner."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from s2rl.config.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from s2rl.fsdp.learner import Learner
from s2rl.types import MicroBatch, RankBatch, Sample

VOCAB_SIZE = 67  # odd, so that two ranks hold different numbers of rows


def save_tokenizer(folder: Path) -> None:
    vocab = {f"t{i}": i for i in range(VOCAB_SIZE - 2)} | {"<pad>": VOCAB_SIZE - 2, "<end>": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


def save_qwen3(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 1, layers: int = 2) -> Path:
    """Tied embeddings, grouped queries, norms on queries and keys."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_llama(folder: Path, *, seed: int = 2) -> Path:
    """Untied head, scaled rotary frequencies, mixed types, two files."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.lm_head.float()  # a head in another type than the body, as some published models have
    model.save_pretrained(folder, max_shard_size="20KB")
    save_tokenizer(folder)
    return folder


def save_qwen3_moe(folder: Path, *, seed: int = 3, fused: bool = False) -> Path:
    """One dense layer and two of five experts, so that two ranks hold different numbers of them; no side is square.

    On disk three matrices for each expert, or with `fused` the two parameters of a layer.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config)
    if fused:
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(folder)
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    else:
        model.save_pretrained(folder, max_shard_size="20KB")
    save_tokenizer(folder)
    return folder


def make_samples(
    num: int, *, seed: int = 0, version: int = 0, prompt: tuple[int, int] = (2, 9), completion: tuple[int, int] = (1, 8)
) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num):
        prompt_len, length = int(rng.integers(*prompt)), int(rng.integers(*completion))
        samples.append(
            Sample(
                group_id=f"g{index // 2}",
                token_ids=rng.integers(0, VOCAB_SIZE, prompt_len + length).astype(np.int32),
                prompt_len=prompt_len,
                logprobs=(-4.2 + 0.3 * rng.standard_normal(length)).astype(np.float32),
                versions=np.full(length, version, dtype=np.int32),
                advantage=float(rng.standard_normal()),
            )
        )
    return samples


def rank_batch(micros: list[list[Sample]], *, everyone: list[Sample] | None = None, version: int = 0) -> RankBatch:
    """One rank's batch; `everyone` are the samples of all ranks."""
    samples = everyone if everyone is not None else [s for micro in micros for s in micro]
    return RankBatch(
        version=version,
        micro_batches=tuple(MicroBatch(rows=tuple((sample,) for sample in micro)) for micro in micros),
        num_loss_tokens=sum(len(s.logprobs) for s in samples),
        num_samples=len(samples),
        num_padding_tokens=0,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_learner(
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    port: int | None = None,
    algorithm: dict[str, Any] | None = None,
    temperature: float = 1.0,
    rollout_dtype: str = "float32",
    total_steps: int = 10,
    seed: int = 0,
    **learner: Any,
) -> Learner:
    attention = learner.pop("attention", "auto")
    settings = {"dtype": "float32", "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}, **learner}
    return Learner(
        model=ModelConfig(path=folder, attention=attention),
        learner=LearnerConfig.model_validate({"ranks": world_size, **settings}),
        algorithm=AlgorithmConfig.model_validate(algorithm or {}),
        temperature=temperature,
        rollout_dtype=rollout_dtype,  # type: ignore[arg-type]
        total_steps=total_steps,
        seed=seed,
        device="cpu",
        rank=rank,
        world_size=world_size,
        master_host="127.0.0.1",
        master_port=port or free_port(),
        timeout_s=60,
    )


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of what the learner would publish."""
    from s2rl.fsdp.export import export_tensors

    state = learner._started()
    return {n: t.clone() for n, t in export_tensors(state.policy, learner.manifest(), device=state.device)}
