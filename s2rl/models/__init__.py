"""Model families: what the learner has to know about each architecture, one file per family."""

from s2rl.config.disk import DiskTensor, read_layout
from s2rl.models.adapter import ModelAdapter, StoredPart
from s2rl.models.registry import adapter_for, known_architectures

__all__ = ["DiskTensor", "ModelAdapter", "StoredPart", "adapter_for", "known_architectures", "read_layout"]
