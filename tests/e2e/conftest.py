from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from e2e_runs import ROOT, Command

# The simulated processes live beside the controller bench.
sys.path.insert(0, str(ROOT))


def _load(path: str) -> ModuleType:
    name = "e2e_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The smallest example model with its data: sorting four digits."""
    return _load("examples/tiny/prepare.py").build(tmp_path_factory.mktemp("example") / "nano", size="nano")


Start = Callable[..., Command]


@pytest.fixture(scope="module")
def start_in_module() -> Iterator[Start]:
    """`Command`, ended at the end of the module at the latest."""
    yield from _commands()


@pytest.fixture
def start() -> Iterator[Start]:
    """`Command`, ended at the end of the test at the latest."""
    yield from _commands()


def _commands() -> Iterator[Start]:
    commands: list[Command] = []

    def start(arguments: list[str], **options: Any) -> Command:
        commands.append(Command(arguments, **options))
        return commands[-1]

    try:
        yield start
    finally:
        for command in commands:
            command.close()
