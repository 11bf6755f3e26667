"""A digest that many threads can make at once, for tensors that are not copied to the host.

xxh3 reads its bytes one after the other. This one cuts a tensor into chunks of 512 groups of 64
elements; every lane of a chunk hashes its words by multiplication with odd keys, and the lanes'
results, each mixed with its place, are added. Equal bytes of the same width have equal digests on
every device; a digest of one kind says nothing about one of the other.

This file is the definition, in numpy; `kernels/summary.py` does the same on the device. The words
of a group are taken in the order of the sketch's buckets, since that is how the kernel reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.numerics.definitions import group_flips, group_signs

U64 = npt.NDArray[np.uint64]
PREFIX = "lanes-128:"
CHUNK_ROWS, LANES, STEPS = 512, 8, 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TIMES_A, _TIMES_B = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_KEYS = (
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93),
    (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)
_WORDS = {1: "<u1", 2: "<u4", 4: "<u4", 8: "<u8"}
_M = (1 << 64) - 1


def _mixed(z: U64) -> U64:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def digest_of(data: npt.NDArray[Any], width: int) -> str:
    """The digest of flat storage whose elements take `width` bytes: 1, 2, 4 or 8."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    columns = 32 if width == 2 else 64
    tile = LANES * STEPS
    row_bytes = 64 * width
    count = raw.size // width
    tiles = -(-count // (64 * tile))
    padded = np.zeros(tiles * tile * row_bytes, np.uint8)
    padded[: raw.size] = raw
    words = padded.view(_WORDS[width]).astype(np.uint64).reshape(-1, columns)
    flips = group_flips(group_signs(np.arange(len(words), dtype=np.uint64)))
    place = np.arange(columns)[None, :] ^ (flips >> np.uint64(width == 2)).astype(np.int64)[:, None]
    words = np.take_along_axis(words, place, 1)
    if width == 2:  # a thread takes 16 bytes of a group at a time
        words = np.moveaxis(words.reshape(tiles, tile, LANES, STEPS), 3, 1)
    else:
        words = words.reshape(tiles, STEPS, LANES, columns)
    sums = [np.uint64(0), np.uint64(0)]
    with np.errstate(over="ignore"):
        keys = [np.array(some, np.uint64)[:, None, None] for some in _KEYS]
        spots = np.arange(LANES * columns, dtype=np.uint64).reshape(words.shape[2:])
        per_chunk = CHUNK_ROWS // tile
        for chunk in range(-(-tiles // per_chunk)):
            a = b = np.zeros(words.shape[2:], np.uint64)
            for one in words[chunk * per_chunk : (chunk + 1) * per_chunk]:
                a = a * _TIMES_A + (one * keys[0]).sum(0, dtype=np.uint64)
                b = b * _TIMES_B + (one * keys[1]).sum(0, dtype=np.uint64)
            first = np.uint64(chunk * LANES * columns + 1)
            spot = _mixed((spots + first) * _GOLDEN)
            sums[0] += _mixed(a ^ spot).sum(dtype=np.uint64)
            sums[1] += _mixed(b + spot).sum(dtype=np.uint64)
    return digest_text(int(sums[0]), int(sums[1]), count, width)


def digest_text(a: int, b: int, count: int, width: int) -> str:
    """What the two sums are called, together with how much they are sums of."""
    size = (count * width + 1) * 0x9E3779B97F4A7C15
    return f"{PREFIX}{a & _M:016x}{(b ^ size) & _M:016x}"
