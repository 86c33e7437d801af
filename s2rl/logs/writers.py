"""metrics.jsonl and rollouts.jsonl: one JSON object per line, flushed line by line, cut back exactly on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from s2rl.errors import CheckpointError, StorageError
from s2rl.logs.metrics import Metrics, MetricValue
from s2rl.types import Prompt, Rollout, RolloutGroup


class JsonLines:
    """Appends JSON objects to a file, one per line."""

    def __init__(self, path: Path) -> None:
        """Opens `path` at its end; a last line that a killed process left unfinished is cut off."""
        self.path = path
        self._open()
        self._cut(_end_of_last_line(path, size=self._position))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file.closed

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; raises `StorageError` when it cannot be written, and leaves no half line behind."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"
        try:
            rest = memoryview(line)
            while rest:  # an unbuffered write may be a short one
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._cut(self._position)
            raise self._unwritable(error) from error
        self._position += len(line)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._position

    def truncate(self, position: int) -> None:
        """Forget everything after `position`."""
        self._cut(min(position, self._position))

    def keep_steps(self, step: int) -> None:
        """Forget the records of later steps, as a run that is resumed at `step` does. The file is replaced whole."""
        kept = self.path.with_name(self.path.name + ".kept")
        try:
            with self.path.open("rb") as old, kept.open("wb") as new:
                for number, line in enumerate(old, start=1):
                    if self._step_of(line, number) <= step:
                        new.write(line)
            self._file.close()
            os.replace(kept, self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            kept.unlink(missing_ok=True)
        self._open()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        # Without a buffer: what could not be written must not come back at the next write.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (open for the life of the run)
        self._position = self._file.tell()

    def _step_of(self, line: bytes, number: int) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{self.path}, line {number}: not a record of this run. Move the file away, or choose another name."
            ) from None

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path} cannot be written: {error.strerror}. Checkpoints are unharmed: make room, or mend the file's "
            "rights, and run the same command again to go on from the last one"
        )

    def _cut(self, position: int) -> None:
        os.ftruncate(self._file.fileno(), position)
        self._position = position


def _end_of_last_line(path: Path, *, size: int) -> int:
    """Size of the file up to its last line feed."""
    block = 1 << 16
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file that `JsonLines` wrote; none when there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def plain_metrics(metrics: Metrics) -> dict[str, MetricValue]:
    """Metrics as JSON can hold them: numpy numbers become Python's, NaN and infinities become None."""
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> MetricValue:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def group_record(group: RolloutGroup, *, fate: str, step: int) -> dict[str, Any]:
    """One line of rollouts.jsonl for a group that was sampled."""
    return _prompt_record(group.encoded.prompt, group_id=group.group_id, fate=fate, step=step) | {
        "worker": group.worker,
        "taken_version": group.taken_version,
        "rollouts": [_rollout_record(rollout) for rollout in group.rollouts_G],
    }


def dropped_record(prompt: Prompt, *, reason: str, step: int) -> dict[str, Any]:
    """One line of rollouts.jsonl for a prompt that never became a complete group."""
    fate = f"dropped:{reason}"
    return _prompt_record(prompt, group_id=prompt.prompt_id, fate=fate, step=step) | {
        "worker": None,
        "taken_version": None,
        "rollouts": [],
    }


def _prompt_record(prompt: Prompt, *, group_id: str, fate: str, step: int) -> dict[str, Any]:
    messages = prompt.messages
    return {
        "step": step,
        "fate": fate,
        "group_id": group_id,
        "prompt_id": prompt.prompt_id,
        "row": prompt.row,
        "epoch": prompt.epoch,
        "data_source": prompt.data_source,
        "prompt": prompt.text if messages is None else [{"role": m.role, "content": m.content} for m in messages],
        "answer": prompt.answer,
    }


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    completion = rollout.completion
    versions = completion.versions
    return {
        "index": completion.index,
        "text": completion.text,
        "score": _plain(rollout.score.total),
        "parts": plain_metrics(rollout.score.parts),
        "status": str(rollout.status),
        "finish_reason": str(completion.finish_reason),
        "num_tokens": len(completion.token_ids),
        "version_min": int(versions.min()) if len(versions) else None,
        "version_max": int(versions.max()) if len(versions) else None,
    }
