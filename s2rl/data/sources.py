"""Reads rows from files and named data sets: what a row means is decided in `rows.py`.

Owns: file formats, opening, row access by number, where a row stands (for messages). A table holds its rows compactly
(Arrow buffers, or the offsets of lines in the file) and makes a mapping of one row when it is asked for.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from s2rl.config.paths import DATA_SUFFIXES, is_data_file
from s2rl.config.schema import DataSource
from s2rl.errors import DataError

_BATCH_ROWS = 1024


class RowTable(Protocol):
    """Rows by number, from 0. Values are plain Python: `str`, `int`, `list`, `dict`, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def where(self, row: int) -> str:
        """File and row, for messages."""
        ...


def open_source(source: DataSource, *, columns: Sequence[str] = ()) -> RowTable:
    """Open one source. `columns` are the dotted paths that will be read; others may be left out to save memory.

    Raises DataError, naming the file (and the line of a malformed row): missing file, unknown extension, unreadable
    content, no rows, a data set that cannot be loaded.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        table = _open_file(path, source=source, columns=columns)
    elif path.is_dir() or not _looks_like_file(source.path):
        table = _open_named(source, columns=columns)
    else:
        raise DataError(_missing_file(path))
    if len(table) == 0:
        raise DataError(f"{source.path}: the data set is empty; at least one row is needed")
    return table if source.limit is None else _Head(table, source.limit)


def plain(value: Any) -> Any:
    """`value` with numpy and Arrow scalars and arrays, at any depth, turned into plain Python."""
    if value is None or isinstance(value, (str, int, float, bool)):
        # numpy's float64 is a float and its str_ a str.
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "as_py"):
        return plain(value.as_py())
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def top_level_columns(paths: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns among `names` that hold the dotted `paths`: the longest leading part of each path that is a name."""
    found: list[str] = []
    for path in paths:
        parts = path.split(".")
        for n in range(len(parts), 0, -1):
            name = ".".join(parts[:n])
            if name in names:
                if name not in found:
                    found.append(name)
                break
    return found


class JsonLines:
    """One JSON object a line. Holds the offset of each line; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # A byte-order mark is not part of the first object; strip() leaves it in place.
                start = offset + (3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0)
                if line.strip(b" \t\r\n\xef\xbb\xbf" if number == 1 else None):
                    self._offsets.append(start)
                    self._lines.append(number)
                offset += len(line)
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        self._file.seek(self._offsets[row])
        return self._parse(self._file.readline(), row)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with self._path.open("rb") as file:
            for row, offset in enumerate(self._offsets):
                file.seek(offset)
                yield self._parse(file.readline(), row)

    def where(self, row: int) -> str:
        return f"{self._path}, line {self._lines[row]}"

    def _parse(self, line: bytes, row: int) -> Mapping[str, Any]:
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(row)}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.where(row)}: not valid JSON ({error}); each line must be one JSON object"
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{self.where(row)}: a JSON object is needed, not {_kind(value)}")
        return value


class Rows:
    """Rows that are in memory already (a JSON array)."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        value = self._rows[row]
        if not isinstance(value, Mapping):
            raise DataError(f"{self.where(row)}: a JSON object is needed, not {_kind(value)}")
        return value

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[row] for row in range(len(self)))

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


class ArrowTable:
    """A `pyarrow.Table`; rows are made from its buffers on access."""

    def __init__(self, table: Any, *, name: str) -> None:
        self._table = table
        self._name = name

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        rows: list[dict[str, Any]] = self._table.slice(row, 1).to_pylist()
        return rows[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=_BATCH_ROWS):
            yield from batch.to_pylist()

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


class _Named:
    """A `datasets.Dataset`."""

    def __init__(self, dataset: Any, *, name: str) -> None:
        self._dataset = dataset
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        value: Mapping[str, Any] = plain(self._dataset[row])
        return value

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (plain(row) for row in self._dataset)

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


class _Head:
    """The first rows of another table."""

    def __init__(self, table: RowTable, limit: int) -> None:
        self._table = table
        self._len = min(limit, len(table))

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._table[row]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        # zip with the range first: the table is not asked for a row beyond the limit.
        return (values for _, values in zip(range(self._len), self._table, strict=False))

    def where(self, row: int) -> str:
        return self._table.where(row)


def _open_file(path: Path, *, source: DataSource, columns: Sequence[str]) -> RowTable:
    for key, value in (("split", source.split), ("subset", source.subset)):
        if value is not None:
            raise DataError(
                f"{path}: `{key}: {value}` is for named data sets; remove it, or name a data set instead of a file"
            )
    suffix = path.suffix.lower()
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{path}: unknown extension {suffix or '(none)'!r}; allowed are {', '.join(DATA_SUFFIXES)}. Convert or "
            f"rename the file"
        )
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty; at least one row is needed")
        if suffix == ".parquet":
            return _open_parquet(path, columns=columns)
        if suffix == ".json":
            return _open_json(path)
        return JsonLines(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open_parquet(path: Path, *, columns: Sequence[str]) -> RowTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = list(file.schema_arrow.names)
        wanted = top_level_columns(columns, names)
        if len(wanted) < len({c.split(".")[0] for c in columns}) or not wanted:
            # Something that was asked for is not there under its name: read all, so that the message can list what is.
            wanted = names
        return ArrowTable(file.read(columns=wanted), name=str(path))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error


def _open_json(path: Path) -> RowTable:
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"{"):
        # Many files on the hub that are named .json hold one object a line.
        return JsonLines(path)
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, list):
        raise DataError(f"{path}: a JSON array of objects is needed, not {_kind(value)}")
    return Rows(value, name=str(path))


def _open_named(source: DataSource, *, columns: Sequence[str]) -> RowTable:
    import datasets

    name = source.path + (f" ({source.subset})" if source.subset else "")
    try:
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:
        # The loader raises anything, and all of it is about the data that was named.
        raise DataError(
            f"{name}: `datasets.load_dataset` could not load it: {type(error).__name__}: {error}. Give a file "
            f"({', '.join(DATA_SUFFIXES)}), or the name of a data set with its `subset` and `split`"
        ) from error
    if isinstance(loaded, dict):
        splits = list(loaded)
        if len(splits) != 1:
            raise DataError(f"{name}: `split` is needed; the data set has: {', '.join(splits)}")
        loaded = loaded[splits[0]]
    wanted = top_level_columns(columns, loaded.column_names)
    if len(wanted) == len({c.split(".")[0] for c in columns}):
        loaded = loaded.select_columns(wanted)
    return _Named(loaded, name=name + (f" [{source.split}]" if source.split else ""))


def _looks_like_file(path: str) -> bool:
    """Whether a path that does not exist was meant as a file rather than as the name of a data set."""
    # Names on the hub have one slash at most. Asking the hub for a misspelled file takes half a minute.
    return (
        is_data_file(path)
        or path.count("/") > 1
        or path.lower().endswith((*DATA_SUFFIXES, ".csv", ".txt", ".arrow", ".gz"))
        or ("/" in path and Path(path).parent.is_dir())
    )


def _missing_file(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"{path}: no such file; its folder {parent} does not exist either (relative paths start at {Path.cwd()})"
    siblings = sorted(p.name for p in parent.iterdir() if p.suffix.lower() in DATA_SUFFIXES)
    there = f"{parent} holds {', '.join(siblings[:8])}" if siblings else f"{parent} holds no data file"
    return f"{path}: no such file; {there} (relative paths start at {Path.cwd()})"


def _kind(value: Any) -> str:
    names = {
        list: "an array",
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
