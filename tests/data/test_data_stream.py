import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2rl.config.schema import ColumnsConfig
from s2rl.data.rows import PromptRows
from s2rl.data.sources import Rows
from s2rl.data.stream import PromptStream
from s2rl.errors import DataError


def rows(num, *, start=0):
    table = Rows([{"prompt": f"{i}?", "answer": i} for i in range(start, start + num)], name="rows")
    return PromptRows([table], columns=ColumnsConfig(answer="answer"))


def draw(stream, num):
    return [stream.next().prompt_id for _ in range(num)]


SEVEN = rows(7)


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own():
    stream = PromptStream(rows(50), seed=1)
    epochs = [[stream.next() for _ in range(50)] for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(p.row for p in epoch) == list(range(50))
        assert all(p.epoch == number and p.prompt_id == f"{number}-{p.row}" for p in epoch)
    orders = [[p.row for p in epoch] for epoch in epochs]
    assert len({tuple(o) for o in [*orders, range(50)]}) == 4


def test_the_order_depends_on_the_seed_alone():
    assert draw(PromptStream(rows(50), seed=1), 120) == draw(PromptStream(rows(50), seed=1), 120)
    assert draw(PromptStream(rows(50), seed=1), 50) != draw(PromptStream(rows(50), seed=2), 50)
    assert draw(PromptStream(rows(50), seed=2**70), 50) != draw(PromptStream(rows(50), seed=0), 50)


def test_the_order_never_changes_between_releases():
    assert [p.split("-")[1] for p in draw(PromptStream(SEVEN, seed=0), 7)] == ["0", "1", "3", "5", "6", "4", "2"]


def test_without_shuffling_rows_come_as_they_are():
    assert draw(PromptStream(rows(3), seed=5, shuffle=False), 5) == ["0-0", "0-1", "0-2", "1-0", "1-1"]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2**40), st.booleans())
def test_a_stream_restored_at_any_point_goes_on_exactly(before, after, seed, shuffle):
    first = PromptStream(SEVEN, seed=seed, shuffle=shuffle)
    draw(first, before)
    state = json.loads(json.dumps(first.state()))
    second = PromptStream(SEVEN, seed=seed, shuffle=shuffle)
    second.restore(state)
    assert second.num_drawn == before
    assert draw(second, after) == draw(first, after)


def test_a_drawn_prompt_is_found_again_by_its_id():
    stream = PromptStream(rows(9), seed=3)
    for prompt in [stream.next() for _ in range(20)]:
        assert stream.get(prompt.prompt_id) == prompt
    for unknown in ("0-9", "x-1", "3", "0--1"):
        with pytest.raises(DataError, match="names no row"):
            stream.get(unknown)


def test_data_of_other_content_or_size_is_refused_at_restore():
    state = PromptStream(rows(9), seed=3).state()
    for other in (rows(10), rows(8), rows(9, start=1)):
        stream = PromptStream(other, seed=3)
        with pytest.raises(DataError, match=r"data set of other content \(9 rows, digest"):
            stream.restore(state)
        assert stream.num_drawn == 0


def test_another_seed_or_shuffling_is_refused_at_restore():
    state = PromptStream(rows(9), seed=3).state()
    with pytest.raises(DataError, match="seed = 3, and now it is 4"):
        PromptStream(rows(9), seed=4).restore(state)
    with pytest.raises(DataError, match="shuffle = True, and now it is False"):
        PromptStream(rows(9), seed=3, shuffle=False).restore(state)


def test_a_damaged_position_is_refused_at_restore():
    stream = PromptStream(rows(9), seed=3)
    with pytest.raises(DataError, match="outside of 9 rows"):
        stream.restore({**stream.state(), "position": 9})
