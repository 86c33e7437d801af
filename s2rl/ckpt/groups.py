"""Outstanding groups to files and back, bit for bit.

Text and structure go into JSON, arrays into one safetensors file: `token_ids` int32 [N], `logprobs` float32 [N] and
`versions` int32 [N] hold all completions one after the other, their lengths in the JSON; `image.<i>.<j>` uint8
[H, W, 3] is image j of group i.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from s2rl.errors import CheckpointError
from s2rl.types import (
    Completion,
    Encoded,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Score,
)

Outstanding = tuple[Encoded, RolloutGroup | None]

_JSON = "outstanding.json"
_ARRAYS = "outstanding.safetensors"


def save_groups(folder: Path, outstanding: Sequence[Outstanding]) -> None:
    """Write `outstanding` into two files of `folder`. Raises OSError when the disk does not take them."""
    completions = [r.completion for _, group in outstanding if group is not None for r in group.rollouts_G]
    arrays = {
        "token_ids": _joined([c.token_ids for c in completions], np.int32),
        "logprobs": _joined([c.logprobs for c in completions], np.float32),
        "versions": _joined([c.versions for c in completions], np.int32),
    }
    for i, (encoded, _) in enumerate(outstanding):
        arrays |= {_image(i, j): image for j, image in enumerate(encoded.images)}
    # Not safetensors' own save_file: on a full disk it raises an error that is no OSError.
    (folder / _ARRAYS).write_bytes(save(arrays))
    records = [
        {"encoded": _encoded_record(encoded), "group": None if group is None else _group_record(group)}
        for encoded, group in outstanding
    ]
    # Escaped, because a text may hold half a surrogate pair, which UTF-8 cannot encode.
    (folder / _JSON).write_text(json.dumps(records, ensure_ascii=True), encoding="ascii")


def load_groups(folder: Path) -> list[Outstanding]:
    """What `save_groups` wrote. Raises `CheckpointError` when a file cannot be read."""
    try:
        records = json.loads((folder / _JSON).read_text(encoding="ascii"))
        arrays = load_file(folder / _ARRAYS)
        cursor = _Cursor({name: arrays[name] for name in ("token_ids", "logprobs", "versions")})
        return [_outstanding(record, cursor, _images(record, i, arrays)) for i, record in enumerate(records)]
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the outstanding groups cannot be read ({type(error).__name__}: {error}). Remove this "
            "checkpoint folder to go on from the one before"
        ) from error


def _image(group: int, index: int) -> str:
    return f"image.{group}.{index}"


def _images(record: Mapping[str, Any], group: int, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    spans = record["encoded"].get("image_spans", ())
    return tuple(arrays[_image(group, index)] for index in range(len(spans)))


def _joined(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([*arrays, np.zeros(0, dtype=dtype)]).astype(dtype, copy=False)


class _Cursor:
    """Cuts the joined arrays apart again, in order."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._at = 0

    def take(self, length: int) -> dict[str, np.ndarray]:
        begin, self._at = self._at, self._at + length
        if self._at > len(self._arrays["token_ids"]):
            raise ValueError(f"token {self._at} is wanted, {len(self._arrays['token_ids'])} are stored")
        return {name: array[begin : self._at].copy() for name, array in self._arrays.items()}


def _encoded_record(encoded: Encoded) -> dict[str, Any]:
    prompt = encoded.prompt
    return {
        "token_ids": list(encoded.token_ids),
        "image_spans": [list(span) for span in encoded.image_spans],
        "prompt_id": prompt.prompt_id,
        "row": prompt.row,
        "epoch": prompt.epoch,
        "messages": None if prompt.messages is None else [[m.role, m.content] for m in prompt.messages],
        "text": prompt.text,
        "answer": prompt.answer,
        "data_source": prompt.data_source,
        "extra": prompt.extra,
    }


def _group_record(group: RolloutGroup) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "worker": group.worker,
        "taken_version": group.taken_version,
        "rollouts": [
            {
                "index": r.completion.index,
                "length": len(r.completion.token_ids),
                "finish_reason": r.completion.finish_reason.value,
                "text": r.completion.text,
                "total": float(r.score.total),
                "parts": {name: float(value) for name, value in r.score.parts.items()},
                "status": r.status.value,
            }
            for r in group.rollouts_G
        ],
    }


def _outstanding(record: Mapping[str, Any], cursor: _Cursor, images: tuple[np.ndarray, ...]) -> Outstanding:
    saved = record["encoded"]
    messages = saved["messages"]
    encoded = Encoded(
        prompt=Prompt(
            prompt_id=saved["prompt_id"],
            row=saved["row"],
            epoch=saved["epoch"],
            messages=None if messages is None else tuple(Message(role=r, content=c) for r, c in messages),
            text=saved["text"],
            answer=saved["answer"],
            data_source=saved["data_source"],
            extra=saved["extra"],
        ),
        token_ids=tuple(saved["token_ids"]),
        images=images,
        image_spans=tuple((start, length) for start, length in saved.get("image_spans", ())),
    )
    group = record["group"]
    if group is None:
        return encoded, None
    group_id = group["group_id"]
    return encoded, RolloutGroup(
        group_id=group_id,
        encoded=encoded,
        rollouts_G=tuple(_rollout(r, group_id, cursor) for r in group["rollouts"]),
        worker=group["worker"],
        taken_version=group["taken_version"],
    )


def _rollout(record: Mapping[str, Any], group_id: str, cursor: _Cursor) -> Rollout:
    arrays = cursor.take(record["length"])
    return Rollout(
        completion=Completion(
            group_id=group_id,
            index=record["index"],
            token_ids=arrays["token_ids"],
            logprobs=arrays["logprobs"],
            versions=arrays["versions"],
            finish_reason=FinishReason(record["finish_reason"]),
            text=record["text"],
        ),
        score=Score(total=record["total"], parts=record["parts"]),
        status=RolloutStatus(record["status"]),
    )
