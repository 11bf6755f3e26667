"""How near a tensor came to the top of its format, and what stands beyond it.

Without its sign, the bit pattern of a float sorts like its value: infinity above every finite
number, NaN above infinity. So one unsigned maximum, at the speed of memory, says whether anything
is not finite, and how many powers of two were left. Counting what it is comes after, where it
matters. Knows addresses and element types, no tensors and no rules about what is allowed.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.numerics import kernel


class Pattern(NamedTuple):
    """What the bits of one float format mean; complex types are two reals of one.

    Attributes:
        name: The element type, as in `dtypes`.
        bits: Of one real.
        reals: Reals in an element.
        normal: Magnitude pattern of the smallest normal number.
        top: Of the largest finite one.
        infinity: Of infinity; 0 where the format has none.
        odd_nan: The pattern of minus zero is the only NaN.
        mantissa: Bits of the mantissa.
        largest: The largest finite value.
    """

    name: str
    bits: int
    reals: int
    normal: int
    top: int
    infinity: int
    odd_nan: bool
    mantissa: int
    largest: float

    @property
    def mask(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def narrow(self) -> bool:
        """Whether a large activation can reach the top: 16 bits and less."""
        return self.bits <= 16

    def value(self, magnitude: int) -> float:
        """The number a magnitude pattern stands for."""
        if magnitude > self.top:
            return math.inf if magnitude == self.infinity else math.nan
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        # The top of every format is known as a value, so the bias follows from it.
        bias = (self.top >> self.mantissa) - math.frexp(self.largest)[1] + 1
        if exponent == 0:
            return math.ldexp(fraction, 1 - bias - self.mantissa)
        return math.ldexp((1 << self.mantissa) + fraction, exponent - bias - self.mantissa)

    def headroom(self, magnitude: int) -> float:
        """Powers of two between a magnitude and the format's largest value; 0 at the top.

        >>> round(PATTERNS["float16"].headroom(0x7800), 3)  # 32768 of 65504
        0.999
        """
        if magnitude > self.top:
            return 0.0
        value = self.value(magnitude)
        return math.log2(self.largest) - math.log2(value) if value else math.inf


class Tally(NamedTuple):
    """How many of each special value; the rest are ordinary numbers."""

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


def _ieee(name: str, bits: int, mantissa: int, largest: float, reals: int = 1) -> Pattern:
    infinity = (1 << (bits - 1)) - (1 << mantissa)
    return Pattern(
        name, bits, reals, 1 << mantissa, infinity - 1, infinity, False, mantissa, largest
    )


_F16 = 65504.0
_BF16 = (2 - 2**-7) * 2.0**127
_F32 = (2 - 2**-23) * 2.0**127
_F64 = (2 - 2**-52) * 2.0**1023

PATTERNS: dict[str, Pattern] = {
    p.name: p
    for p in (
        _ieee("float64", 64, 52, _F64),
        _ieee("float32", 32, 23, _F32),
        _ieee("float16", 16, 10, _F16),
        _ieee("bfloat16", 16, 7, _BF16),
        _ieee("float8_e5m2", 8, 2, 57344.0),
        Pattern("float8_e4m3fn", 8, 1, 8, 0x7E, 0, False, 3, 448.0),
        Pattern("float8_e4m3fnuz", 8, 1, 8, 0x7F, 0, True, 3, 240.0),
        Pattern("float8_e5m2fnuz", 8, 1, 4, 0x7F, 0, True, 2, 57344.0),
        _ieee("complex128", 64, 52, _F64, 2),
        _ieee("complex64", 32, 23, _F32, 2),
        _ieee("complex32", 16, 10, _F16, 2),
    )
}
"""Formats that have something beyond the finite; scales and packed formats have not."""

_PATTERN = struct.Struct("=6Q")
_TALLY = struct.Struct("=7q")
_TallyBuffer = ctypes.c_char * _TALLY.size


@functools.cache
def _doors() -> tuple[Any, Any, int] | None:
    """The two functions of the C kernel and the path to take; None: do it in numpy."""
    library, path = kernel.chosen(None)
    if library is None:
        return None
    try:
        # Objects of our own: another door may have declared these functions differently.
        peak = cast("Any", library)["driftline_peak"]
        tally = cast("Any", library)["driftline_tally"]
    except AttributeError:  # a library built before there were any
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
        address: Memory the caller vouches for.
        count: Elements of it, one after the other.
        pattern: Their format.
    """
    doors = _doors()
    if doors is None:
        return _peak_in_numpy(_raw(address, count, pattern), pattern)
    peak, _, path = doors
    return peak(address, pattern.bits, count * pattern.reals, pattern.mask, pattern.odd_nan, path)


def tally_at(address: int, count: int, pattern: Pattern) -> Tally:
    """How many special values of each kind; complex elements are two reals each."""
    doors = _doors()
    if doors is None:
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
    doors[1](address, pattern.bits, count * pattern.reals, shape, out)
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
