"""Checks across sections. Every message starts with a key and ends with what to change.

What needs files or the machine is in `machine.py`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator

from s2rl.config.paths import is_data_file
from s2rl.config.schema import RunConfig
from s2rl.errors import ConfigError

OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "block_size": "rollout.block_size",
    "seed": "seed",
    "async_scheduling": None,
    "disable_log_stats": None,
    "generation_config": None,
    "kv_cache_memory_bytes": "rollout.kv_cache_gb",
    "speculative_config": None,
    "use_tqdm_on_load": None,
    "logprobs_mode": None,
    "max_logprobs": None,
    "scheduling_policy": None,
    "load_format": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "worker_cls": None,
    "distributed_executor_backend": None,
    "data_parallel_size": "rollout.workers",
    "pipeline_parallel_size": None,
    "skip_tokenizer_init": None,
    "mm_processor_cache_gb": None,
}
"""vLLM engine arguments that s2rl sets, and the key that decides each (None: no choice is left)."""


def check(config: RunConfig) -> None:
    """Raise `ConfigError`, one line per problem, when values of different sections cannot work together."""
    problems = [problem for rule in _RULES for problem in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt and completion that training can meet."""
    return config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens


def max_outstanding_groups(config: RunConfig) -> int:
    """Groups that may be admitted and not yet trained at once."""
    batches = (config.staleness.max_staleness + 1) // config.algorithm.updates_per_batch
    return batches * config.algorithm.groups_per_step


def _budgets(config: RunConfig) -> Iterator[str]:
    prompt, limit = config.data.max_prompt_tokens, config.rollout.max_model_len
    budgets = {"rollout.sampling.max_new_tokens": config.rollout.sampling.max_new_tokens}
    if config.eval.data and config.eval.sampling.max_new_tokens:
        budgets["eval.sampling.max_new_tokens"] = config.eval.sampling.max_new_tokens
    for key, new in budgets.items():
        if prompt + new > limit:
            yield (
                f"{key}: {new} with data.max_prompt_tokens {prompt} makes {prompt + new} tokens, rollout.max_model_len "
                f"is {limit}. Raise rollout.max_model_len to {prompt + new}, or lower one of the two."
            )
    longest, room = longest_sequence(config), config.learner.max_tokens_per_micro_batch
    if longest > room:
        yield (
            f"learner.max_tokens_per_micro_batch: {room} cannot hold the longest sequence, data.max_prompt_tokens "
            f"{prompt} "
            f"+ rollout.sampling.max_new_tokens {longest - prompt} = {longest}. Raise it to at least {longest}."
        )
    seqs, tokens = config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens
    if tokens < seqs:
        yield (
            f"rollout.max_num_batched_tokens: {tokens} is less than rollout.max_num_seqs {seqs}; each running "
            f"completion "
            f"needs one token per engine step. Raise it to at least {seqs}."
        )
    for key, tokens in (("contract.tokens", config.contract.tokens), ("sync.probe_tokens", config.sync.probe_tokens)):
        if key == "sync.probe_tokens" and tokens > limit:
            yield f"{key}: {tokens} is more than rollout.max_model_len {limit}. Lower it."


def _groups(config: RunConfig) -> Iterator[str]:
    algorithm, ranks = config.algorithm, config.learner.ranks
    if algorithm.group_size == 1:
        yield (
            f"algorithm.group_size: 1 with the group-relative advantage {algorithm.advantage} makes every "
            f"advantage zero, "
            "nothing would be learned. Use at least 2 (8 is usual)."
        )
    samples = algorithm.groups_per_step * algorithm.group_size
    if samples < ranks:
        yield (
            f"learner.ranks: {ranks} ranks cannot share the {samples} samples of a batch (algorithm.groups_per_step x "
            "algorithm.group_size). Use fewer ranks or more samples."
        )


def _staleness(config: RunConfig) -> Iterator[str]:
    bound, updates, every = config.staleness.max_staleness, config.algorithm.updates_per_batch, config.sync.every
    least = every * updates - 1
    if bound < least:
        yield (
            f"staleness.max_staleness: {bound} cannot be kept with sync.every {every} and algorithm.updates_per_batch "
            f"{updates}: the last step before a sync trains tokens that are {least} versions old. Set it to at "
            f"least {least}, "
            "or sync more often."
        )
        return
    depth, cap, least = config.staleness.depth, max_outstanding_groups(config), config.algorithm.groups_per_step
    if depth != "auto" and not least <= depth <= cap:
        yield (
            f"staleness.depth: {depth}, allowed: {least} to {cap} (algorithm.groups_per_step to the most that "
            f"staleness.max_staleness {bound} permits), or auto."
        )


def _rollout(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.prefix_caching and rollout.kv_on_update == "keep":
        yield (
            "rollout.prefix_caching: true with rollout.kv_on_update keep would serve keys and values of older "
            "weights to "
            "new prompts. Set rollout.prefix_caching=false or rollout.kv_on_update=recompute."
        )
    for name in rollout.engine_args:
        if name.replace("-", "_") in OWN_ENGINE_ARGS:
            key = OWN_ENGINE_ARGS[name.replace("-", "_")]
            yield (
                f"rollout.engine_args.{name}: s2rl sets this itself. "
                + (f"Use {key}." if key else "Remove it; training relies on its value.")
            )
    if config.device == "cpu" and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel: {rollout.tensor_parallel} with device cpu, allowed: 1. Use rollout.workers "
            f"for more "
            "engines, rollout.threads for faster ones."
        )


def _learner(config: RunConfig) -> Iterator[str]:
    learner, optimizer = config.learner, config.learner.optimizer
    steps = config.steps * config.algorithm.updates_per_batch
    if optimizer.warmup_steps >= steps:
        yield (
            f"learner.optimizer.warmup_steps: {optimizer.warmup_steps} of the run's {steps} optimizer steps (steps x "
            "algorithm.updates_per_batch): the peak learning rate would never be reached. Lower it."
        )
    if config.model.attention == "flash_attention_2":
        if config.device == "cpu":
            yield "model.attention: flash_attention_2 with device cpu, allowed: auto, eager or sdpa."
        if learner.dtype == "float32":
            yield "model.attention: flash_attention_2 computes in bfloat16 only. Set learner.dtype=bfloat16."


def _data(config: RunConfig) -> Iterator[str]:
    for key, sources in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for index, source in enumerate(sources):
            if source.split is not None and is_data_file(source.path):
                yield f"{key}.{index}.split: {source.path} is a file, only named data sets have splits. Remove it."
    if config.stop_at_accuracy is not None and not config.eval.data:
        yield f"stop_at_accuracy: {config.stop_at_accuracy}, but accuracy is never measured. Give eval.data."


def _logging(config: RunConfig) -> Iterator[str]:
    if config.logging.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield (
            f"logging.wandb_project: {config.logging.wandb_project!r}, but the package wandb is not installed. "
            "`pip install wandb`, or remove the key."
        )
    for name in config.cluster.env_vars:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.env_vars: {name!r} is no name of an environment variable."


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _budgets,
    _groups,
    _staleness,
    _rollout,
    _learner,
    _data,
    _logging,
)
