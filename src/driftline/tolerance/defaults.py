"""How much is allowed when nobody says: one limit of relative L2 per number format.

A number format explains a certain drift and no more. Measured on fault-free random-init Llamas of 8
layers (hidden 64 and 256, 16 to 512 tokens, every module's inputs and outputs): bfloat16 against
float32 stays below 0.015 in the layers and 0.027 in the rotary tables, float16 below 0.0024 and
0.015. The limits leave room for models several times as deep, because drift grows with the root of
the depth; a swapped activation (0.07 and more), 16 zeroed channels (0.19 and more) and a doubled
scale (1.0) are outside. docs/metrics.md shows the table.
"""

from __future__ import annotations

import functools
import math

from driftline.numerics.dtypes import DTYPES, DType, coarser

METRIC = "relative_l2"
"""The metric of the default limits: scale-free, and not thrown by a single rounded element."""

LIMITS: dict[str, float] = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 0.02,
    "complex32": 0.02,
    "bfloat16": 0.05,
    # One rounding to an 8-bit float is 0.03 (e4m3) or 0.05 (e5m2) already.
    "float8_e4m3fn": 0.25,
    "float8_e4m3fnuz": 0.25,
    "float8_e5m2": 0.4,
    "float8_e5m2fnuz": 0.4,
    "float8_e8m0fnu": 0.5,
    "float4_e2m1fn_x2": 0.5,
}

QUANTISED: dict[str, float] = {
    "int8": 0.05,
    "uint8": 0.05,
    "int32": 0.05,
    "int4": 0.3,
    "uint4": 0.3,
}
"""Limits of values that were integers with a scale, by the integer's type.

Rounding a Gaussian to 255 steps of one scale per row (4096 elements, so 3.7 standard deviations) is
0.008; one scale for a whole matrix 0.012, with an outlier of 20 deviations 0.045. To 15 steps in
groups of 128 elements: 0.11, one scale per row 0.15. Measured on W8A8 twins of whole decoders:
0.032 at most; docs/metrics.md has the table.
"""

_ATOL = 1e-5
_RTOL = {"float64": 1e-7, "complex128": 1e-7, "float32": 1.3e-6, "complex64": 1.3e-6}


@functools.cache
def elementwise(reference: str, candidate: str) -> tuple[float, float]:
    """The rtol and atol behind `outside_share` when nobody says: those of the coarser dtype.

    The values are the ones `torch.testing.assert_close` has made familiar, four units of roundoff
    for the formats it leaves out. Integers are exact. No verdict hangs on them.

    >>> elementwise("float32", "bfloat16")
    (0.016, 1e-05)
    """
    dtype = coarsest((reference, candidate))
    if dtype is None:
        return 0.0, 0.0
    familiar = {**_RTOL, "float16": 1e-3, "complex32": 1e-3, "bfloat16": 1.6e-2}
    return familiar.get(dtype.name, 4 * dtype.unit_roundoff), _ATOL


def with_smallest_steps(dtype: DType, count: int, reference_l2: float) -> float:
    """The limit of a tensor so small that its format counts in fixed, not relative, steps.

    Below its smallest normal number a format has a fixed step (6e-8 for float16, where gradients
    often are), and rounding to it is a larger share the smaller the values are. Two steps per
    element, in the mean square, are allowed on top of the usual limit.

    >>> f"{with_smallest_steps(DTYPES['float16'], 100, 1e-5):.2f}"
    '0.14'
    """
    real = DTYPES[dtype.component]
    step = math.ldexp(1.0, real.smallest_normal_exponent - real.mantissa)
    return LIMITS[dtype.name] + 2.0 * step * math.sqrt(count) / reference_l2


@functools.lru_cache(1024)
def coarsest(names: tuple[str, ...]) -> DType | None:
    """The coarsest floating format among these names; None when there is none.

    >>> coarsest(("float32", "int64", "bfloat16")).name
    'bfloat16'
    """
    found: DType | None = None
    for name in names:
        dtype = DTYPES.get(name)
        if dtype is not None and dtype.is_floating:
            found = dtype if found is None else coarser(found, dtype)
    return found


@functools.lru_cache(1024)
def is_exact(name: str) -> bool:
    """Whether values of this format are compared exactly: integers and booleans."""
    dtype = DTYPES.get(name)
    return dtype is not None and not dtype.is_floating
