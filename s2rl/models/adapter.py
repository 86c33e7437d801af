"""What the learner has to know about a model family, and the answers that hold for dense decoders.

An adapter names classes by name only, so importing one is free; transformers is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from s2rl.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapter:
    """A family whose parameters carry the same names and shapes in the model and on disk, and that takes text only.

    Another family subclasses it and overrides what differs.
    """

    architectures: tuple[str, ...]
    """Entries of `architectures` in config.json; each is also the name of the transformers class."""
    wrap_classes: tuple[str, ...]
    """Module classes that become one FSDP unit each."""
    packable: bool = True
    """Whether several sequences may share one row, kept apart by position ids."""

    def shares_prompts(self, config: Any) -> bool:
        """Whether every layer of a model with this configuration attends to all that an attention mask lets it see.

        Sliding windows, chunks and recurrent layers follow the order of positions in a row, so a completion would see
        another one of its row.
        """
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        return kinds == {"full_attention"} and not getattr(text, "use_sliding_window", False)

    def model_class(self, architecture: str) -> Any:
        """The transformers class that the learner builds for `architecture`."""
        import transformers

        try:
            return getattr(transformers, architecture)
        except AttributeError:
            raise ModelError(
                f"model.path: transformers {transformers.__version__} has no class {architecture}; install a newer one."
            ) from None

    def disk_name(self, name: str, *, tied: bool) -> str | None:
        """Name on disk of the learner's parameter `name`; `None` when it is not stored.

        A tied output head is the embedding and is stored once, as the embedding.
        """
        return None if tied and name == "lm_head.weight" else name

    def from_disk(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor read from disk in the layout that the learner's parameter has (rows are never reordered)."""
        return tensor

    def to_disk(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `from_disk`."""
        return tensor

    def fresh_buffers(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Values of `module`'s buffers that no file holds, computed on the CPU.

        A model built on the meta device has shapes only; rotary frequencies are not stored, so they are computed by
        building that one module again. Empty when this adapter does not know the module.
        """
        if "RotaryEmbedding" not in type(module).__name__:
            return {}
        return dict(type(module)(config=module.config).named_buffers(recurse=False))
