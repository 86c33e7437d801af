"""Turns rows into prompts: columns, types, and the checks that name file and row.

Owns: what a row means. Does not own file formats (`sources.py`), order (`stream.py`) or tokens (`encode.py`).
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from s2rl.config.schema import ColumnsConfig, DataSource
from s2rl.data.sources import RowTable, open_source, plain
from s2rl.errors import DataError
from s2rl.types import Message, Prompt

log = logging.getLogger(__name__)

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The meaning of one row. Exactly one of `messages` and `text` is set."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    answer: str
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class PromptRows(Sequence[Row]):
    """All rows of one or more sources, one after the other. Every row was read and checked once, at the start."""

    def __init__(self, tables: Sequence[RowTable], *, columns: ColumnsConfig) -> None:
        self._tables = tuple(tables)
        self._columns = columns
        self._starts: list[int] = []
        total = 0
        for table in self._tables:
            self._starts.append(total)
            total += len(table)
        self._len = total
        self._data_sources: dict[str, int] = {}
        self._first_rows: dict[bool, int] = {}
        self._digest = self._check_all()

    @property
    def digest(self) -> str:
        """sha256 over the number of rows and the content of each, in order; file names and formats do not count."""
        return self._digest

    @property
    def data_sources(self) -> Mapping[str, str]:
        """Each data source that occurs, with file and row of the first row that has it."""
        return {name: self.where(row) for name, row in self._data_sources.items()}

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first row with chat messages and the first with a plain prompt, as far as there are such rows."""
        return tuple(sorted(self._first_rows.values()))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, row: Any) -> Any:
        if not isinstance(row, int):
            raise TypeError("rows are numbered by int")
        if not 0 <= row < self._len:
            raise IndexError(row)
        table, offset = self._locate(row)
        return parse_row(table[offset], columns=self._columns, where=table.where(offset))

    def where(self, row: int) -> str:
        """File and row, for messages."""
        table, offset = self._locate(row)
        return table.where(offset)

    def prompt(self, row: int, *, epoch: int = 0, prefix: str = "") -> Prompt:
        """The prompt of one row; its id is `<prefix><epoch>-<row>`."""
        parsed: Row = self[row]
        return Prompt(
            prompt_id=f"{prefix}{epoch}-{row}",
            row=row,
            epoch=epoch,
            messages=parsed.messages,
            text=parsed.text,
            answer=parsed.answer,
            data_source=parsed.data_source,
            extra=parsed.extra,
        )

    def prompts(self, *, prefix: str = "") -> Iterator[Prompt]:
        """All rows in order, once (evaluation)."""
        return (self.prompt(row, prefix=prefix) for row in range(self._len))

    def _locate(self, row: int) -> tuple[RowTable, int]:
        index = bisect.bisect_right(self._starts, row) - 1
        return self._tables[index], row - self._starts[index]

    def _check_all(self) -> str:
        began = time.monotonic()
        hasher = hashlib.sha256(f"{self._len}\n".encode())
        row = 0
        for table in self._tables:
            for offset, values in enumerate(table):
                parsed = parse_row(values, columns=self._columns, where=_Where(table, offset))
                self._data_sources.setdefault(parsed.data_source, row)
                self._first_rows.setdefault(parsed.messages is not None, row)
                hasher.update(_canonical(parsed))
                row += 1
        log.info("checked %d rows in %.1f s", self._len, time.monotonic() - began)
        return hasher.hexdigest()


def load_rows(sources: Sequence[DataSource], *, columns: ColumnsConfig) -> PromptRows:
    """Open and check all `sources`. Raises DataError that names file and row."""
    paths = (columns.prompt, columns.answer, columns.data_source, columns.extra)
    return PromptRows([open_source(source, columns=paths) for source in sources], columns=columns)


