"""Many pairs measured by threads of the kernel's own, while Python does something else.

A thread that Python knows would have to take the interpreter's lock between any two of them, from
whoever has it. Only where `kernel.takes_addresses()`; the moments are those of `pair_moments_at`.
"""

from __future__ import annotations

import ctypes
import functools
import struct

from driftline.numerics import kernel
from driftline.numerics.moments import PairMoments

TYPE_CHECKING = False  # what `typing` calls it
if TYPE_CHECKING:
    from typing import Any

_ASK = struct.Struct("=2Qq2d6i")


def ask(
    reference: int,
    candidate: int,
    dtypes: tuple[str, str],
    count: int,
    rtol: float,
    atol: float,
    *,
    mapped: bool = False,
) -> bytes:
    """One pair, by where its values lie and the names of their types, as the kernel reads it.

    Args:
        mapped: Both lie in files that are mapped, whose pages may go as soon as they were read.
    """
    r_code, c_code, reals, widen, r_mask, c_mask = kernel.pairing(*dtypes)
    words = (r_code, c_code, widen, r_mask, c_mask, mapped)
    return _ASK.pack(reference, candidate, count * reals, atol, rtol, *words)


class ManyPairs:
    """Pairs that are being measured, in their order; asked by one thread at a time.

    Args:
        asks: What `ask` gave for each, joined, or where that lies.
        count: How many they are.
        owners: What keeps the memory where it is.
        threads: How many.
    """

    def __init__(self, asks: bytes | int, count: int, owners: object, threads: int = 1) -> None:
        self._count = count
        self._asks = asks
        self._owners = owners
        self._out = ctypes.create_string_buffer(count * kernel.MOMENTS.size)
        self._done = ctypes.create_string_buffer(count)
        library, path = kernel.chosen(None)
        assert library is not None
        begin, self._await, self._end = _doors(library)
        self._work: int | None = begin(*(self._asks, count, path, threads, self._out, self._done))

    def moments(self, at: int) -> PairMoments | None:
        """Of one of them; while it is not measured, the caller's thread helps with others.

        None after an end before it came to that.
        """
        if self._work is not None:
            self._await(self._work, at)
        if self._done[at] == b"\0":
            return None
        return PairMoments._make(kernel.MOMENTS.unpack_from(self._out, at * kernel.MOMENTS.size))

    def finish(self) -> None:
        """Measure what is left."""
        if self._work is not None:
            for at in range(self._count):
                self._await(self._work, at)
        self.end()

    def end(self) -> None:
        """Begin no other; waits for those under way."""
        work, self._work = self._work, None
        if work is not None:
            self._end(work)
        self._owners = None

    def __del__(self) -> None:
        self.end()  # before the memory goes


@functools.cache
def _doors(library: ctypes.CDLL) -> tuple[Any, Any, Any]:
    pointer, c_int, int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    begin, end = library.driftline_begin_pairs, library.driftline_end_pairs
    wait = library.driftline_await_pair
    begin.argtypes = [pointer, int64, c_int, c_int, pointer, pointer]
    begin.restype = pointer
    wait.argtypes, wait.restype = [pointer, int64], None
    end.argtypes, end.restype = [pointer], None
    return begin, wait, end
