"""Makes torchvision importable beside a torch build that cannot load torchvision's compiled operators.

Such a torchvision stops at import with "operator torchvision::nms does not exist", and so does everything that imports
torchvision when it is installed. Its Python transforms need none of these operators: declaring their schemas is enough.

`setup_env.py` copies this file into the environment, next to a .pth file that imports it at interpreter start, because
vLLM inspects models in subprocesses, which a patch in the parent would not reach. At that moment it imports only `sys`;
the rest happens when torchvision is first imported. A torchvision that imports by itself is left alone.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without importing typing at every interpreter start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
libraries: list[Any] = []  # torch drops the schemas together with the library object


def _declare_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    libraries.append(library)


class _TorchvisionFinder:
    """Finds torchvision as the standard finder does, and lets a failed import run again with the schemas declared."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except RuntimeError as error:
                if "torchvision::nms" not in str(error):
                    raise
                for loaded in [key for key in sys.modules if key.startswith("torchvision.")]:
                    del sys.modules[loaded]
                _declare_schemas()
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _TorchvisionFinder())
