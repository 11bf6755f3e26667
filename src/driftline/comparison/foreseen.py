"""What two runs will most likely be asked for, by the text of their indexes alone.

A command that compares two runs spends most of its start on loading what reads, checks and pairs
their records. The kernel need not wait for that: lines of the same name, written as our writer
writes them, say where two tensors lie. It is a guess, and nothing is believed: only what lies
inside the mapped files is looked at, and moments are taken only for records which, read and checked
as ever, lie in just those places (`ahead`). What is written otherwise is not foreseen. The looking
is C's (`foreseen.c`), and little else is loaded before it: neither `pathlib` nor `typing`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct

from driftline.comparison.blocks import BLOCK, ENOUGH, LARGE, MAPPED, blocks_of, cores
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.libraries import opened
from driftline.numerics.many_pairs import ManyPairs, ask
from driftline.runs.layout import shard_name

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from driftline.runs.record import Record

_ABI = 1
_TYPES = ("float32", "bfloat16", "float16")
_HEAD = struct.Struct("@2P2q")
_PAIR = struct.Struct("=12q")


class Foreseen:
    """Blocks that are being measured, by the places of the two tensors.

    Attributes:
        of: What it was begun with.
        work: Who measures them.
    """

    def __init__(self, of: tuple[Any, ...], files: _Files, work: ManyPairs) -> None:
        self.of = of
        self.work = work
        self._files = files

    def __len__(self) -> int:
        return self._files.ask_count

    def turn(self, ours: Record, theirs: Record, start: int, stop: int) -> int | None:
        """The how manieth a block is; None if it is none of them."""
        one, other = ours.key, theirs.key
        here = (one.rank, one.process), ours.blob, ours.dtype
        there = (other.rank, other.process), theirs.blob, theirs.dtype
        return self.blocks.get((here, there, start, stop))

    @functools.cached_property
    def blocks(self) -> dict[tuple[object, ...], int]:
        """The how manieth each block is."""
        found: dict[tuple[object, ...], int] = {}
        for pair in self._files.pairs():
            rank, process, shard, at, size, shard_there, at_there, size_there, *rest = pair
            count, first, our_type, their_type = rest
            one = (rank, process), (shard_name(shard), at, size), _TYPES[our_type]
            there = shard_name(shard_there), at_there, size_there
            other = (rank, process), there, _TYPES[their_type]
            for turn, (start, stop) in enumerate(blocks_of(count), first):
                found[one, other, start, stop] = turn
        return found


class _Files:
    """What C found, and the files that it mapped, until this goes."""

    def __init__(self, library: ctypes.CDLL, found: int) -> None:
        self._library = library
        self._found = found
        head = _HEAD.unpack(ctypes.string_at(found, _HEAD.size))
        self.asks, self._pairs, self.ask_count, self._pair_count = head

    def pairs(self) -> list[tuple[int, ...]]:
        text = ctypes.string_at(self._pairs, self._pair_count * _PAIR.size)
        return list(_PAIR.iter_unpack(text))

    def __del__(self) -> None:
        self._library.driftline_forget_foreseen(self._found)


_begun: list[Foreseen] = []
"""One at most: a process that is one command begins once."""


def begin(
    reference: str, candidate: str, elementwise: Callable[[str, str], tuple[float, float]]
) -> None:
    """Begin to measure what two runs have in common; `elementwise` as the engine is told it.

    Nothing is said of what is wrong with them: whoever opens them will.
    """
    forget()
    library = _library()
    if library is None or not kernel.takes_addresses():
        return
    asks = [
        ask(0, 0, (ours, theirs), 0, *elementwise(ours, theirs), mapped=True)
        for ours in _TYPES
        for theirs in _TYPES
    ]
    found = library.driftline_foresee(
        os.fsencode(reference),
        os.fsencode(candidate),
        "\0".join(_TYPES).encode(),
        struct.pack(f"={len(_TYPES)}i", *(DTYPES[name].bits // 8 for name in _TYPES)),
        b"".join(asks),
        *(len(_TYPES), MAPPED, LARGE, BLOCK, ENOUGH),
    )
    if found:
        files = _Files(library, found)
        work = ManyPairs(files.asks, files.ask_count, files, max(2, cores()) - 1)
        _begun[:] = [Foreseen((reference, candidate, elementwise), files, work)]


def forget() -> None:
    """Let go of what was begun and nobody came for; what is under way is waited for."""
    _begun.clear()


def taken(*of: object) -> Foreseen | None:
    """What was begun with just these, called as runs are; for one asker, and for others it ends."""
    known = _begun.pop() if _begun else None
    if known is None:
        return None
    from pathlib import Path  # by now

    *paths, elementwise = known.of
    return known if (*(str(Path(path)) for path in paths), elementwise) == of else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = f"{os.path.dirname(__file__)}/_foreseen.so"  # noqa: PTH120 - before `pathlib` is loaded
    if (library := opened(path, "driftline_foreseen_abi", _ABI)) is None:
        return None
    text, c_int, int64 = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
    foresee, forget = library.driftline_foresee, library.driftline_forget_foreseen
    foresee.argtypes = [text, text, text, text, text, c_int, c_int, int64, int64, int64]
    foresee.restype = ctypes.c_void_p
    forget.argtypes, forget.restype = [ctypes.c_void_p], None
    return library
