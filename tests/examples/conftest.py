"""The examples and scripts are files to run, not packages: they are loaded from their paths here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """The module in the file `path`, below the root of the repository."""
    name = "example_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    return load("examples/tiny/prepare.py")


@pytest.fixture(scope="session")
def smollm2() -> ModuleType:
    return load("examples/smollm2/prepare.py")


@pytest.fixture(scope="session")
def smollm2_rewards() -> ModuleType:
    return load("examples/smollm2/rewards.py")


@pytest.fixture(scope="session")
def one_file() -> ModuleType:
    return load("examples/grpo_in_one_file.py")


@pytest.fixture(scope="session")
def setup_env() -> ModuleType:
    return load("scripts/setup_env.py")
