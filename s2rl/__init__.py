"""s2rl: a standalone asynchronous GRPO trainer for language and vision-language models.

    from s2rl import Trainer, load_config
    result = Trainer(load_config("x.yaml")).fit()

Importing this package imports neither torch nor ray nor vllm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s2rl.config import load_config
    from s2rl.trainer import Trainer, TrainResult

__version__ = "0.1.0"
__all__ = ["TrainResult", "Trainer", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from s2rl.config import load_config

        return load_config
    if name in ("Trainer", "TrainResult"):
        from s2rl import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 's2rl' has no attribute {name!r}")
