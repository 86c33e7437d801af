"""From the name of a reward function to the function. Runs in the grading processes: keep its imports light."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from s2rl.errors import ConfigError
from s2rl.rewards.base import RewardInput
from s2rl.types import Score

BUILT_IN: Mapping[str, str] = {
    "exact_match": "s2rl.rewards.builtin:exact_match",
    "numeric": "s2rl.rewards.builtin:numeric",
    "gsm8k": "s2rl.rewards.builtin:gsm8k",
    "math_boxed": "s2rl.rewards.math:math_boxed",
}

Grader = Callable[[RewardInput], Score | float]


def load_function(name: str, *, args: Mapping[str, Any], key: str = "rewards.functions") -> Grader:
    """The reward function `name` (a built-in or `package.module:function`) with its `args` filled in.

    Raises ConfigError that begins with `key`: unknown name, module that does not import, no such function in it, not a
    plain function, arguments that it does not take.
    """
    path = BUILT_IN.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(_unknown(name, key=key))
    module = _import(module_name, name=name, key=key)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            raise ConfigError(_no_attribute(part, holder=function, name=name, key=key))
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(f"{key}: {name!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            f"{key}: {name!r} is an `async def`; make it a plain function (it may call asyncio.run itself)"
        )
    _check_args(function, args=args, name=name, key=key)
    return partial(function, **args) if args else function


def add_working_folder() -> None:
    """Make modules in the working folder importable, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _import(module_name: str, *, name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        # Importing runs somebody's code, which raises anything; all of it means that this path cannot be used.
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name):
            text += f". Modules are looked for in {os.getcwd()} and in what is installed"
        raise ConfigError(f"{key}: {name!r} does not import: {text}") from error


def _unknown(name: str, *, key: str) -> str:
    built_in = ", ".join(BUILT_IN)
    if ":" not in name and "." in name:
        module, _, function = name.rpartition(".")
        hint = f"A dotted path has a colon before the function: {module}:{function}"
    else:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Your own function is named package.module:function"
    return f"{key}: no reward function is named {name!r}; built in are {built_in}. {hint}"


def _no_attribute(part: str, *, holder: Any, name: str, key: str) -> str:
    public = [n for n in dir(holder) if not n.startswith("_") and callable(getattr(holder, n, None))]
    near = difflib.get_close_matches(part, public, n=3)
    where = getattr(holder, "__file__", None) or getattr(holder, "__name__", holder)
    hint = f"did you mean {', '.join(near)}?" if near else f"it defines {', '.join(public[:10]) or 'no function'}"
    return f"{key}: {name!r}: {where} has no {part!r}; {hint}"


def _check_args(function: Callable[..., Any], *, args: Mapping[str, Any], name: str, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a readable signature: the first call will tell
    try:
        signature.bind(None, **args)
    except TypeError as error:
        shown = str(signature).replace("'", "")  # annotations that are kept as text
        raise ConfigError(
            f"{key}: {name!r} cannot be called with args {dict(args)}: {error}. Its signature is {name}{shown}; "
            f"the first parameter receives the RewardInput"
        ) from error
