"""How far an operator may lie from its golden values: for each element type a bound and a share.

| output | bound of an element | share that must be within |
|---|---|---|
| float64, complex128 | 1e-8 of the golden value | 99.99 % |
| float32, complex64 | 1e-4 | 99.99 % |
| float16, complex32 | 1e-3 | 99.9 % |
| bfloat16 | 8e-3 | 99.6 % |
| float8, float4 | one step of the format (2 units of roundoff) | 99 % |
| int8, int16, uint16, int4, uint4 | ±1, absolute | 99.9 % |
| uint8 | ±1, absolute | 99 % |
| bool, int32, int64, uint32, uint64 | equal | 100 % |
| anything an operator only moves or selects (`exact`) | equal | 100 % |

Bounds of floating types are a little more than one step of the format, because golden values are
rounded to it and a second rounding inside an operator is no fault. Shares are met with >=. An
element below the smallest normal number of its format may be off by one subnormal step.

A result of a reduction over K terms has a second, growing bound: rounding errors of a sum of K
terms of random sign grow like sqrt(K) times the size of the terms, so an element may be off by
`sqrt(K) * unit roundoff * scale` beyond the first bound; `scale` is the root of the sum of the
squared terms (the size that the sum of terms of random sign would have). The plain bound is tried
first; `name` says which one decided. Functions that add a few terms (gelu, layer norm, rotary
embedding) have a small K: there digits are lost where the terms cancel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from driftline.numerics.dtypes import DTYPES


class Allowed(NamedTuple):
    """The bound of an element type.

    Attributes:
        dtype: Name of the element type.
        error: Largest error of an element.
        share: Percent of the elements that must be within.
        relative: The error is relative to the golden value.
        name: As printed.
        floor: Below this size of the golden value, the error is relative to it instead.
    """

    dtype: str
    error: float
    share: float
    relative: bool
    name: str
    floor: float = 0.0

    def grown(self, terms: int) -> str:
        """The name of the bound that grows with the number of terms of a sum."""
        return f"{self.name}, K={terms}"

    def growth(self, terms: int) -> float:
        """What a reduction of so many terms may add, in units of the size of its terms."""
        if terms <= 1 or not self.relative:
            return 0.0
        return math.sqrt(terms) * DTYPES[self.dtype].unit_roundoff

    @property
    def words(self) -> str:
        """For people: `float16 0.001 (99.9 %)`.

        >>> allowed("float16").words, allowed("int8").words, allowed("bool").words
        ('float16 0.001 (99.9 %)', 'int8 ±1 (99.9 %)', 'exact (100 %)')
        """
        size = f" {self.error:g}" if self.relative else ""
        return f"{self.name}{size} ({self.share:g} %)"

    @property
    def standard(self) -> str:
        """As the seed's csv writes it: `99.9%(error<=0.001)`."""
        return f"{self.share:g}%(error<={self.error:g})"


_RELATIVE = {
    "float64": (1e-8, 99.99),
    "complex128": (1e-8, 99.99),
    "float32": (1e-4, 99.99),
    "complex64": (1e-4, 99.99),
    "float16": (1e-3, 99.9),
    "complex32": (1e-3, 99.9),
    "bfloat16": (8e-3, 99.6),
}
_ABSOLUTE = {
    "int8": 99.9,
    "int16": 99.9,
    "uint16": 99.9,
    "int4": 99.9,
    "uint4": 99.9,
    "uint8": 99.0,
}
_SMALLEST_NORMAL = {
    "float64": 2.0**-1022,
    "complex128": 2.0**-1022,
    "float16": 2.0**-14,
    "complex32": 2.0**-14,
    "float8_e4m3fn": 2.0**-6,
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e5m2": 2.0**-14,
    "float8_e5m2fnuz": 2.0**-15,
    "float8_e8m0fnu": 2.0**-127,
    "float4_e2m1fn_x2": 1.0,
}
_USUAL_NORMAL = 2.0**-126
"""Of float32, bfloat16 and complex64."""


def allowed(dtype: str, *, exact: bool = False) -> Allowed:
    """The bound of an output.

    Args:
        dtype: Its element type, a name of `numerics.dtypes.DTYPES`.
        exact: The operator only moves, selects or compares: its result has no rounding.

    Raises:
        KeyError: There is no such element type.
    """
    kind = DTYPES[dtype]
    if exact:
        return Allowed(dtype, 0.0, 100.0, False, "exact")
    if kind.is_floating:
        error, share = _RELATIVE.get(dtype, (2 * kind.unit_roundoff, 99.0))
        floor = _SMALLEST_NORMAL.get(dtype, _USUAL_NORMAL)
        return Allowed(dtype, error, share, True, dtype, floor)
    if dtype in _ABSOLUTE:
        return Allowed(dtype, 1.0, _ABSOLUTE[dtype], False, f"{dtype} ±1")
    return Allowed(dtype, 0.0, 100.0, False, "exact")
