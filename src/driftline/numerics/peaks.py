"""How near a tensor came to the limit of its format, and which values are beyond it.

Without its sign, the bit pattern of a float sorts like its value: infinity is above every finite
number, and NaN above infinity. So one unsigned maximum, at the speed of memory, shows whether
anything is not finite, and how many powers of two were left. The kinds of special values are
counted afterwards, if they matter. This file knows addresses and element types, but no tensors, and
no rules about what is allowed.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.numerics import kernel
from driftline.numerics.dtypes import Pattern


class Tally(NamedTuple):
    """Number of special values of each kind; all other elements are ordinary numbers."""

    zero: int
    subnormal: int
    top: int
    bottom: int
    pos_inf: int
    neg_inf: int
    nan: int

    @property
    def infinite(self) -> int:
        return self.pos_inf + self.neg_inf

    @property
    def nonfinite(self) -> int:
        return self.pos_inf + self.neg_inf + self.nan


_PATTERN = struct.Struct("=6Q")
_TALLY = struct.Struct("=7q")
_TallyBuffer = ctypes.c_char * _TALLY.size


@functools.cache
def _functions() -> tuple[Any, Any, int] | None:
    """The two functions of the C kernel and the number of the path; None if numpy must be used."""
    library, path = kernel.chosen(None)
    if library is None:
        return None
    try:
        # Function objects of our own, because `kernel` declares the library's functions
        # differently.
        peak = cast("Any", library)["driftline_peak"]
        tally = cast("Any", library)["driftline_tally"]
    except AttributeError:  # a library from before these functions existed
        return None
    pointer, c_int, int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    peak.argtypes = [pointer, c_int, int64, ctypes.c_uint64, c_int, c_int]
    peak.restype = ctypes.c_uint64
    tally.argtypes = [pointer, c_int, int64, pointer, pointer]
    tally.restype = None
    return peak, tally, path


def peak_at(address: int, count: int, pattern: Pattern) -> int:
    """The largest magnitude pattern of `count` elements; above `pattern.top` if any is not finite.

    Args:
        address: Address of memory that the caller guarantees.
        count: Number of consecutive elements.
        pattern: Format of the elements.
    """
    functions = _functions()
    if functions is None:
        return _peak_in_numpy(_raw(address, count, pattern), pattern)
    peak, _, path = functions
    return peak(address, pattern.bits, count * pattern.reals, pattern.mask, pattern.odd_nan, path)


def tally_at(address: int, count: int, pattern: Pattern) -> Tally:
    """Count the special values of each kind; complex elements are two reals each."""
    functions = _functions()
    if functions is None:
        return _tally_in_numpy(_raw(address, count, pattern), pattern)
    shape = _PATTERN.pack(
        pattern.mask,
        1 << (pattern.bits - 1),
        pattern.normal,
        pattern.top,
        pattern.infinity,
        pattern.odd_nan,
    )
    out = _TallyBuffer()
    functions[1](address, pattern.bits, count * pattern.reals, shape, out)
    return Tally._make(_TALLY.unpack(out))


def _raw(address: int, count: int, pattern: Pattern) -> npt.NDArray[np.unsignedinteger[Any]]:
    width = pattern.bits // 8
    return kernel.bytes_at(address, count * pattern.reals * width).view(f"<u{width}")


def _peak_in_numpy(raw: npt.NDArray[np.unsignedinteger[Any]], pattern: Pattern) -> int:
    if not raw.size:
        return 0
    if pattern.odd_nan and bool((raw == 0x80).any()):
        return 0xFF
    return int((raw & raw.dtype.type(pattern.mask)).max())


def _tally_in_numpy(raw: npt.NDArray[np.unsignedinteger[Any]], pattern: Pattern) -> Tally:
    sign = raw.dtype.type(1 << (pattern.bits - 1))
    size = raw & raw.dtype.type(pattern.mask)
    negative = (raw & sign) != 0
    odd = raw == sign if pattern.odd_nan else np.zeros(raw.shape, np.bool_)
    infinite = (size == pattern.infinity) if pattern.infinity else np.zeros(raw.shape, np.bool_)

    def count(where: npt.NDArray[np.bool_]) -> int:
        return int(np.count_nonzero(where))

    return Tally(
        zero=count((size == 0) & ~odd),
        subnormal=count((size > 0) & (size < pattern.normal)),
        top=count((size == pattern.top) & ~negative),
        bottom=count((size == pattern.top) & negative),
        pos_inf=count(infinite & ~negative),
        neg_inf=count(infinite & negative),
        nan=count(odd | ((size > pattern.top) & ~infinite)),
    )
