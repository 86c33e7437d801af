"""Outstanding groups come back bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2rl.ckpt.groups import Outstanding, load_groups, save_groups
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

texts = st.text(st.characters(exclude_categories=[]), max_size=12)  # half surrogate pairs too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
floats32 = st.floats(width=32, allow_nan=False)


@st.composite
def encoded_prompts(draw: st.DrawFn) -> Encoded:
    chat = draw(st.booleans())
    prompt = Prompt(
        prompt_id=draw(st.from_regex(r"\A[0-9]{1,3}-[0-9]{1,6}\Z")),
        row=draw(st.integers(0, 10**6)),
        epoch=draw(st.integers(0, 999)),
        messages=tuple(Message(role=r, content=c) for r, c in draw(st.lists(st.tuples(texts, texts))))
        if chat
        else None,
        text=None if chat else draw(texts),
        answer=draw(texts),
        data_source=draw(texts),
        extra=draw(st.dictionaries(texts, json_values, max_size=3)),
    )
    return Encoded(prompt=prompt, token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))))


@st.composite
def outstanding_groups(draw: st.DrawFn) -> Outstanding:
    encoded = draw(encoded_prompts())
    if draw(st.booleans()):
        return encoded, None
    rollouts = []
    for index in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 5))

        def column(values: st.SearchStrategy[Any], dtype: type, size: int = length) -> np.ndarray:
            return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype)

        completion = Completion(
            group_id=encoded.prompt.prompt_id,
            index=index,
            token_ids=column(st.integers(0, 2**31 - 1), np.int32),
            logprobs=column(floats32, np.float32),
            versions=column(st.integers(0, 2**31 - 1), np.int32),
            finish_reason=draw(st.sampled_from(FinishReason)),
            text=draw(texts),
        )
        score = Score(total=draw(st.floats(allow_nan=False)), parts=draw(st.dictionaries(texts, floats32, max_size=2)))
        rollouts.append(Rollout(completion=completion, score=score, status=draw(st.sampled_from(RolloutStatus))))
    group = RolloutGroup(
        group_id=encoded.prompt.prompt_id,
        encoded=encoded,
        rollouts_G=tuple(rollouts),
        worker=draw(st.integers(0, 9)),
        taken_version=draw(st.integers(0, 2**31 - 1)),
    )
    return encoded, group


def plain(value: Any) -> Any:
    """Dataclasses as nested dicts, arrays as (dtype, bytes), so that == means equal to the bit."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    return value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(outstanding=st.lists(outstanding_groups(), max_size=5))
def test_groups_come_back_bit_for_bit(outstanding: list[Outstanding], tmp_path: Path) -> None:
    save_groups(tmp_path, outstanding)
    loaded = load_groups(tmp_path)
    assert plain(tuple(loaded)) == plain(tuple(outstanding))
    for encoded, group in loaded:
        assert group is None or group.encoded is encoded


def test_images_and_their_spans_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = Encoded(prompt=Prompt(prompt_id="0-0", row=0, epoch=0, text="x", answer="y"), token_ids=(1, 2))
    images = tuple(rng.integers(0, 256, (32, 32 * n, 3), dtype=np.uint8) for n in (1, 3))
    seeing = dataclasses.replace(text, token_ids=(1, 9, 2, 9, 9, 9), images=images, image_spans=((1, 1), (3, 3)))
    save_groups(tmp_path, [(text, None), (seeing, None)])
    (plain_text, _), (back, _) = load_groups(tmp_path)
    assert plain_text.images == ()
    assert back.image_spans == seeing.image_spans
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(back.images, images, strict=True))


def test_unusual_floats_and_numpy_scores_survive(tmp_path: Path) -> None:
    prompt = Prompt(prompt_id="0-1", row=1, epoch=0, text="x", answer="y")
    encoded = Encoded(prompt=prompt, token_ids=(1, 2))
    logprobs = np.array([-np.inf, np.nan, -0.0, -1e-45], dtype=np.float32)
    completion = Completion(
        group_id="0-1",
        index=0,
        token_ids=np.arange(4, dtype=np.int32),
        logprobs=logprobs,
        versions=np.zeros(4, dtype=np.int32),
        finish_reason=FinishReason.STOP,
        text="",
    )
    score = Score(total=np.float32(0.1), parts={"a": np.float64(1 / 3)})
    group = RolloutGroup(
        group_id="0-1",
        encoded=encoded,
        rollouts_G=(Rollout(completion=completion, score=score),),
        worker=0,
        taken_version=0,
    )
    save_groups(tmp_path, [(encoded, group)])
    ((_, loaded),) = load_groups(tmp_path)
    assert loaded is not None
    assert loaded.rollouts_G[0].completion.logprobs.tobytes() == logprobs.tobytes()
    assert loaded.rollouts_G[0].score.total == float(np.float32(0.1))
    assert loaded.rollouts_G[0].score.parts == {"a": 1 / 3}


@pytest.mark.parametrize("damage", ["not json", "[{}]", '[{"encoded": 3}]'])
def test_a_file_that_cannot_be_read_is_a_checkpoint_error(damage: str, tmp_path: Path) -> None:
    save_groups(tmp_path, [])
    (tmp_path / "outstanding.json").write_text(damage)
    with pytest.raises(CheckpointError, match="the outstanding groups cannot be read"):
        load_groups(tmp_path)


def test_fewer_stored_tokens_than_the_records_name_are_found(tmp_path: Path) -> None:
    save_groups(tmp_path, [])
    encoded = {"token_ids": [1], "prompt_id": "0-0", "row": 0, "epoch": 0, "messages": None, "text": "", "answer": ""}
    rollout = {
        "index": 0,
        "length": 3,
        "finish_reason": "stop",
        "text": "",
        "total": 0,
        "parts": {},
        "status": "scored",
    }
    group = {"group_id": "0-0", "worker": 0, "taken_version": 0, "rollouts": [rollout]}
    record = {"encoded": {**encoded, "data_source": "", "extra": {}}, "group": group}
    (tmp_path / "outstanding.json").write_text(json.dumps([record]))
    with pytest.raises(CheckpointError, match="token 3 is wanted, 0 are stored"):
        load_groups(tmp_path)
