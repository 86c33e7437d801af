"""Checks across sections, against files, and against this machine.

`check` needs the configuration alone and runs at load time. `check_files` reads small parts of the files that are named,
`check_machine` counts devices; both before anything heavy is imported. Every message starts with a key and ends with
what to change.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from s2rl.config.model_folder import ModelFacts, check_tokenizer, inspect_model
from s2rl.config.paths import DATA_SUFFIXES, is_data_file
from s2rl.config.schema import DataSource, Device, RunConfig
from s2rl.errors import ConfigError, DataError

ENGINE_ARGS_OF_OURS = {
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
            f"learner.max_tokens_per_micro_batch: {room} cannot hold the longest sequence, data.max_prompt_tokens {prompt} "
            f"+ rollout.sampling.max_new_tokens {longest - prompt} = {longest}. Raise it to at least {longest}."
        )
    seqs, tokens = config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens
    if tokens < seqs:
        yield (
            f"rollout.max_num_batched_tokens: {tokens} is less than rollout.max_num_seqs {seqs}; each running completion "
            f"needs one token per engine step. Raise it to at least {seqs}."
        )
    for key, tokens in (("contract.tokens", config.contract.tokens), ("sync.probe_tokens", config.sync.probe_tokens)):
        if key == "sync.probe_tokens" and tokens > limit:
            yield f"{key}: {tokens} is more than rollout.max_model_len {limit}. Lower it."


def _groups(config: RunConfig) -> Iterator[str]:
    algorithm, ranks = config.algorithm, config.learner.ranks
    if algorithm.group_size == 1:
        yield (
            f"algorithm.group_size: 1 with the group-relative advantage {algorithm.advantage} makes every advantage zero, "
            "nothing would be learned. Use at least 2 (8 is usual)."
        )
    samples = algorithm.groups_per_step * algorithm.group_size
    if samples // algorithm.updates_per_batch < ranks:
        yield (
            f"learner.ranks: {ranks} ranks cannot share {samples} samples in {algorithm.updates_per_batch} update(s) "
            "(algorithm.groups_per_step x algorithm.group_size / algorithm.updates_per_batch). Use fewer ranks or more samples."
        )
    if algorithm.groups_per_step % algorithm.updates_per_batch:
        yield (
            f"algorithm.updates_per_batch: {algorithm.updates_per_batch} does not divide algorithm.groups_per_step "
            f"{algorithm.groups_per_step}. Use a divisor."
        )


def _staleness(config: RunConfig) -> Iterator[str]:
    bound, updates, every = config.staleness.max_staleness, config.algorithm.updates_per_batch, config.sync.every
    least = every * updates - 1
    if bound < least:
        yield (
            f"staleness.max_staleness: {bound} cannot be kept with sync.every {every} and algorithm.updates_per_batch "
            f"{updates}: the last step before a sync trains tokens that are {least} versions old. Set it to at least {least}, "
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
            "rollout.prefix_caching: true with rollout.kv_on_update keep would serve keys and values of older weights to "
            "new prompts. Set rollout.prefix_caching=false or rollout.kv_on_update=recompute."
        )
    for name in rollout.engine_args:
        if name.replace("-", "_") in ENGINE_ARGS_OF_OURS:
            key = ENGINE_ARGS_OF_OURS[name.replace("-", "_")]
            yield (
                f"rollout.engine_args.{name}: s2rl sets this itself. "
                + (f"Use {key}." if key else "Remove it; training relies on its value.")
            )
    if config.device == "cpu" and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel: {rollout.tensor_parallel} with device cpu, allowed: 1. Use rollout.workers for more "
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
            yield "model.attention: flash_attention_2 computes in bfloat16 only; set learner.dtype=bfloat16 or another attention."


def _data(config: RunConfig) -> Iterator[str]:
    for key, sources in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for index, source in enumerate(sources):
            if source.split is not None and is_data_file(source.path):
                yield f"{key}.{index}.split: {source.split!r} for the file {source.path}; only named data sets have splits. Remove it."
    if config.stop_at_accuracy is not None and not config.eval.data:
        yield f"stop_at_accuracy: {config.stop_at_accuracy} without eval.data: accuracy is never measured. Give eval.data."


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


def check_files(config: RunConfig) -> ModelFacts:
    """Check model folder, tokenizer, data files and run folder; returns what the model folder says.

    Raises `ModelError`, `DataError` or `ConfigError`.
    """
    facts = inspect_model(config.model.path)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer, key="model.tokenizer")
    else:
        check_tokenizer(config.model.path, key="model.path")
    for key, sources in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for index, source in enumerate(sources):
            _check_source(source, key=f"{key}.{index}.path")
    for folder in (config.run_dir, *config.run_dir.parents):
        if folder.exists():
            if not folder.is_dir():
                raise ConfigError(
                    f"runs_dir: {folder} is a file, so the run folder {config.run_dir} cannot be made. Choose another."
                )
            if not os.access(folder, os.W_OK):
                raise ConfigError(f"runs_dir: {folder} may not be written to. Choose another folder.")
            break
    _check_model_limits(config, facts)
    return facts


def _check_source(source: DataSource, *, key: str) -> None:
    path = Path(source.path)
    if path.is_dir():
        raise DataError(
            f"{key}: {path} is a folder, allowed: a file ({', '.join(DATA_SUFFIXES)}) or the name of a data set"
        )
    if not is_data_file(source.path):
        return
    if not path.is_file():
        raise DataError(f"{key}: no such file: {path}")
    if path.suffix not in DATA_SUFFIXES:
        raise DataError(f"{key}: {path} ends with {path.suffix or 'nothing'}, allowed: {', '.join(DATA_SUFFIXES)}")
    if path.stat().st_size == 0:
        raise DataError(f"{key}: {path} is empty")


def _check_model_limits(config: RunConfig, facts: ModelFacts) -> None:
    limit = config.rollout.max_model_len
    if facts.max_positions is not None and limit > facts.max_positions:
        raise ConfigError(
            f"rollout.max_model_len: {limit}, but the model in {config.model.path} has {facts.max_positions} positions. "
            f"Lower it to {facts.max_positions}."
        )
    if config.device == "cpu" and facts.kv_values_per_token is not None:
        need = facts.kv_values_per_token * limit * (4 if config.rollout.dtype == "float32" else 2) / 2**30
        if need > config.rollout.kv_cache_gb:
            raise ConfigError(
                f"rollout.kv_cache_gb: {config.rollout.kv_cache_gb} GiB cannot hold one sequence of rollout.max_model_len "
                f"{limit} tokens, which takes {need:.2f} GiB. Raise the one or lower the other."
            )
    if facts.vocab_size is not None:
        for key in ("stop_token_ids", "banned_token_ids"):
            beyond = [i for i in getattr(config.rollout.sampling, key) if i >= facts.vocab_size]
            if beyond:
                raise ConfigError(
                    f"rollout.sampling.{key}: {beyond[0]} is not a token id; the model has {facts.vocab_size} (0 to "
                    f"{facts.vocab_size - 1})."
                )


def devices_needed(config: RunConfig) -> int:
    """Accelerators that the run takes, or CPU processes that compute."""
    return config.learner.ranks + config.rollout.workers * config.rollout.tensor_parallel


def check_devices(config: RunConfig, *, available: int) -> None:
    """Raise `ConfigError` when the run needs more accelerators than there are (on the machine or in the cluster)."""
    need = devices_needed(config)
    if config.device != "cpu" and need > available:
        raise ConfigError(
            f"device: the run needs {need} {config.device} devices (learner.ranks {config.learner.ranks} + rollout.workers "
            f"{config.rollout.workers} x rollout.tensor_parallel {config.rollout.tensor_parallel}), there are {available}. "
            "Lower one of them" + ("." if available else ", or set device=cpu.")
        )


def check_machine(config: RunConfig) -> None:
    """Check devices and threads of this machine; does nothing for a cluster that is joined."""
    if config.cluster.address is not None:
        return
    check_devices(config, available=count_devices(config.device))
    cores = num_cores()
    threads = {"rollout.threads": config.rollout.threads, "learner.threads": config.learner.threads}
    for key, value in threads.items():
        if config.device == "cpu" and value > cores:
            raise ConfigError(
                f"{key}: {value} threads for one process, this machine has {cores} cores. Use at most {cores}."
            )


def count_devices(device: Device) -> int:
    """Devices on this machine, by their files and the variable that hides them (no vendor library is loaded)."""
    if device == "cpu":
        return num_cores()
    pattern, variable = {
        "cuda": (r"nvidia\d+", "CUDA_VISIBLE_DEVICES"),
        "npu": (r"davinci\d+", "ASCEND_RT_VISIBLE_DEVICES"),
    }[device]
    present = sum(1 for file in Path("/dev").iterdir() if re.fullmatch(pattern, file.name))
    visible = os.environ.get(variable)
    if visible is None:
        return present
    return min(present, sum(1 for part in visible.split(",") if part.strip() not in ("", "-1")))


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warnings_of(config: RunConfig) -> list[str]:
    """Settings that work but are probably not meant."""
    warnings = []
    cores = num_cores()
    threads = config.learner.ranks * config.learner.threads + config.rollout.workers * config.rollout.threads
    if config.device == "cpu" and config.cluster.address is None and threads > cores:
        warnings.append(
            f"learner.ranks x learner.threads + rollout.workers x rollout.threads = {threads} threads for {cores} cores: "
            "expect them to wait for each other"
        )
    if config.device == "cpu" and config.learner.cpu_offload:
        warnings.append("learner.cpu_offload does nothing with device cpu")
    optimizer = config.learner.optimizer
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio > 0:
        warnings.append("learner.optimizer.min_lr_ratio does nothing with schedule constant")
    if config.algorithm.old_policy == "rollout" and "importance_cap" in config.algorithm.model_fields_set:
        if config.algorithm.importance_cap is not None:
            warnings.append("algorithm.importance_cap does nothing with old_policy rollout")
    if not config.eval.data:
        warnings.append("eval.data is empty: held-out accuracy is not measured")
    return warnings
