"""Checks against the files that a configuration names and against this machine, before anything heavy is imported.

`check_files` reads small parts of files, `check_machine` counts devices without loading a vendor's library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from s2rl.config.model_folder import ModelFacts, check_tokenizer, inspect_model
from s2rl.config.paths import DATA_SUFFIXES, is_data_file
from s2rl.config.schema import DataSource, Device, RunConfig
from s2rl.errors import ConfigError, DataError


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
            f"rollout.max_model_len: {limit}, but the model in {config.model.path} has {facts.max_positions} "
            f"positions. "
            f"Lower it to {facts.max_positions}."
        )
    if config.device == "cpu" and facts.kv_values_per_token is not None:
        need = facts.kv_values_per_token * limit * (4 if config.rollout.dtype == "float32" else 2) / 2**30
        if need > config.rollout.kv_cache_gb:
            raise ConfigError(
                f"rollout.kv_cache_gb: {config.rollout.kv_cache_gb} GiB cannot hold one sequence of "
                f"rollout.max_model_len "
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
            f"device: the run needs {need} {config.device} devices (learner.ranks {config.learner.ranks} + "
            f"rollout.workers "
            f"{config.rollout.workers} x rollout.tensor_parallel {config.rollout.tensor_parallel}), there are "
            f"{available}. "
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
            f"learner.ranks x learner.threads + rollout.workers x rollout.threads = {threads} threads for {cores} "
            f"cores: "
            "expect them to wait for each other"
        )
    if config.device == "cpu" and config.learner.cpu_offload:
        warnings.append("learner.cpu_offload does nothing with device cpu")
    optimizer = config.learner.optimizer
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio > 0:
        warnings.append("learner.optimizer.min_lr_ratio does nothing with schedule constant")
    algorithm = config.algorithm
    if (
        algorithm.old_policy == "rollout"
        and algorithm.importance_cap
        and "importance_cap" in algorithm.model_fields_set
    ):
        warnings.append("algorithm.importance_cap does nothing with old_policy rollout")
    if not config.eval.data:
        warnings.append("eval.data is empty: held-out accuracy is not measured")
    return warnings
