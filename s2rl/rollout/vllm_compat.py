"""Everything that depends on vLLM's version or works around a fault in it. Tried with vLLM 0.32.0 for CPUs.

Importing this module does not import vllm; its functions do.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from s2rl.config.checks import OWN_ENGINE_ARGS
from s2rl.config.model_folder import takes_images
from s2rl.config.schema import Device, ModelConfig, RolloutConfig
from s2rl.errors import ConfigError
from s2rl.types import ImageArray

logger = logging.getLogger(__name__)

SCORE_PLACES = 2
"""Places in the engine's batch beyond `max_num_seqs`, so that scored sequences never queue behind completions."""


def environment(config: RolloutConfig, *, device: Device) -> dict[str, str]:
    """Environment variables that vLLM reads on import. Those a user set already win where they only tune."""
    forced = {
        # One process, so that this process's thread runs the engine's steps and nothing is left when it is killed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(config.threads),
    }
    tuning = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Binding threads to cores is for machines that vLLM has to itself.
        tuning["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # oneDNN compiles a kernel (half a millisecond, up to 0.8 MB) for each number of rows that a matrix product
        # meets and keeps 1024 of them, so that an engine would grow by hundreds of MB over its first hundred updates.
        tuning["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "128"
        # Nothing of the model is compiled; one helper of the sampler would be, for 3 s and with a C++ compiler.
        forced["TORCHDYNAMO_DISABLE"] = "1"
    if device == "npu":
        # Weights in the NZ layout cannot be loaded again.
        forced["VLLM_ASCEND_ENABLE_NZ"] = "0"
    return forced | {name: value for name, value in tuning.items() if name not in os.environ}


def engine_args(
    *, model: ModelConfig, config: RolloutConfig, device: Device, seed: int, extension_cls: str
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`. Raises ConfigError for arguments that s2rl sets itself."""
    clash = sorted(OWN_ENGINE_ARGS.keys() & set(config.engine_args))
    if clash:
        raise ConfigError(
            f"rollout.engine_args.{clash[0]}: this argument is set by s2rl; use the keys of `rollout`, or leave it out"
        )
    args: dict[str, Any] = {
        "model": str(model.path),
        "trust_remote_code": model.trust_remote_code,
        # Prompts come and completions go as token ids; end-of-sequence ids are passed with each request.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs + SCORE_PLACES,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs + SCORE_PLACES),
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "scheduling_policy": "priority",
        # With it a step would be under way while weights change, and its tokens would belong to no version.
        "async_scheduling": False,
        # After temperature: of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": extension_cls,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if takes_images(model.path):
        # vLLM's image processing insists on a tokenizer; it still gets token ids. Its profile of a video is not needed.
        args |= {"skip_tokenizer_init": False, "tokenizer": str(model.tokenizer or model.path)}
        args["limit_mm_per_prompt"] = {"video": 0}
        # A cache of processed images in two halves. They drift apart when a prompt is refused in between (0.32), or are
        # not both emptied (before vLLM #43001): the engine then ends with the next prompt that has the same image.
        args["mm_processor_cache_gb"] = 0
    if device == "cpu":
        args["block_size"] = config.block_size or 32
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gb * 2**30)
    else:
        if config.block_size is not None:
            args["block_size"] = config.block_size
        args["gpu_memory_utilization"] = config.memory_fraction
    return args | dict(config.engine_args)


def image_prompt(
    engine: Any, token_ids: Sequence[int], *, images: Sequence[ImageArray], spans: Sequence[tuple[int, int]]
) -> Any:
    """What `LLMEngine.add_request` takes for a prompt with images; spans as in `Encoded`.

    vLLM expands placeholders itself, and would expand expanded ones again, so it gets one for each image. Raises
    ValueError when it cannot process the images, or when its tokens are not those of `token_ids`.
    """
    from PIL import Image

    collapsed: list[int] = []
    done = 0
    for start, length in spans:
        collapsed += token_ids[done : start + 1]
        done = start + length
    collapsed += token_ids[done:]
    prompt = {
        "prompt_token_ids": collapsed,
        "multi_modal_data": {"image": [Image.fromarray(image) for image in images]},
    }
    try:
        [rendered] = engine.renderer.render_cmpl([prompt])
    except Exception as error:  # one prompt's failure, whatever its image did to the processor
        raise ValueError(f"vLLM cannot process the prompt's images: {type(error).__name__}: {error}") from error
    expanded = list(rendered["prompt_token_ids"])
    if expanded != list(token_ids):
        raise ValueError(
            f"vLLM makes {len(expanded)} tokens of a prompt with {len(images)} images that has {len(token_ids)} for "
            "the learner; both must see the same"
        )
    return rendered


def repair() -> None:
    """Mend faults of vLLM that have to be mended before a worker is built. Idempotent."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import sampler
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        # The rank of each sampled token, which vLLM computes with every log-probability: 5 % of a decode step of a
        # small model on the CPU, and nobody here reads it.
        sampler.batched_count_greater_than = _no_ranks
        if not getattr(CPUModelRunner, "_s2rl_repaired", False):
            _rewind_cpu_generators(CPUModelRunner)
            CPUModelRunner._s2rl_repaired = True


def reload(model_runner: Any, weights: Iterable[tuple[str, Any]]) -> list[str]:
    """Load tensors in checkpoint layout into a running model; returns the engine parameters not (fully) loaded.

    vLLM keeps tensors until a layer is complete, so they must own their memory. Parameters padded by the engine are
    counted without declared padding; embeddings, whose padding is not declared, only have to receive something.
    """
    model = model_runner.get_model()
    names = [name for name, _ in model.named_parameters()]
    if _is_cpu():
        _forget_moe_kernels(model)
    counter = _LoadCounter(model)
    with counter.counting():
        model_runner.reload_weights(weights_iterator=counter.watch(weights))
    if _is_cpu():
        _repack_tied_heads(model)
    return counter.unloaded(names)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent is gone."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _no_ranks(logprobs: Any, _values: Any) -> Any:
    return logprobs.new_zeros(logprobs.shape[0]).long()


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _forget_moe_kernels(model: Any) -> None:
    """vLLM 0.32 on the CPU skips packing the experts when a kernel object exists, and samples from unpacked weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_heads(model: Any) -> None:
    """vLLM 0.32 on the CPU computes logits with a packed copy of the output head, made when its own layer is loaded.

    A head tied to the embedding is not loaded itself, so its copy would stay that of the first weights, with no error.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    for head in embeddings:
        tied = any(other is not head and other.weight.data_ptr() == head.weight.data_ptr() for other in embeddings)
        if isinstance(head, ParallelLMHead) and tied:
            head.quant_method.process_weights_after_loading(head)


def _rewind_cpu_generators(runner: Any) -> None:
    """Give seeded requests with a chunked prefill their random state back on the CPU.

    The sampler also draws for a request whose prefill is not finished, and vLLM 0.32 undoes that with
    `Generator.set_offset`, which CPU generators do not have: "CPU Generator does not use offset" ends the engine.
    """
    original_sample, original_bookkeeping = runner._sample, runner._bookkeeping_sync

    @functools.wraps(original_sample)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        generators = [g for g in map(batch.generators.get, discarded) if g is not None]
        states = [g.get_state() for g in generators]
        output = original_sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    @functools.wraps(original_bookkeeping)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return original_bookkeeping(self, *args, **kwargs)
        finally:
            batch.generators = generators

    runner._sample = sample
    runner._bookkeeping_sync = bookkeeping


class _LoadCounter:
    """Counts the elements that reach each engine parameter while vLLM reloads a model layer by layer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names: dict[int, str] = {}
        self._params: list[Any] = []
        self._expected: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        self._named_by_model: set[str] = set()

    def watch(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass tensors on. By the first request for one, vLLM has put the model into its loading state."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

        padded = {id(p) for m in self._model.modules() if isinstance(m, VocabParallelEmbedding) for p in m.parameters()}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            self._params.append(param)  # keeps its id its own
            self._names.setdefault(id(param), name)
            self._expected[name] = 1 if id(param) in padded else get_tensor_load_numel(param)
        yield from weights

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Watch vLLM's own count of loaded elements and what the model says it loaded."""
        from vllm.model_executor.model_loader.reload import layerwise

        count = layerwise.get_numel_loaded
        load_weights = self._model.load_weights

        def counted(loader: Any, args: Any) -> Any:
            param = args.arguments.get("param")
            numel, result = count(loader, args)
            name = self._names.get(id(param))
            if name is not None:
                self._loaded[name] = self._loaded.get(name, 0) + numel
            return numel, result

        def named(*args: Any, **kwargs: Any) -> Any:
            result = load_weights(*args, **kwargs)
            self._named_by_model.update(result or ())
            return result

        layerwise.get_numel_loaded = counted
        self._model.load_weights = named
        try:
            yield
        finally:
            layerwise.get_numel_loaded = count
            del self._model.load_weights

    def unloaded(self, names: list[str]) -> list[str]:
        """Those of `names` that received nothing or too little."""
        missing = []
        for name in names:
            if name in self._loaded:
                complete = self._loaded[name] >= self._expected[name]
            else:  # a parameter that vLLM loads past its layerwise machinery
                complete = name in self._named_by_model
            if not complete:
                missing.append(name)
        return missing
