"""Damages inputs at random, for machines without a coverage-guided fuzzer; seeded, so repeatable.

Knows what breaks parsers: extreme numbers in every width and byte order, lengths that lie, pieces
that come twice or from another input, brackets without end, text that is no text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1,
            2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
_WORDS = (
    *(b"\xff" * 9 + b"\x01", b"\x80" * 12, b"\0", b"\0" * 8, b"\n", b"\x1b[31m", b"\xc3\x28"),
    *(b"[" * 3000, b"{" * 40, b'{"a":' * 40, b'"', b"\\", b",", b"..", b"/../", b"null", b"true"),
    *(b"-1", b"1e999", b"NaN", b"Infinity", b"9223372036854775808", b"1" * 5000, b"[]", b"{}"),
    *(b"PK\x03\x04", b"PK\x05\x06", b"PK\x01\x02", b"\x93NUMPY", b"cos\nsystem\n", b"$End="),
)


def damaged(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    """One of the seeds with one to six damages."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randint(1, 6)):
        _damage(data, seeds, dice)
    return bytes(data)


def stream(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Damaged inputs without an end, the seeds themselves first."""
    yield from seeds
    dice = random.Random(seed)
    while True:
        yield damaged(seeds, dice)


def _damage(data: bytearray, seeds: Sequence[bytes], dice: random.Random) -> None:
    # Headers are at the beginning of most formats, and directories at the end of some.
    reach = min(len(data), dice.choice((12, 200, 10_000, 1 << 30)))
    place = dice.randrange(reach + 1)
    if dice.random() < 0.2:
        place = len(data) - place
    kind = dice.randrange(8)
    if kind == 0 and place < len(data):
        data[place] ^= 1 << dice.randrange(8)
    elif kind == 1 and place < len(data):
        data[place] = dice.randrange(256)
    elif kind == 2:
        width = dice.choice((1, 2, 4, 8))
        number = dice.choice(_NUMBERS) % (1 << 8 * width)
        data[place : place + width] = number.to_bytes(width, dice.choice(("little", "big")))
    elif kind == 3:
        data[place:place] = dice.choice(_WORDS)
    elif kind == 4:
        del data[place : place + dice.choice((1, 4, 20, 400))]
    elif kind == 5:
        data[place:place] = data[place : place + dice.choice((1, 8, 64, 512))]
    elif kind == 6:
        other = dice.choice(seeds)
        start = dice.randrange(len(other) + 1)
        data[place:place] = other[start : start + dice.choice((4, 32, 256))]
    elif kind == 7:
        del data[place:]
