"""A 64-bit fingerprint of a tensor's bytes, made of vectorised integer operations that every device has.

The bytes, read as little-endian 64-bit words, are cut into tiles of 16,384 words (the last tile ends with the tensor
and overlaps the one before; a tensor below one tile is padded with zeros). Of each tile the sums of its 128 rows of 128
words and the 129 column sums of its 127 rows of 129 words are taken, modulo 2^64. Each sum is mixed with two constants
of its place in a group of 16 tiles; the groups are chained in their order, and in the end the length is mixed in. Sums
read memory close to its speed, while a multiplication per word would cost several times as much. The mixing, whose cost
is that of its calls, is done for many tensors at once (`Fingerprinter`).

What is certain before the mixing: a change of one, two or three words of a tile alters at least one of its sums, since
two words of one row never share a column. So a flipped bit, a replaced element and two elements that changed places
alter what is mixed. The mixing is not linear and not keyed: different sums meet by chance with probability near 2^-64,
2^-48 in the worst case (flips of the topmost bit of words, and nothing else). Not covered: changes of four or more
words of one tile that cancel in every row and in every column at once, which takes equal and opposite amounts at places
that form no pattern of a matrix with even sides (a row has 128 words, a column repeats every 129), and changes built on
purpose. It tells accidents apart and is no signature. Shape and dtype do not enter, the number of bytes does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_SIDE = 128
_TILE_WORDS = _SIDE * _SIDE
_TILE_BYTES = 8 * _TILE_WORDS
_GROUP_TILES = 16
_GROUP_BYTES = _GROUP_TILES * _TILE_BYTES
_NUM_SUMS = 2 * _SIDE + 1
_BATCH_TILES = 512
"""Tiles whose sums (2 KiB each) are kept until they are mixed together."""
_STEP_TILES = {"cpu": 4}
"""Tiles per operation: on a CPU half a MiB, which the second read, and a copy, still find in a core's own cache."""
_MASK = (1 << 64) - 1


def fingerprint(tensor: torch.Tensor) -> int:
    """The fingerprint of `tensor`'s bytes in row-major order: 0 <= result < 2^64, the same on every device."""
    prints = Fingerprinter()
    prints.add("", tensor)
    return prints.results()[""]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s bytes in row-major order as a flat uint8 tensor; a view when it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Fingerprinter:
    """Fingerprints of many tensors. Each is read while it is added and may change afterwards."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._values: list[int] = []
        self._sums: _TileSums | None = None

    def add(self, name: str, tensor: torch.Tensor, *, copy_to: torch.Tensor | None = None) -> None:
        """Read `tensor`. All tensors are on one device.

        `copy_to` (uint8, flat, as long as the tensor) also receives its bytes, while they are in the cache.
        """
        flat = as_bytes(tensor)
        num_bytes = flat.numel()
        if not num_bytes:
            self._entries.append(_Entry(name=name, num_bytes=0, num_tiles=0, loose=0))
            return
        if flat.data_ptr() % 8:  # an int64 view needs alignment
            flat = flat.clone()
        if num_bytes < _TILE_BYTES:
            num_tiles, loose = 1, 0
            padded = torch.zeros(_TILE_BYTES, dtype=torch.uint8, device=flat.device)
            padded[:num_bytes] = flat
            self._sum(padded.view(torch.int64), first_tile=0, first_word=0, count=1)
            if copy_to is not None:
                copy_to.copy_(flat)
        else:
            num_tiles, loose = self._sum_all(flat, copy_to)
        self._entries.append(_Entry(name=name, num_bytes=num_bytes, num_tiles=num_tiles, loose=loose))

    def results(self) -> dict[str, int]:
        """Fingerprint by name of everything added so far."""
        if self._sums is not None:
            self._values += self._sums.mix()
        values = iter(self._values)
        return {entry.name: entry.chain([next(values) for _ in range(entry.num_tiles)]) for entry in self._entries}

    def _sum_all(self, flat: torch.Tensor, copy_to: torch.Tensor | None) -> tuple[int, int]:
        """Sum the tiles of `flat`, which has one at least; return their number and what its loose bytes stand for."""
        num_words, num_loose = divmod(flat.numel(), 8)
        words = (flat[: num_words * 8] if num_loose else flat).view(torch.int64)
        whole, more = divmod(num_words, _TILE_WORDS)
        step = _STEP_TILES.get(flat.device.type, _BATCH_TILES)
        for first in range(0, whole, step):
            count = min(step, whole - first)
            self._sum(words, first_tile=first, first_word=first * _TILE_WORDS, count=count)
            if copy_to is not None:
                part = slice(first * _TILE_BYTES, (first + count) * _TILE_BYTES)
                copy_to[part] = flat[part]
        if more:
            self._sum(words, first_tile=whole, first_word=num_words - _TILE_WORDS, count=1)
        if copy_to is not None and (more or num_loose):
            copy_to[whole * _TILE_BYTES :] = flat[whole * _TILE_BYTES :]
        loose = int.from_bytes(bytes(flat[num_words * 8 :].tolist()), "little") + 1 if num_loose else 0
        return whole + bool(more), loose

    def _sum(self, words: torch.Tensor, *, first_tile: int, first_word: int, count: int) -> None:
        if self._sums is None:
            self._sums = _TileSums(words.device)
        if self._sums.count + count > _BATCH_TILES:
            self._values += self._sums.mix()
        self._sums.add(words, first_tile=first_tile, first_word=first_word, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What was added."""

    name: str
    num_bytes: int
    num_tiles: int
    loose: int
    """Of the bytes behind the last word: their value plus 1; 0 if there are none."""

    def chain(self, tiles: list[int]) -> int:
        """The fingerprint, from the mixed sums of the tiles."""
        groups = [sum(tiles[i : i + _GROUP_TILES]) & _MASK for i in range(0, len(tiles), _GROUP_TILES)]
        if self.loose:
            groups[-1] ^= _splitmix(self.loose)
        total = 0
        for group in groups:
            total = _splitmix(total ^ group)
        return _splitmix(total ^ _splitmix(self.num_bytes))


