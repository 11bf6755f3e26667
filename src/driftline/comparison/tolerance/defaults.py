"""Default limits: how much relative L2 error each number format explains.

This file also defines the element-wise tolerances behind `outside_share`, and the bounds for single
operators of a format. Limits that replace the defaults are in `tolerance`.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

from driftline.numerics.dtypes import DTYPES, DType, coarser


class Allowed(NamedTuple):
    """The bound of an element type.

    Attributes:
        dtype: Name of the element type.
        error: Largest error of an element.
        share: Percentage of the elements that must be within.
        relative: Whether the error is relative to the golden value.
        name: The name to print.
        floor: If the golden value is smaller than this, the error is relative to this instead.
    """

    dtype: str
    error: float
    share: float
    relative: bool
    name: str
    floor: float = 0.0

    def grown(self, terms: int) -> str:
        """Return the name of the bound that grows with the number of terms of a sum."""
        return f"{self.name}, K={terms}"

    def growth(self, terms: int) -> float:
        """Return the error that a sum of so many terms may add, relative to the terms' size."""
        if terms <= 1 or not self.relative:
            return 0.0
        return math.sqrt(terms) * DTYPES[self.dtype].unit_roundoff

    @property
    def words(self) -> str:
        """The bound as text: `float16 0.001 (99.9 %)`.

        >>> allowed("float16").words, allowed("int8").words, allowed("bool").words
        ('float16 0.001 (99.9 %)', 'int8 ±1 (99.9 %)', 'exact (100 %)')
        """
        size = f" {self.error:g}" if self.relative else ""
        return f"{self.name}{size} ({self.share:g} %)"

    @property
    def standard(self) -> str:
        """The bound as the seed's csv writes it: `99.9%(error<=0.001)`."""
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
"""Smallest normal number of float32, bfloat16 and complex64."""


def allowed(dtype: str, *, exact: bool = False) -> Allowed:
    """Return the bound of an output.

    Args:
        dtype: Its element type, a name of `numerics.dtypes.DTYPES`.
        exact: Whether the operator only moves, selects or compares, so that its result has no
            rounding error.

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


# Default limits: one of relative L2 per number format.


METRIC = "relative_l2"
"""Metric of the default limits: scale-free, and insensitive to a single rounded element."""

LIMITS: dict[str, float] = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 0.02,
    "complex32": 0.02,
    "bfloat16": 0.05,
    # A single rounding to an 8-bit float already gives 0.03 (e4m3) or 0.05 (e5m2).
    "float8_e4m3fn": 0.25,
    "float8_e4m3fnuz": 0.25,
    "float8_e5m2": 0.4,
    "float8_e5m2fnuz": 0.4,
    "float8_e8m0fnu": 0.5,
    "float4_e2m1fn_x2": 0.5,
}

ROUNDINGS = 4.0
"""Multiple of the average rounding error to the steps of a scale that a site may add. It is above 1
because values larger than any in the calibration are clipped; how much above is an allowance, not a
measurement."""


def float_rounding(dtype: DType) -> float:
    """Return the relative error of rounding to a float format, where every element is at its worst.

    Normal numbers in `float8_e4m3fn` have 0.026 of the 0.036 that this gives.

    >>> f"{float_rounding(DTYPES['float8_e4m3fn']):.3f}"
    '0.036'
    """
    return dtype.unit_roundoff / math.sqrt(3.0)


QUANTISED: dict[str, float] = {
    "int8": 0.05,
    "uint8": 0.05,
    "int32": 0.05,
    "int16": 0.001,
    "uint16": 0.001,
    "int4": 0.3,
    "uint4": 0.3,
    **{
        name: ROUNDINGS * float_rounding(DTYPES[name])
        for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    },
}
"""Limits of values that were codes with a scale, by the type of the code.

