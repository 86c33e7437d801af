"""A 64-bit fingerprint of a tensor's bytes, made of vectorised integer operations that every device has.

The bytes, read as little-endian 64-bit words and padded with zeros, are cut into tiles of 128 x 128 words. Of each tile
all row sums, column sums and (wrapped) diagonal sums are taken, modulo 2^64. Each sum is mixed with two constants of its
place in a group of eight tiles; the groups are chained in their order, and in the end the length is mixed in. Sums read
memory close to its speed, while a multiplication per word would cost several times as much.

What is certain before the mixing: a change of one, two or three words of a tile alters at least one of its sums (one of
them is alone in its row or in its column). So a flipped bit, a replaced element and two elements that changed places
alter what is mixed. The mixing is not linear and not keyed: different sums meet with probability near 2^-64 by chance.
Not covered: changes of more words of one tile that cancel in every row, column and diagonal at once (equal and opposite
amounts on the corners of a rectangle cancel in rows and columns, and the diagonals catch most of those), and changes
built on purpose. It tells accidents apart and is no signature. Shape and dtype do not enter, the number of bytes does.
"""

from __future__ import annotations

import functools

import torch

_SIDE = 128
_TILE_WORDS = _SIDE * _SIDE
_TILE_BYTES = 8 * _TILE_WORDS
_GROUP_TILES = 8  # 1 MiB: stays in a core's second-level cache between the passes
_GROUP_BYTES = _GROUP_TILES * _TILE_BYTES
_NUM_SUMS = 3 * _SIDE + 1
_CALL_BYTES_DEVICE = 64 * _GROUP_BYTES  # few kernel launches
_MASK = (1 << 64) - 1


def fingerprint(tensor: torch.Tensor, *, copy_to: torch.Tensor | None = None) -> int:
    """The fingerprint of `tensor`'s bytes in row-major order: 0 <= result < 2^64, the same on every device.

    `copy_to` (uint8, flat, as long as the tensor) also receives the bytes, part by part while they are in the cache.
    """
    flat = as_bytes(tensor)
    num_bytes = flat.numel()
    if flat.data_ptr() % 8:  # an int64 view needs alignment
        flat = flat.clone()
    step = _GROUP_BYTES if flat.device.type == "cpu" else _CALL_BYTES_DEVICE
    total = 0
    for start in range(0, num_bytes, step):
        part = flat[start : start + step]
        for group in _mix_groups(part):
            total = _splitmix(total ^ group)
        if copy_to is not None:
            copy_to[start : start + step].copy_(part)
    return _splitmix(total ^ _splitmix(num_bytes))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s bytes in row-major order as a flat uint8 tensor; a view when it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mix_groups(part: torch.Tensor) -> list[int]:
    """One 64-bit number for each started group of `part` (flat uint8)."""
    num_bytes, device = part.numel(), part.device
    num_whole = num_bytes // _TILE_BYTES
    num_tiles = -(-num_bytes // _TILE_BYTES)
    num_groups = -(-num_tiles // _GROUP_TILES)
    # A tile that is not there mixes to 0, so one group needs no room for tiles beyond the last.
    rows = num_tiles if num_groups == 1 else num_groups * _GROUP_TILES
    sums = torch.zeros((rows, _NUM_SUMS), dtype=torch.int64, device=device)
    if num_whole:
        _sum_tiles(part[: num_whole * _TILE_BYTES].view(torch.int64), out=sums[:num_whole])
    if num_whole < num_tiles:
        padded = torch.zeros(_TILE_BYTES, dtype=torch.uint8, device=device)
        padded[: num_bytes - num_whole * _TILE_BYTES].copy_(part[num_whole * _TILE_BYTES :])
        _sum_tiles(padded.view(torch.int64), out=sums[num_whole:num_tiles])
    first, second = _weights(device)
    mixed = sums.view(num_groups, -1, _NUM_SUMS)
    mixed.mul_(first[: mixed.shape[1]])
    mixed.add_(mixed >> 32)
    mixed.mul_(second[: mixed.shape[1]])
    mixed.add_(mixed >> 29)
    return [value & _MASK for value in mixed.sum(dim=(1, 2)).tolist()]


def _sum_tiles(words: torch.Tensor, *, out: torch.Tensor) -> None:
    """Row, column and diagonal sums of each tile: `words` [tiles * 128 * 128] int64 -> `out` [tiles, 385]."""
    num_tiles = words.numel() // _TILE_WORDS
    square = words.view(num_tiles, _SIDE, _SIDE)
    torch.sum(square, dim=2, out=out[:, :_SIDE])
    torch.sum(square, dim=1, out=out[:, _SIDE : 2 * _SIDE])
    # Rows of 129 words make the columns of this view the diagonals of the square. Its last word stays outside.
    slanted = words.as_strided((num_tiles, _SIDE - 1, _SIDE + 1), (_TILE_WORDS, _SIDE + 1, 1), words.storage_offset())
    torch.sum(slanted, dim=1, out=out[:, 2 * _SIDE :])


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two odd constants for each sum of a group: [8, 385] int64 each."""
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
