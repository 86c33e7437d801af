"""Models for the tests of this folder. Its helper modules are importable by name, here and in child processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from s2rl.fsdp.learner import Learner

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fsdp_models import save_qwen3

    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fsdp_models import save_llama

    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fsdp_models import save_qwen3_moe

    return save_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def qwen3_moe_fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fsdp_models import save_qwen3_moe

    return save_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe_fused"), fused=True)


@pytest.fixture
def start() -> Iterator[Callable[..., Learner]]:
    """Starts one-rank learners one after the other: the one before is closed first."""
    from fsdp_models import make_learner

    running: list[Learner] = []

    def close() -> None:
        while running:
            running.pop().close()

    def begin(folder: Path, **settings: Any) -> Learner:
        close()
        learner = make_learner(folder, **settings)
        running.append(learner)
        learner.start()
        return learner

    yield begin
    close()
