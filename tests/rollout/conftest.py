"""Models for the tests of this folder. Its helper modules are importable by name, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dense models of the same shape: `first` and `second`."""
    from rollout_models import save_dense

    folder = tmp_path_factory.mktemp("models")
    save_dense(folder / "first", seed=1)
    save_dense(folder / "second", seed=2)
    return folder
