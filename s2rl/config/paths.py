"""Which values are paths of this machine, and what they mean.

Rollout workers and learners run in other directories than the command line did, so every path becomes absolute when a
configuration is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".parquet", ".jsonl", ".json")


def is_data_file(path: str) -> bool:
    """Whether a data source names a file rather than a data set for `datasets.load_dataset`."""
    return path.endswith(DATA_SUFFIXES) or path.startswith((".", "/", "~")) or Path(path).is_file()


def make_absolute(data: dict[str, Any], *, base_dir: Path) -> None:
    """Make the paths of a raw configuration absolute, in place. Values of a wrong type are left for validation."""

    def resolve(section: Any, name: str) -> None:
        if isinstance(section, dict) and isinstance(section.get(name), str):
            section[name] = str((base_dir / Path(section[name]).expanduser()).absolute())

    data.setdefault("runs_dir", "runs")
    resolve(data, "runs_dir")
    resolve(data.get("model"), "path")
    resolve(data.get("model"), "tokenizer")
    for section, name in (("data", "train"), ("eval", "data")):
        sources = data[section].get(name) if isinstance(data.get(section), dict) else None
        for source in sources if isinstance(sources, list) else ():
            path = source.get("path") if isinstance(source, dict) else None
            if isinstance(path, str) and (is_data_file(path) or (base_dir / path).is_file()):
                resolve(source, "path")
