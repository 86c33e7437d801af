"""From a YAML file and dotted overrides to a `RunConfig`, or to a `ConfigError` that says what to write instead."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from s2rl.config.checks import check
from s2rl.config.describe import got, place_of, section_of
from s2rl.config.paths import make_absolute
from s2rl.config.schema import RunConfig, Section
from s2rl.config.suggest import suggestion
from s2rl.config.yaml_text import dump_yaml, parse_scalar, parse_yaml
from s2rl.errors import ConfigError

MAX_PROBLEMS = 20
"""Problems listed in one message."""


@dataclass(slots=True, kw_only=True)
class _Origins:
    """Where values came from, for messages."""

    file: str = ""
    lines: dict[str, int] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)

    def of(self, dotted: str) -> str:
        for key in _self_and_parents(dotted):
            if key in self.overrides:
                return f" (override {self.overrides[key]})"
            if key in self.lines:
                return f" ({self.file}, line {self.lines[key]})"
        return f" ({self.file})" if self.file else ""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, base_dir: Path | None = None) -> RunConfig:
    """Read, override, validate and cross-check a configuration.

    Args:
        path: YAML file.
        overrides: `dotted.key=value`, the value in YAML; list items by index (`rewards.functions.0.weight=2`).
        base_dir: what relative paths in the configuration are relative to; the current directory by default.

    Raises:
        ConfigError: with one line per problem.
    """
    path = Path(path)
    origins = _Origins(file=str(path))
    data, origins.lines = parse_yaml(_read(path), origin=str(path))
    if data is None:
        raise ConfigError(
            f"{path}: the file is empty. docs/config.md lists the keys, examples/ holds files to start from."
        )
    return _build(data, overrides, origins=origins, base_dir=base_dir)


def config_from_dict(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, base_dir: Path | None = None
) -> RunConfig:
    """As `load_config`, from data that is at hand already."""
    return _build(copy.deepcopy(dict(data)), overrides, origins=_Origins(), base_dir=base_dir)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start}). Is this a configuration?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _build(data: Any, overrides: Sequence[str], *, origins: _Origins, base_dir: Path | None) -> RunConfig:
    if not isinstance(data, dict):
        raise ConfigError(
            f"{origins.file or 'configuration'}: holds {got(data)}, allowed: a mapping with keys such as "
            f"{', '.join(list(RunConfig.model_fields)[:4])}"
        )
    for override in overrides:
        _apply(data, override, origins=origins)
    _fill_empty_sections(data, RunConfig)
    problems = [
        f"{dotted}: unknown key{suggestion(dotted)}{origins.of(dotted)}" for dotted in _unknown(data, RunConfig)
    ]
    if problems:
        raise ConfigError(_listed(problems))
    make_absolute(data, base_dir=base_dir or Path.cwd())
    try:
        # JSON input in strict mode is what YAML means: lists become tuples, text becomes paths, "2" is no integer.
        config = RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError(_listed(_problems(error, origins))) from None
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{origins.file or 'configuration'}: contains itself (an alias inside its own anchor)"
        ) from None
    check(config)
    return config


def _listed(problems: Sequence[str]) -> str:
    rest = len(problems) - MAX_PROBLEMS
    return "\n".join([*problems[:MAX_PROBLEMS], f"and {rest} more"] if rest > 0 else problems)


def _apply(data: dict[str, Any], override: str, *, origins: _Origins) -> None:
    dotted, sign, text = override.partition("=")
    dotted = dotted.strip()
    if not sign or not dotted or not all(dotted.split(".")):
        raise ConfigError(f"override {override!r}: write dotted.key=value, for instance algorithm.clip_high=0.28")
    value = parse_scalar(text, origin=f"override {override}")
    *parents, last = dotted.split(".")
    target: Any = data
    for depth, part in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(target, list):
            target = target[_index(target, part, where=where, override=override)]
        else:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
        if not isinstance(target, dict | list):
            raise ConfigError(f"override {override!r}: {where} is {got(target)} and has no keys below it")
    if isinstance(target, list):
        target[_index(target, last, where=dotted, override=override)] = value
    else:
        target[last] = value
    origins.overrides[dotted] = override


def _index(items: list[Any], part: str, *, where: str, override: str) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    raise ConfigError(
        f"override {override!r}: {where} does not exist; {where.rpartition('.')[0]} is a list of {len(items)}, "
        f"its items are numbered from 0"
    )


def _fill_empty_sections(data: dict[str, Any], model: type[Section]) -> None:
    """`eval:` with nothing below it means the section's defaults."""
    for name, info in model.model_fields.items():
        section, is_list = section_of(info.annotation)
        if section is None or is_list or name not in data:
            continue
        if data[name] is None:
            data[name] = {}
        if isinstance(data[name], dict):
            _fill_empty_sections(data[name], section)


def _unknown(data: Mapping[Any, Any], model: type[Section], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if key not in model.model_fields:
            yield dotted
            continue
        section, is_list = section_of(model.model_fields[key].annotation)
        if section is None:
            continue
        items = enumerate(value) if is_list and isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, dict):
                yield from _unknown(item, section, f"{dotted}." if index is None else f"{dotted}.{index}.")


def _problems(error: ValidationError, origins: _Origins) -> list[str]:
    problems: dict[str, str] = {}
    # Deepest first: a list with a wrong item is also reported as too short.
    for detail in sorted(error.errors(include_url=False, include_context=False), key=lambda d: -len(d["loc"])):
        place = place_of(detail["loc"])
        if any(key == place.dotted or key.startswith(f"{place.dotted}.") for key in problems):
            continue  # one value that fits none of several types makes one error for each
        if detail["type"] == "missing":
            text = f"must be given. {place.description}"
        else:
            text = f"got {got(detail['input'])}, allowed: {place.allowed}"
            if place.allowed.startswith("only"):
                text += f". {place.description}"
            elif isinstance(detail["input"], int | float) and place.allowed.startswith("text"):
                text += " (put it in quotes)"
        problems[place.dotted] = f"{place.dotted}: {text}{origins.of(place.dotted)}"
    order = list(origins.lines)
    return sorted(problems.values(), key=lambda text: order.index(k) if (k := text.partition(":")[0]) in order else -1)


def _self_and_parents(dotted: str) -> Iterator[str]:
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]
