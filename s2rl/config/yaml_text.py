"""From YAML text to plain data, with the line of every key.

YAML's core schema (version 1.2) is used: `1e-5` is a number, `on` and `off` are text, `010` is ten. A key that stands
twice in one mapping is refused: the loader would otherwise keep the second one without a word.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from s2rl.errors import ConfigError

MAX_CHARS = 1_000_000
"""Longer files are refused: nobody writes such a configuration by hand."""


class _CoreLoader(yaml.SafeLoader):
    """Safe loader with the core schema's plain scalars."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (yaml's own attribute, read per class)


def _construct_int(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _construct_float(loader: _CoreLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _construct_unknown(loader: _CoreLoader, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} is not allowed here", node.start_mark)


class _CoreDumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something other than text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (yaml's own attribute, read per class)
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def _represent_text(dumper: _CoreDumper, text: str) -> yaml.ScalarNode:
    # Unicode's other line separators survive in double quotes only.
    style = '"' if any(char in text for char in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_PLAIN_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)


def _add_resolvers() -> None:
    for kind, pattern, first in _PLAIN_SCALARS:
        for user in (_CoreLoader, _CoreDumper):
            user.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), first)
    _CoreDumper.add_representer(str, _represent_text)
    _CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    _CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)
    for kind in ("binary", "timestamp", "omap", "pairs", "set"):
        _CoreLoader.add_constructor(f"tag:yaml.org,2002:{kind}", _construct_unknown)


_add_resolvers()


def parse_yaml(text: str, *, origin: str) -> tuple[Any, dict[str, int]]:
    """Data and the line (from 1) of each dotted key.

    `origin` names the file (or the override) in messages. Raises `ConfigError` for text that is not YAML, for duplicate
    keys and for tags that this loader does not know.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{origin}: {len(text)} characters, allowed: at most {MAX_CHARS}. Is this the right file?")
    try:
        loader = _CoreLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            lines: dict[str, int] = {}
            _note_lines(node, path="", lines=lines, seen=set(), origin=origin)
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None


def dump_yaml(data: Any) -> str:
    """Data as YAML text that `parse_yaml` reads back unchanged."""
    return yaml.dump(data, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def parse_scalar(text: str, *, origin: str) -> Any:
    """A value of a dotted override."""
    return parse_yaml(text, origin=origin)[0]


def _note_lines(node: yaml.Node, *, path: str, lines: dict[str, int], seen: set[int], origin: str) -> None:
    if id(node) in seen:  # an alias: its lines are those of the anchor, and it may contain itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            dotted = f"{path}.{key}" if path else key
            if key in first_line and key != "<<":
                raise ConfigError(
                    f"{dotted}: stands twice in one section ({origin}, lines {first_line[key]} and {line}). "
                    "Remove one of them."
                )
            first_line[key] = lines[dotted] = line
            _note_lines(value_node, path=dotted, lines=lines, seen=seen, origin=origin)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            dotted = f"{path}.{index}"
            lines[dotted] = item.start_mark.line + 1
            _note_lines(item, path=dotted, lines=lines, seen=seen, origin=origin)
