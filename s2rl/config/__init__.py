"""Configuration: schema, loading, checks, the plan of resources and the generated reference.

Nothing here imports torch, ray or vllm, and all of it together takes a fraction of a second.
"""

from __future__ import annotations

from s2rl.config.identity import digest, resume_conflicts
from s2rl.config.load import config_from_dict, dump_config, load_config
from s2rl.config.machine import check_devices, check_files, check_machine, warnings_of
from s2rl.config.schema import RunConfig

__all__ = [
    "RunConfig",
    "check_devices",
    "check_files",
    "check_machine",
    "config_from_dict",
    "digest",
    "dump_config",
    "load_config",
    "resume_conflicts",
    "warnings_of",
]
