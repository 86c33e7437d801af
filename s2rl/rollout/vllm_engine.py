"""The loop's engine protocol on top of vLLM's in-process `LLMEngine`. Imports vllm: only inside the engine thread."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from s2rl.config.schema import Device, ModelConfig, RolloutConfig
from s2rl.errors import ConfigError, RunError
from s2rl.rollout import vllm_compat
from s2rl.rollout.protocol import Delta, RankLoad
from s2rl.rollout.requests import EngineLimits, SequenceParams
from s2rl.types import FinishReason, ImageArray, SyncGroupSpec, TensorSpec

logger = logging.getLogger(__name__)

_FIRST = -(2**31)
"""Priority of scored sequences."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""vLLM's reasons; every other one means that the sequence was given up."""


class VllmEngine:
    """One vLLM engine in this process, tensor-parallel ranks beyond the first in processes of their own.

    Tried on the CPU, with one rank and with two. Not tried on an accelerator.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        device: Device,
        seed: int,
        extension_cls: str,
        eos_token_ids: tuple[int, ...],
        has_tokenizer: bool,
    ) -> None:
        """Load the model. The calling thread owns the engine from now on."""
        if device == "cpu":
            # vLLM replaces this function by one that refuses, and OpenMP keeps the number per thread.
            torch.set_num_threads(config.threads)
        vllm_compat.repair()
        arguments = vllm_compat.engine_args(
            model=model, config=config, device=device, seed=seed, extension_cls=extension_cls
        )
        unknown = sorted(set(config.engine_args) - {field.name for field in dataclasses.fields(EngineArgs)})
        if unknown:
            raise ConfigError(
                f"rollout.engine_args.{unknown[0]}: vLLM {vllm.__version__} has no such argument; see the list in its "
                "documentation (EngineArgs), or remove the key"
            )
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=False)
        except ValueError as error:  # pydantic's included: an argument, the architecture, a cache that is too small
            raise ConfigError(f"rollout: vLLM {vllm.__version__} refuses {model.path}: {error}") from error
        if device == "cpu" and torch.get_num_threads() != config.threads:
            raise RunError(f"the engine runs {torch.get_num_threads()} threads; rollout.threads is {config.threads}")
        self._engine.collective_rpc("s2rl_die_with", args=(os.getpid(),))
        model_config = self._engine.vllm_config.model_config
        self._image_group: tuple[Sequence[ImageArray], Any] | None = None
        self._is_multimodal = bool(model_config.is_multimodal_model)
        self.limits = EngineLimits(
            vocab_size=int(model_config.get_vocab_size()),
            max_model_len=int(model_config.max_model_len),
            eos_token_ids=eos_token_ids,
            can_stop_at_strings=has_tokenizer,
        )

    def add(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        params: SequenceParams,
        *,
        priority: int,
        images: Sequence[ImageArray] = (),
        image_spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """See `Engine.add`."""
        sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop_token_ids=list(params.stop_token_ids),
            # The stop ids above hold the end-of-sequence ids already; vLLM, without tokenizer, knows none of its own.
            ignore_eos=True,
            logit_bias=dict.fromkeys(params.banned_token_ids, float("-inf")) or None,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: Any = tokens_input(list(token_ids))
        if len(images):
            if not self._is_multimodal:
                raise ValueError("the prompt has images, and the model takes text only")
            prompt = self._image_prompt(token_ids, images, image_spans)
        self._engine.add_request(sequence_id, prompt, sampling, priority=priority)

    def _image_prompt(
        self, token_ids: Sequence[int], images: Sequence[ImageArray], spans: Sequence[tuple[int, int]]
    ) -> Any:
        """The completions of a group come one after the other: its images are processed once."""
        if self._image_group is None or self._image_group[0] is not images:
            rendered = vllm_compat.image_prompt(self._engine, token_ids, images=images, spans=spans)
            self._image_group = (images, rendered)
        return dict(self._image_group[1])

    def add_scored(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """See `Engine.add_scored`. Such requests never read the prefix cache."""
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(sequence_id, tokens_input(list(token_ids)), sampling, priority=_FIRST)

    def abort(self, sequence_ids: Sequence[str]) -> None:
        """See `Engine.abort`. vLLM maps our ids to those that it made of them."""
        self._engine.abort_request(list(sequence_ids))

    def step(self) -> list[Delta]:
        """See `Engine.step`."""
        deltas = []
        for request in self._engine.step():
            output = request.outputs[0]
            finish = None
            if output.finish_reason is not None:
                finish = _FINISH.get(output.finish_reason, FinishReason.ABORT)
            prompt_logprobs = None
            if request.prompt_logprobs is not None:
                # One entry per position; the first token has none.
                prompt_logprobs = np.asarray(request.prompt_logprobs.logprobs, dtype=np.float32)
            deltas.append(
                Delta(
                    sequence_id=request.request_id,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs.logprobs if output.logprobs is not None else (),
                    finish_reason=finish,
                    prompt_logprobs=prompt_logprobs,
                )
            )
        return deltas

    def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """See `Engine.join_sync`."""
        self._engine.collective_rpc("s2rl_join_sync", args=(spec, tuple(manifest)))

    def load_weights(self, version: int) -> list[RankLoad]:
        """See `Engine.load_weights`."""
        return self._engine.collective_rpc("s2rl_load_weights", args=(version,))

    def drop_caches(self, *, recompute: bool) -> None:
        """See `Engine.drop_caches`.

        With `recompute` vLLM preempts all running requests. They keep their sampled tokens: the next step computes keys
        and values of prompt and tokens anew and then samples the next one; the token budget counts all of them. As no
        step is in flight here, there is no sampled token that could be lost or given out twice.
        """
        if recompute and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RunError("vLLM could not reset its key-value cache after a weight update")
        if self._is_multimodal:
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()

    def close(self) -> None:
        """See `Engine.close`."""
        try:
            self._engine.collective_rpc("s2rl_leave_sync")
        finally:
            self._engine.engine_core.shutdown()