class _Where:
    """The place of a row, made into text only when a message needs it."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: RowTable, row: int) -> None:
        self._table = table
        self._row = row

    def __str__(self) -> str:
        return self._table.where(self._row)


def parse_row(values: Mapping[str, Any], *, columns: ColumnsConfig, where: object) -> Row:
    """One row's prompt, answer, data source and extra fields. `where` is put in front of error messages.

    Raises DataError: a column is absent, the prompt is neither text nor messages, there is no answer.
    """
    prompt = plain(_lookup(values, columns.prompt))
    if prompt is _MISSING or prompt is None:
        raise DataError(_no_value("prompt", columns.prompt, values=values, where=where))
    messages, text = _parse_prompt(prompt, column=columns.prompt, where=where)
    answer = _parse_answer(_lookup(values, columns.answer))
    if answer is None:
        raise DataError(_no_value("answer", columns.answer, values=values, where=where))
    data_source = plain(_optional(values, columns, "data_source", where=where))
    extra = plain(_optional(values, columns, "extra", where=where))
    if extra is not None and not isinstance(extra, dict):
        raise DataError(
            f"{where}: column {columns.extra!r} (data.columns.extra) must hold an object with named fields, not "
            f"{type(extra).__name__}; name another column"
        )
    return Row(
        messages=messages,
        text=text,
        answer=answer,
        data_source="" if data_source is None else str(data_source),
        extra=extra or {},
    )


def _lookup(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a key that itself holds dots comes first. `_MISSING` when there is none."""
    if path in values:
        return values[path]
    head, _, rest = path.rpartition(".")
    tail = [rest]
    while head:
        if head in values:
            inner = values[head]
            return _lookup(inner, ".".join(tail)) if isinstance(inner, Mapping) else _MISSING
        head, _, rest = head.rpartition(".")
        tail.insert(0, rest)
    return _MISSING


def _optional(values: Mapping[str, Any], columns: ColumnsConfig, name: str, *, where: object) -> Any:
    path = getattr(columns, name)
    value = _lookup(values, path)
    if value is not _MISSING:
        return value
    if path != type(columns).model_fields[name].default:
        # Only the default may be absent: another name is either there or misspelled. (Whether someone wrote it down
        # does not tell: a run folder's config.yaml spells out every default.)
        raise DataError(_no_value(name, path, values=values, where=where))
    return None


def _no_value(what: str, path: str, *, values: Mapping[str, Any], where: object) -> str:
    container, outer, rest = values, "", path.split(".")
    while len(rest) > 1 and isinstance(inner := container.get(rest[0]), Mapping):
        container, outer, rest = inner, f"{outer}.{rest[0]}".lstrip("."), rest[1:]
    holder = f"column {outer!r} has the fields" if outer else "the row has the columns"
    names = ", ".join(map(str, container)) or "(none)"
    missing = "no value" if path in values or rest[0] in container else "no such column"
    return (
        f"{where}: row without {what.replace('_', ' ')}: {missing} at {path!r} (data.columns.{what}); "
        f"{holder}: {names}. Set data.columns.{what} to the right one, or mend the row"
    )


def _parse_prompt(prompt: Any, *, column: str, where: object) -> tuple[tuple[Message, ...] | None, str | None]:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: the prompt in column {column!r} is empty")
        _check_text(prompt, what="the prompt", where=where)
        return None, prompt
    if not isinstance(prompt, list) or not prompt:
        what = "an empty list" if prompt == [] else type(prompt).__name__
        raise DataError(
            f"{where}: the prompt in column {column!r} must be a text or a list of messages with role and content, "
            f"not {what}"
        )
    return tuple(_parse_message(m, where=where, index=i) for i, m in enumerate(prompt)), None


def _parse_message(message: Any, *, where: object, index: int) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"{where}: message {index} of the prompt must be an object with the texts role and content")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) and p.get("type", "text") == "text" else None for p in content]
        if not all(isinstance(p, str) for p in parts):
            raise DataError(
                f"{where}: message {index} of the prompt holds parts that are not text; only text is supported"
            )
        content = "".join(p for p in parts if p)
    if not isinstance(content, str):
        raise DataError(f"{where}: message {index} of the prompt has no text as content")
    _check_text(content, what=f"message {index} of the prompt", where=where)
    return Message(role=message["role"], content=content)


def _check_text(text: str, *, what: str, where: object) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {what} holds half a surrogate pair at character {error.start}, which is not text"
        ) from error


def _parse_answer(value: Any) -> str | None:
    """The reference answer as text: numbers as they are written (72.0 as 72), structures as JSON. None: no answer."""
    value = plain(value) if value is not _MISSING else None
    if value is None or value in ([], {}):
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, float):
        if math.isnan(value):
            return None  # a hole in a number column, as pandas writes it
        # Such a column with holes turns 72 into 72.0.
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else str(value)


def _canonical(row: Row) -> bytes:
    messages = None if row.messages is None else [(m.role, m.content) for m in row.messages]
    return (
        repr((messages, row.text, row.answer, row.data_source, row.extra)).encode("utf-8", "backslashreplace") + b"\n"
    )