class _TileSums:
    """The sums of up to `_BATCH_TILES` tiles that are not mixed yet."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.empty(_BATCH_TILES, _SIDE, dtype=torch.int64, device=device)
        self._columns = torch.empty(_BATCH_TILES, _SIDE + 1, dtype=torch.int64, device=device)
        self._places: list[int] = []

    @property
    def count(self) -> int:
        """Tiles held."""
        return len(self._places)

    def add(self, words: torch.Tensor, *, first_tile: int, first_word: int, count: int) -> None:
        """Sum `count` tiles of `words` (flat int64) from `first_word` on; in their tensor the first is `first_tile`."""
        offset = words.storage_offset() + first_word
        rows = words.as_strided((count, _SIDE, _SIDE), (_TILE_WORDS, _SIDE, 1), offset)
        # 127 rows of 129 words are one word short of a tile; that word is in the other sums.
        slanted = words.as_strided((count, _SIDE - 1, _SIDE + 1), (_TILE_WORDS, _SIDE + 1, 1), offset)
        used = self.count
        torch.sum(rows, 2, out=self._rows[used : used + count])
        torch.sum(slanted, 1, out=self._columns[used : used + count])
        self._places += [(first_tile + i) % _GROUP_TILES for i in range(count)]

    def mix(self) -> list[int]:
        """One 64-bit number for each tile held, which are given up."""
        if not self._places:
            return []
        places = torch.tensor(self._places, device=self._rows.device)
        inner, outer = _weights(self._rows.device)
        total = torch.zeros(self.count, dtype=torch.int64, device=self._rows.device)
        for sums, part in ((self._rows, slice(_SIDE)), (self._columns, slice(_SIDE, None))):
            mixed = sums[: self.count] * inner[places, part]
            mixed.add_(mixed >> 47)
            total += mixed.mul_(outer[places, part]).sum(1)
        self._places = []
        return total.tolist()


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two odd constants for each sum of a group: [16, 257] int64 each."""
    count = _GROUP_TILES * _NUM_SUMS
    values = [_signed(_splitmix(i * 0x9E3779B97F4A7C15) | 1) for i in range(2 * count)]
    both = torch.tensor(values, dtype=torch.int64, device=device).view(2, _GROUP_TILES, _NUM_SUMS)
    return both[0].clone(), both[1].clone()


def _splitmix(state: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
