"""Writes docs/config.md from the schema: `python -m s2rl.config.docs`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from s2rl.config.describe import NOT_SET, Key, keys, section_of
from s2rl.config.schema import RunConfig, Section

TARGET = Path(__file__).resolve().parents[2] / "docs" / "config.md"

_HEAD = """\
# Configuration

Generated from `s2rl/config/schema.py` by `python -m s2rl.config.docs`; a test checks that it is current.

One YAML file describes a run. Any key can be set on the command line too:
`s2rl train --config x.yaml algorithm.clip_high=0.28 rewards.functions.0.weight=2`. The value is read as YAML.
Unknown keys are refused, with the nearest real one. Relative paths are relative to the current directory.
`--dry-run` prints the resolved configuration and the resources that the run will take.
"""


def markdown() -> str:
    """The whole document."""
    return "\n".join([_HEAD, *_section(RunConfig, title="Top level", prefix="")])


def _section(model: type[Section], *, title: str, prefix: str) -> Iterator[str]:
    own = [key for key in keys(model, prefix=prefix) if "." not in key.dotted.removeprefix(prefix)]
    yield f"## {title}\n"
    if model is not RunConfig:
        yield " ".join((model.__doc__ or "").split()) + "\n"
    yield "| key | allowed | default | |\n| --- | --- | --- | --- |"
    for key in own:
        yield f"| `{key.dotted}` | {_allowed(key)} | {_default(key)} | {_cell(key.description)} |"
    yield ""
    for key in own:
        if key.section is not None:
            is_list = section_of(model.model_fields[key.dotted.removeprefix(prefix)].annotation)[1]
            dotted = f"{key.dotted}[]" if is_list else key.dotted
            yield from _section(key.section, title=f"`{dotted}`", prefix=f"{dotted}.")


def _allowed(key: Key) -> str:
    return (
        "section below"
        if key.section is not None and "list" not in key.allowed
        else _cell(key.allowed.split(" of section")[0])
    )


def _default(key: Key) -> str:
    if key.default is NOT_SET:
        return "must be given"
    if isinstance(key.default, Section):
        return ""
    return f"`{json.dumps(_plain(key.default))}`"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(markdown(), encoding="utf-8")
