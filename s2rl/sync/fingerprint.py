"""A 64-bit fingerprint of a tensor's bytes, made of vectorised integer operations that every device has.

The bytes, read as little-endian 64-bit words and padded with zeros, are cut into tiles of 128 x 128 words. Of each tile
all row sums, column sums and (wrapped) diagonal sums are taken, modulo 2^64; each sum is mixed with constants of its
position; what the tiles give is mixed with their index, and in the end with the length. Reductions read memory once at
close to its speed, while a multiplication per word would cost three to five times as much.

What is certain before the final mixing: a change of one, two or three words of a tile alters at least one of its sums
(one of them is alone in its row or in its column). So a flipped bit, a replaced element and two elements that changed
places alter what is mixed. The mixing is not linear and not keyed: different sums meet with probability near 2^-64 by
chance. Not covered: changes of more words of one tile that cancel in every row, column and diagonal at once (equal and
opposite amounts on the corners of a rectangle cancel in rows and columns, and the diagonals catch most of those), and
changes built on purpose. It tells accidents apart and is no signature. Shape and dtype do not enter, the number of
bytes does.
"""

from __future__ import annotations

import functools

import torch

_SIDE = 128
_TILE_WORDS = _SIDE * _SIDE
_TILE_BYTES = 8 * _TILE_WORDS
_NUM_SUMS = 3 * _SIDE + 1
_CHUNK_TILES_CPU = 4  # 512 KiB: stays in a core's second-level cache between the passes
_CHUNK_TILES_DEVICE = 512  # 64 MiB: few kernel launches
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fingerprint(tensor: torch.Tensor, *, copy_to: torch.Tensor | None = None) -> int:
    """The fingerprint of `tensor`'s bytes in row-major order: 0 <= result < 2^64, the same on every device.

    `copy_to` (uint8, flat, as long as the tensor) also receives the bytes, chunk by chunk while they are in the cache.
    """
    flat = as_bytes(tensor)
    num_bytes = flat.numel()
    if flat.data_ptr() % 8:  # an int64 view needs alignment
        flat = flat.clone()
    chunk_tiles = _CHUNK_TILES_CPU if flat.device.type == "cpu" else _CHUNK_TILES_DEVICE
    step = chunk_tiles * _TILE_BYTES
    whole = num_bytes - num_bytes % _TILE_BYTES
    tiles: list[torch.Tensor] = []
    for start in range(0, whole, step):
        chunk = flat[start : min(start + step, whole)]
        tiles.append(_mix_tiles(chunk.view(torch.int64)))
        if copy_to is not None:
            copy_to[start : start + chunk.numel()].copy_(chunk)
    if whole < num_bytes:
        rest = flat[whole:]
        padded = torch.zeros(_TILE_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: rest.numel()].copy_(rest)
        tiles.append(_mix_tiles(padded.view(torch.int64)))
        if copy_to is not None:
            copy_to[whole:].copy_(rest)
    total = _mix_order(torch.cat(tiles)) if tiles else 0
    return _finish(total, num_bytes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s bytes in row-major order as a flat uint8 tensor; a view when it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _mix_tiles(words: torch.Tensor) -> torch.Tensor:
    """One mixed int64 per tile of `words` (a whole number of tiles)."""
    num_tiles = words.numel() // _TILE_WORDS
    square = words.view(num_tiles, _SIDE, _SIDE)
    sums = torch.empty((num_tiles, _NUM_SUMS), dtype=torch.int64, device=words.device)
    torch.sum(square, dim=2, out=sums[:, :_SIDE])
    torch.sum(square, dim=1, out=sums[:, _SIDE : 2 * _SIDE])
    # Rows of 129 words make the columns of this view the diagonals of the square. Its last word stays outside.
    slanted = words.as_strided((num_tiles, _SIDE - 1, _SIDE + 1), (_TILE_WORDS, _SIDE + 1, 1), words.storage_offset())
    torch.sum(slanted, dim=1, out=sums[:, 2 * _SIDE :])
    first, second = _weights(words.device)
    sums.mul_(first)
    sums.add_(sums >> 32)
    sums.mul_(second)
    sums.add_(sums >> 29)
    return sums.sum(dim=1)


def _mix_order(tiles: torch.Tensor) -> int:
    """One number of all tiles in their order."""
    index = torch.arange(1, tiles.numel() + 1, dtype=torch.int64, device=tiles.device)
    mixed = (tiles ^ (index * _signed(_GOLDEN))) * _signed(0xBF58476D1CE4E5B9)
    mixed += mixed >> 32
    mixed *= 2 * index + _signed(0x94D049BB133111EB)
    mixed += mixed >> 29
    return int(mixed.sum().item()) & _MASK


def _finish(total: int, num_bytes: int) -> int:
    return _splitmix((total ^ _splitmix(num_bytes)) & _MASK)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two odd constants for each sum of a tile."""
    values = [_signed(_splitmix(i) | 1) for i in range(2 * _NUM_SUMS)]
    both = torch.tensor(values, dtype=torch.int64, device=device)
    return both[:_NUM_SUMS].clone(), both[_NUM_SUMS:].clone()


def _splitmix(state: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    z = (state + 1) * _GOLDEN & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
