"""The controller of a run: the only package that sees rollout workers and learners both."""

from __future__ import annotations

from s2rl.trainer.trainer import Trainer, TrainResult

__all__ = ["TrainResult", "Trainer"]
