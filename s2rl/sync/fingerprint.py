"""A 64-bit fingerprint of a tensor's bytes, made of vectorised integer operations that every device has.

The bytes, read as little-endian 64-bit words, are cut into tiles of 16,384 words (the last tile ends with the tensor
and overlaps the one before; a tensor below one tile is padded with zeros). Of each tile the sums of its 128 rows of 128
words and the 129 column sums of its 127 rows of 129 words are taken, modulo 2^64. Each sum is mixed with two constants
of its place in a group of 16 tiles; the groups are chained in their order, and in the end the length is mixed in. Sums
read memory close to its speed, while a multiplication per word would cost several times as much.

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

import torch

_SIDE = 128
_TILE_WORDS = _SIDE * _SIDE
_TILE_BYTES = 8 * _TILE_WORDS
_GROUP_TILES = 16
_GROUP_BYTES = _GROUP_TILES * _TILE_BYTES  # 2 MiB: near enough to a core's second-level cache for the two sums
_NUM_SUMS = 2 * _SIDE + 1
_CALL_GROUPS_DEVICE = 64  # 128 MiB: few kernel launches
_MASK = (1 << 64) - 1


def fingerprint(tensor: torch.Tensor, *, copy_to: torch.Tensor | None = None) -> int:
    """The fingerprint of `tensor`'s bytes in row-major order: 0 <= result < 2^64, the same on every device.

    `copy_to` (uint8, flat, as long as the tensor) also receives the bytes, part by part while they are in the cache.
    """
    flat = as_bytes(tensor)
    num_bytes = flat.numel()
    if flat.data_ptr() % 8:  # an int64 view needs alignment
        flat = flat.clone()
    step = _GROUP_BYTES * (1 if flat.device.type == "cpu" else _CALL_GROUPS_DEVICE)
    total = 0
    for start in range(0, num_bytes, step):
        part = flat if num_bytes <= step else flat[start : start + step]
        for group in _mix_part(part):
            total = _splitmix(total ^ group)
        if copy_to is not None:
            copy_to[start : start + step].copy_(part)
    return _splitmix(total ^ _splitmix(num_bytes))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s bytes in row-major order as a flat uint8 tensor; a view when it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mix_part(part: torch.Tensor) -> list[int]:
    """One 64-bit number for each full group of `part` (flat uint8) and one for the rest."""
    num_groups, rest = divmod(part.numel(), _GROUP_BYTES)
    if not num_groups:
        return [_mix_rest(part)]
    full = part if not rest else part[: num_groups * _GROUP_BYTES]
    sums = _sum_tiles(full.view(torch.int64), first_word=0, count=num_groups * _GROUP_TILES)
    values = _mix(sums.view(num_groups, _GROUP_TILES, _NUM_SUMS))
    return [*values, _mix_rest(part[num_groups * _GROUP_BYTES :])] if rest else values


def _mix_rest(rest: torch.Tensor) -> int:
    """The number of a group that is not full: fewer bytes than a group has, at least one."""
    num_bytes = rest.numel()
    if num_bytes < _TILE_BYTES:
        padded = torch.zeros(_TILE_BYTES, dtype=torch.uint8, device=rest.device)
        padded[:num_bytes].copy_(rest)
        return _mix(_sum_tiles(padded.view(torch.int64), first_word=0, count=1).view(1, 1, _NUM_SUMS))[0]
    num_words, num_loose = divmod(num_bytes, 8)
    words = (rest[: num_words * 8] if num_loose else rest).view(torch.int64)
    whole, more = divmod(num_words, _TILE_WORDS)
    sums = _sum_tiles(words, first_word=0, count=whole)
    if more:
        sums = torch.cat((sums, _sum_tiles(words, first_word=num_words - _TILE_WORDS, count=1)))
    (value,) = _mix(sums.view(1, -1, _NUM_SUMS))
    if num_loose:
        value ^= _splitmix(int.from_bytes(bytes(rest[num_words * 8 :].tolist()), "little") + 1)
    return value


def _sum_tiles(words: torch.Tensor, *, first_word: int, count: int) -> torch.Tensor:
    """Row and column sums [count, 257] of `count` tiles of `words` (flat int64) from `first_word` on."""
    offset = words.storage_offset() + first_word
    rows = words.as_strided((count, _SIDE, _SIDE), (_TILE_WORDS, _SIDE, 1), offset)
    # 127 rows of 129 words are one word short of a tile; that word is in the other sums.
    slanted = words.as_strided((count, _SIDE - 1, _SIDE + 1), (_TILE_WORDS, _SIDE + 1, 1), offset)
    return torch.cat((rows.sum(2), slanted.sum(1)), 1)


def _mix(sums: torch.Tensor) -> list[int]:
    """One number per group of `sums` [groups, tiles, 257], which is overwritten."""
    inner, outer = _weights(sums.device)
    num_tiles = sums.shape[1]
    sums.mul_(inner[:num_tiles])
    sums.add_(sums >> 47)
    sums.mul_(outer[:num_tiles])
    return [value & _MASK for value in sums.sum(dim=(1, 2)).tolist()]


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
