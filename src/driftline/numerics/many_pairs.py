"""Many pairs measured by threads of the kernel's own, while Python does something else.

A thread that Python knows would have to take the interpreter's lock between any two of them, from
whoever has it. Only where `kernel.takes_addresses()`; the moments are those of `pair_moments_at`.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from driftline.numerics import kernel
from driftline.numerics.moments import PairMoments

_ASK = struct.Struct("=2Qq2d5i4x")


def ask(
    reference: int,
    candidate: int,
    dtypes: tuple[str, str],
    count: int,
    rtol: float,
    atol: float,
) -> bytes:
    """One pair, by where its values lie and the names of their types, as the kernel reads it."""
    r_code, c_code, reals, widen, r_mask, c_mask = kernel.pairing(*dtypes)
    words = (r_code, c_code, widen, r_mask, c_mask)
    return _ASK.pack(reference, candidate, count * reals, atol, rtol, *words)


class ManyPairs:
    """Pairs that are being measured, in their order.

    Args:
        asks: What `ask` gave; none of an empty pair.
        owners: What keeps the memory where it is.
        threads: How many.
    """

    def __init__(self, asks: Sequence[bytes], owners: object, threads: int = 1) -> None:
        self._asks = b"".join(asks)
        self._owners = owners
        self._out = ctypes.create_string_buffer(len(asks) * kernel.MOMENTS.size)
        library, path = kernel.chosen(None)
        assert library is not None
        begin, self._end = _doors(library)
        self._work: int | None = begin(self._asks, len(asks), path, threads, self._out)

    def end(self, *, wanted: bool) -> None:
        """Wait for all of them, and help; or, if they are not wanted, for what is under way."""
        work, self._work = self._work, None
        if work is not None:
            self._end(work, wanted)
        self._owners = None

    def moments(self, at: int) -> PairMoments | None:
        """Of one of them, after the end; None where it did not come to that."""
        found = kernel.MOMENTS.unpack_from(self._out, at * kernel.MOMENTS.size)
        return PairMoments._make(found) if found[0] else None

    def __del__(self) -> None:
        self.end(wanted=False)  # before the memory goes


@functools.cache
def _doors(library: ctypes.CDLL) -> tuple[Any, Any]:
    begin, end = library.driftline_begin_pairs, library.driftline_end_pairs
    pointer, c_int = ctypes.c_void_p, ctypes.c_int
    begin.argtypes = [pointer, ctypes.c_int64, c_int, c_int, pointer]
    begin.restype = pointer
    end.argtypes = [pointer, c_int]
    end.restype = None
    return begin, end
