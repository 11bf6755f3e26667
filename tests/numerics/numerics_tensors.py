"""Tensors of every type with the values that break kernels, and what "equal" means for moments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES, DType, value_table
from driftline.numerics.fields import PAIR_FIELDS, PairMoments, Summary

Bytes = npt.NDArray[np.uint8]
SPECIALS = (
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-45,
    -1e-40,
    6e-8,
    1e-22,
    1.0,
    -1.0,
    65504.0,
    3e38,
)


def _coded(values: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[Any]:
    """The nearest storage values, good enough for making data."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            bits = values.astype(np.float32).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
        if dtype.kind == "float" and dtype.bits <= 8:
            table = value_table(dtype.name)
            usable = np.where(np.isfinite(table), table, np.inf)
            clean = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30)
            codes = np.argmin(np.abs(usable[None, :] - clean[:, None]), axis=1).astype(np.uint8)
            nans = np.flatnonzero(np.isnan(table))
            return (
                np.where(np.isnan(values), nans[0], codes).astype(np.uint8) if nans.size else codes
            )
        if dtype.kind in ("int", "uint", "bool"):
            clean = np.nan_to_num(values, nan=3.0, posinf=100.0, neginf=-100.0)
            if dtype.bits == 4:
                return (np.rint(clean).astype(np.int64) & 15).astype(np.uint8)
            if dtype.kind == "bool":
                return clean > 0
            return np.rint(clean * 20).astype(np.int64).astype(dtype.storage)
        return values.astype(dtype.storage)


def encode(values: npt.NDArray[np.float64], dtype: DType) -> Bytes:
    """Raw bytes of these values in that type; a complex type takes two values per element."""
    if dtype.kind == "complex":
        return encode(values, DTYPES[dtype.component])
    coded = _coded(np.asarray(values, np.float64), dtype)
    if dtype.bits == 4:
        padded = np.concatenate([coded, np.zeros(coded.size % 2, np.uint8)])
        return (padded[0::2] | (padded[1::2] << 4)).astype(np.uint8)
    return np.ascontiguousarray(coded).view(np.uint8)


def misaligned(data: Bytes, offset: int) -> Bytes:
    """The same bytes at an address `offset` past a multiple of 64, with poison on both sides."""
    room = np.full(data.size + 192, 0xFF, np.uint8)
    start = (-room.ctypes.data) % 64 + offset
    room[start : start + data.size] = data
    return room[start : start + data.size]


def noisy_pair(
    rng: np.random.Generator,
    count: int,
    r: DType,
    c: DType,
    *,
    scale: float = 1.0,
    noise: float = 1e-2,
) -> tuple[Bytes, Bytes]:
    """A reference and a candidate that is the reference with noise."""
    reals = count * (2 if "complex" in (r.kind, c.kind) else 1)
    values = rng.standard_normal(reals) * scale
    other = values * (1 + noise * rng.standard_normal(reals))
    sides: list[Bytes] = []
    for dtype, side in ((r, values), (c, other)):
        real_against_complex = dtype.kind != "complex" and reals != count
        sides.append(encode(side[::2] if real_against_complex else side, dtype))
    return sides[0], sides[1]


# The bounds that docs/metrics.md promises are 1e-9; float64 sums of these sizes keep more.
SUMS = 1e-12
STD = 1e-10


def assert_same_moments(got: PairMoments, want: PairMoments) -> None:
    """Counts, positions and extremes exactly; sums to 1e-12 of the sum of their terms' magnitudes.

    A mean and the sum of products can cancel: they are held to their terms. A standard deviation is
    held to itself, and to what float64 leaves of values that are all but equal.
    """
    terms = {
        "sum_rc": math.sqrt(want.sum_rr) * math.sqrt(want.sum_cc),
        "r_mean": want.r_l2 / math.sqrt(max(want.r_finite, 1)),
        "c_mean": want.c_l2 / math.sqrt(max(want.c_finite, 1)),
    }
    largest = {"r_std": _largest(want.r_min, want.r_max), "c_std": _largest(want.c_min, want.c_max)}
    for field in PAIR_FIELDS:
        name = field.name
        a, b = getattr(got, name), getattr(want, name)
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        exact = field.type is int or name.endswith(("_min", "_max")) or name.startswith("max_")
        assert not exact and math.isfinite(b), (name, a, b)
        if name in largest:
            assert math.isclose(a, b, rel_tol=STD, abs_tol=1e-13 * largest[name]), (name, a, b)
        else:
            assert abs(a - b) <= SUMS * terms.get(name, abs(b)), (name, a, b)


def _largest(low: float, high: float) -> float:
    return 0.0 if math.isnan(low) else max(abs(low), abs(high))


def assert_same_summary(got: Summary, want: Summary) -> None:
    for name in Summary._fields:
        a, b = getattr(got, name), getattr(want, name)
        if name == "sketch":
            assert len(a) == len(b)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(want.l2, 1e-300))
        elif isinstance(b, int) or math.isnan(b) or math.isinf(b):
            assert a == b or (math.isnan(a) and math.isnan(b)), (name, a, b)
        elif name == "std":
            floor = 1e-13 * _largest(want.min, want.max)
            assert math.isclose(a, b, rel_tol=STD, abs_tol=floor), (a, b)
        elif name == "mean":
            assert abs(a - b) <= SUMS * want.l2 / math.sqrt(max(want.count, 1)), (a, b)
        else:
            assert math.isclose(a, b, rel_tol=1e-12, abs_tol=0.0), (name, a, b)
