"""Checkpoint folders: written whole, marked complete last, verified before they are used.

The learner's own files inside are written by `s2rl.fsdp`; nothing here imports torch.
"""

from __future__ import annotations

from s2rl.ckpt.store import CheckpointInfo, CheckpointStore, find_checkpoint, verify, write_problem

__all__ = ["CheckpointInfo", "CheckpointStore", "find_checkpoint", "verify", "write_problem"]
