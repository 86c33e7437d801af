"""What may be configured, in words: every key with its type, range, default and description.

Error messages and docs/config.md are both made from it, so they cannot disagree with the schema.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from s2rl.config.schema import RunConfig, Section

NOT_SET = object()
"""Default of a key that must be given."""

_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", type(None): "null"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration."""

    dotted: str
    """`data.train[].path` for a key in each item of a list."""
    allowed: str
    default: Any
    """The default, or `NOT_SET`."""
    description: str
    section: type[Section] | None
    """The section behind the key, itself or as the item of a list; None for a value."""


def keys(model: type[Section] = RunConfig, *, prefix: str = "") -> Iterator[Key]:
    """All keys below `model`, sections before their own keys, in the order of the schema."""
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{name}"
        section, is_list = section_of(info.annotation)
        yield Key(
            dotted=dotted,
            allowed=allowed_values(info),
            default=NOT_SET if info.is_required() else info.default,
            description=" ".join((info.description or "").split()),
            section=section,
        )
        if section is not None:
            yield from keys(section, prefix=f"{dotted}[]." if is_list else f"{dotted}.")


def section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that an annotation holds, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    if get_origin(annotation) is tuple:
        item = get_args(annotation)[0]
        if isinstance(item, type) and issubclass(item, Section):
            return item, True
    return None, False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value stands in the schema."""

    dotted: str
    allowed: str
    description: str


def place_of(loc: tuple[Any, ...]) -> Place:
    """The key at a location that pydantic reports, cut where the schema ends: after it come names of union members."""
    annotation: Any = RunConfig
    metadata: list[Any] = []
    description = ""
    parts: list[str] = []
    for item in loc:
        if isinstance(annotation, type) and issubclass(annotation, Section) and item in annotation.model_fields:
            info = annotation.model_fields[item]
            annotation, metadata, description = info.annotation, info.metadata, info.description or ""
        elif get_origin(annotation) is tuple and isinstance(item, int):
            members = get_args(annotation)
            annotation, metadata = members[0 if members[-1] is Ellipsis else item], []
        elif get_origin(annotation) is dict:
            annotation, metadata = get_args(annotation)[1], []
        else:
            break
        parts.append(str(item))
    return Place(
        dotted=".".join(parts), allowed=_describe(annotation, metadata), description=" ".join(description.split())
    )


def allowed_values(info: FieldInfo) -> str:
    """What a field accepts, in words."""
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _describe(inner, [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(member, metadata).removeprefix("only ") for member in get_args(annotation))
    if origin is Literal:
        values = [str(v) for v in get_args(annotation)]
        return f"only {values[0]}" if len(values) == 1 else f"one of {', '.join(values)}"
    if origin is tuple:
        members = get_args(annotation)
        if len(members) == 2 and members[1] is Ellipsis:
            least = next((m.min_length for m in metadata if hasattr(m, "min_length")), 0)
            return f"{'non-empty list' if least else 'list'} of {_describe(members[0])}"
        return f"list of {len(members)}: {', '.join(_describe(m) for m in members)}"
    if origin is dict:
        return f"mapping from text to {_describe(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"section with {', '.join(annotation.model_fields)}"
    constraints = _constraints(metadata)
    return (
        constraints[0]
        if constraints[:1] and constraints[0].startswith("only")
        else " ".join([_PLAIN[annotation], *constraints])
    )


def _constraints(metadata: list[Any] | tuple[Any, ...]) -> list[str]:
    for m in metadata:
        if getattr(m, "ge", None) is not None and m.ge in [getattr(other, "le", None) for other in metadata]:
            return [f"only {m.ge}"]
    bounds = [f"{sign} {getattr(m, name)}" for m in metadata for name, sign in _BOUNDS if hasattr(m, name)]
    patterns = [f"that matches {p}" for m in metadata if (p := getattr(m, "pattern", None))]
    return [" and ".join(bounds)] * bool(bounds) + patterns


def got(value: Any) -> str:
    """A value that was given, with its type in the words of `allowed_values`."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing in it'}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, bool) else repr(value)
    name = "true or false" if isinstance(value, bool) else _PLAIN.get(type(value), type(value).__name__)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({name})"
