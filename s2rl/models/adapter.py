"""What the learner has to know about a model family, and the answers that hold for dense decoders.

An adapter names classes by name only, so importing one is free; transformers is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from s2rl.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One tensor on disk and the part of a parameter that it holds."""

    name: str
    """On disk."""
    index: tuple[int | slice, ...] = ()
    """The part, as an index into the parameter; empty for all of it. Dimension 0, over which parameters are sharded, is
    taken whole or at one place."""
    transposed: bool = False
    """Whether the last two dimensions of the part have changed places on disk."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of `parameter`, a view, in the orientation that it has on disk."""
        part = parameter[self.index] if self.index else parameter
        return part.transpose(-1, -2) if self.transposed else part


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdapter:
    """A family whose parameters carry the same names and shapes in the model and on disk.

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

    def image_token_id(self, config: Any) -> int | None:
        """The placeholder of image positions; None for a model that takes text only."""
        return getattr(config, "image_token_id", None)

    def model_class(self, architecture: str) -> Any:
        """The transformers class that the learner builds for `architecture`."""
        import transformers

        try:
            return getattr(transformers, architecture)
        except AttributeError:
            raise ModelError(
                f"model.path: transformers {transformers.__version__} has no class {architecture}; install a newer one."
            ) from None

    def stored(self, name: str, shape: Sequence[int], *, tied: bool, disk: Collection[str]) -> tuple[StoredPart, ...]:
        """The tensors that hold parameter `name` of `shape` in a folder with the tensors `disk`.

        Together they hold each element once. Empty for a parameter that is not stored: a tied output head is the
        embedding and is stored once, as the embedding.
        """
        return () if tied and name == "lm_head.weight" else (StoredPart(name=name),)

    def fresh_buffers(self, module: Any) -> Mapping[str, torch.Tensor]:
        """Values of `module`'s buffers that no file holds, computed on the CPU.

        A model built on the meta device has shapes only; rotary frequencies are not stored, so they are computed by
        building that one module again. Empty when this adapter does not know the module.
        """
        if "RotaryEmbedding" not in type(module).__name__:
            return {}
        if hasattr(module, "config"):
            fresh = type(module)(config=module.config)
        else:  # of a vision tower, in older releases
            fresh = type(module)(module.dim, module.theta)
        return dict(fresh.named_buffers(recurse=False))
