"""The fingerprint sees every accident that a transfer or a loader can have."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s2rl.sync import fingerprint

implementation = importlib.import_module("s2rl.sync.fingerprint")
TILE = implementation._TILE_BYTES
GROUP = implementation._GROUP_BYTES
# Around every border: word, row, tile, group; and sizes that are no multiple of a word.
SIZES = [
    1,
    7,
    8,
    9,
    1023,
    1024,
    1032,
    TILE - 1,
    TILE,
    TILE + 1,
    TILE + 8,
    3 * TILE + 17,
    GROUP,
    GROUP + 24,
    GROUP + TILE + 5,
]


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=150)
@given(size=st.sampled_from(SIZES), data=st.data())
def test_any_flipped_bit_changes_it(size: int, data: st.DataObject) -> None:
    tensor = random_bytes(size)
    before = fingerprint(tensor)
    position = data.draw(st.one_of(st.integers(0, size - 1), st.integers(max(0, size - 20), size - 1)))
    tensor[position] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(tensor) != before


@settings(deadline=None, max_examples=150)
@given(size=st.sampled_from(SIZES[2:]), width=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_two_elements_that_changed_places_change_it(size: int, width: int, data: st.DataObject) -> None:
    tensor = random_bytes(size - size % width).view(-1, width)
    first, second = data.draw(st.integers(0, len(tensor) - 1)), data.draw(st.integers(0, len(tensor) - 1))
    before = fingerprint(tensor)
    differ = not torch.equal(tensor[first], tensor[second])
    tensor[[first, second]] = tensor[[second, first]]
    assert (fingerprint(tensor) != before) == differ


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_signs_of_two_elements_change_it_wherever_they_are(data: st.DataObject) -> None:
    # The topmost bit of a word is what sums modulo 2^64 see least of.
    words = random_bytes(3 * TILE).view(torch.int64)
    before = fingerprint(words)
    for position in data.draw(st.sets(st.integers(0, len(words) - 1), min_size=1, max_size=4)):
        words[position] ^= -(2**63)
    assert fingerprint(words) != before


@pytest.mark.parametrize(
    "accident",
    [
        lambda w: w.neg(),
        lambda w: w.t().contiguous().view(w.shape),
        lambda w: w.flip(0),
        lambda w: w.flip(1),
        lambda w: w.roll(1, 0),
        lambda w: w.roll(1, 1),
        lambda w: w.roll(64, 1),
        lambda w: torch.cat([w[:128], w[:128], w[256:]]),
        lambda w: torch.cat([w[128:256], w[:128], w[256:]]),
        lambda w: torch.cat([w[:-1], torch.zeros_like(w[:1])]),
        lambda w: w[:, torch.randperm(512, generator=torch.Generator().manual_seed(1))],
        lambda w: w[torch.randperm(512, generator=torch.Generator().manual_seed(1))],
        lambda w: torch.cat([w[256:], w[:256]]),
        lambda w: w.view(4, 128, 512).transpose(0, 1).reshape(512, 512),
        lambda w: w + torch.finfo(torch.bfloat16).eps * w,
        torch.zeros_like,
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_loaders_do_wrong_changes_it(accident, dtype: torch.dtype) -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert fingerprint(accident(weight)) != fingerprint(weight)


def test_the_four_corners_of_a_rectangle_that_cancel_in_rows_and_columns_change_it() -> None:
    words = random_bytes(TILE).view(torch.int64)
    before = fingerprint(words)
    for first, second in ((0, 5), (1, 77), (100, 126)):
        square = words.clone().view(128, 128)
        square[3, first] += 11
        square[3, second] -= 11
        square[90, first] -= 11
        square[90, second] += 11
        assert fingerprint(square) != before


def test_it_depends_on_the_number_of_bytes_and_not_on_shape_or_dtype() -> None:
    zeros = {fingerprint(torch.zeros(size, dtype=torch.uint8)) for size in (0, 1, 7, 8, 9, TILE, TILE + 1, 2 * GROUP)}
    assert len(zeros) == 8
    tensor = torch.randn(64, 48)
    assert fingerprint(tensor) == fingerprint(tensor.view(-1)) == fingerprint(tensor.view(torch.int16))
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())


def test_the_same_bytes_have_the_same_fingerprint_at_every_alignment_and_stride() -> None:
    for size in (24, 1000, TILE + 40):
        data = random_bytes(size)
        expected = fingerprint(data)
        for shift in range(1, 9):
            room = torch.zeros(size + 16, dtype=torch.uint8)
            room[shift : shift + size] = data
            assert fingerprint(room[shift : shift + size]) == expected
        spread = torch.zeros(size, 3, dtype=torch.uint8)
        spread[:, 1] = data
        assert fingerprint(spread[:, 1]) == expected


def test_copy_to_receives_the_bytes_and_leaves_the_fingerprint_alone() -> None:
    for size in SIZES:
        data, target = random_bytes(size), torch.zeros(size, dtype=torch.uint8)
        prints = implementation.Fingerprinter()
        prints.add("w", data, copy_to=target)
        assert prints.results() == {"w": fingerprint(data)}
        assert torch.equal(target, data)


@pytest.mark.parametrize("step", [1, 3, 16, 512])
def test_calls_of_every_size_give_the_same_fingerprint(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    # Accelerators take as many tiles as there are in one call.
    data = random_bytes(5 * GROUP + 3 * TILE + 11)
    expected = fingerprint(data)
    monkeypatch.setattr(implementation, "_STEP_TILES", {"cpu": step})
    assert fingerprint(data) == expected


def test_many_tensors_at_once_have_the_fingerprints_that_each_has_alone() -> None:
    # More tiles than are mixed together, with the border in the middle of a tensor, and results asked for twice.
    tensors = {f"{i}": random_bytes(size, i) for i, size in enumerate([*SIZES, 70 * GROUP + 5, 0, 3 * TILE, *SIZES])}
    prints = implementation.Fingerprinter()
    for name, tensor in tensors.items():
        prints.add(name, tensor)
        if name == "3":
            assert prints.results() == {n: fingerprint(tensors[n]) for n in "0123"}
    assert prints.results() == {name: fingerprint(tensor) for name, tensor in tensors.items()}


def test_fingerprints_stay_the_same_over_releases() -> None:
    # Both sides of a sync may come from different installations.
    counting = (torch.arange(3 * TILE + 13) % 251).to(torch.uint8)
    assert fingerprint(torch.zeros(0)) == GOLDEN[0]
    assert fingerprint(torch.zeros(8, dtype=torch.uint8)) == GOLDEN[1]
    assert fingerprint(counting) == GOLDEN[2]


def test_no_two_of_many_small_random_tensors_share_a_fingerprint() -> None:
    assert len({fingerprint(random_bytes(16, seed)) for seed in range(3000)}) == 3000


GOLDEN = (0xA706DD2F4D197E6F, 0xB89DFAB0089AEDF0, 0x218E093CA6EDDE68)