Rounding a Gaussian to 255 steps with one scale per row (4096 elements, so 3.7 standard deviations)
gives an error of 0.008. One scale for a whole matrix gives 0.012, and 0.045 with an outlier of 20
deviations. Rounding to 15 steps gives 0.11 in groups of 128 elements, and 0.15 with one scale per
row. Measured on W8A8 versions of whole decoders: 0.032 at most; docs/metrics.md has the table.
"""

WEIGHT_ROUNDINGS = 2.5
"""The same multiple for a weight. Rounding to the nearest step gives 1. Methods that move weights
to compensate for the rounding of others (GPTQ) give more, which was not measured. A zero point that
is off by one gives 3.6."""
_STEP = re.compile(r"dequantise\(axis \d+, times ([-+.0-9e]+)")
_SINGLE = re.compile(r" of (\d+(x\d+)*|scalar)$")


def step_of(recipe: str) -> float:
    """Return the step of integers that a recipe converts with a single scale; 0 without one.

    With several sources the number multiplies a tensor of scales, so it is not a step.

    >>> step_of("dequantise(axis 0, times 0.02, minus 3) of 2x8")
    0.02
    >>> step_of("dequantise(axis 0, times 40.4) of 1, 2")
    0.0
    """
    match = _STEP.search(recipe)
    return abs(float(match[1])) if match and _SINGLE.search(recipe) else 0.0


def rounding_to_steps(step: float, count: int, reference_l2: float) -> float:
    """Return the relative error of a tensor that was only rounded to multiples of a step.

    >>> f"{rounding_to_steps(0.02, 10_000, 100.0):.4f}"  # normal numbers
    '0.0058'
    """
    return step * math.sqrt(count / 12.0) / reference_l2 if reference_l2 > 0.0 else 0.0


_ATOL = 1e-5
_RTOL = {"float64": 1e-7, "complex128": 1e-7, "float32": 1.3e-6, "complex64": 1.3e-6}


@functools.cache
def elementwise(reference: str, candidate: str) -> tuple[float, float]:
    """Return the default rtol and atol behind `outside_share`: those of the coarser dtype.

    The values are those of `torch.testing.assert_close`, and four units of roundoff for formats
    that it does not list. Integers are exact. No verdict depends on these values.

    >>> elementwise("float32", "bfloat16")
    (0.016, 1e-05)
    """
    dtype = coarsest((reference, candidate))
    if dtype is None:
        return 0.0, 0.0
    familiar = {**_RTOL, "float16": 1e-3, "complex32": 1e-3, "bfloat16": 1.6e-2}
    return familiar.get(dtype.name, 4 * dtype.unit_roundoff), _ATOL


def with_smallest_steps(dtype: DType, count: int, reference_l2: float) -> float:
    """Return the limit of a tensor so small that its format has fixed, not relative, steps.

    Below its smallest normal number, a format has a fixed step (6e-8 for float16, where gradients
    often are). The smaller the values are, the larger is the relative rounding error. Two steps per
    element, in the root mean square, are allowed on top of the usual limit.

    >>> f"{with_smallest_steps(DTYPES['float16'], 100, 1e-5):.2f}"
    '0.14'
    """
    real = DTYPES[dtype.component]
    step = math.ldexp(1.0, real.smallest_normal_exponent - real.mantissa)
    return LIMITS[dtype.name] + 2.0 * step * math.sqrt(count) / reference_l2


@functools.lru_cache(1024)
def coarsest(names: tuple[str, ...]) -> DType | None:
    """Return the coarsest floating format among these names; None if there is none.

    >>> coarsest(("float32", "int64", "bfloat16")).name
    'bfloat16'
    """
    coarse: DType | None = None
    for name in names:
        dtype = DTYPES.get(name)
        if dtype is not None and dtype.is_floating:
            coarse = dtype if coarse is None else coarser(coarse, dtype)
    return coarse


@functools.lru_cache(1024)
def is_exact(name: str) -> bool:
    """Whether values of this format are compared exactly: all except floating-point formats."""
    dtype = DTYPES.get(name)
    return dtype is not None and not dtype.is_floating
