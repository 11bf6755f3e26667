"""Statistics of tensor errors: sampled reading of rows, and size, bias and place of an error.

A row is a token (all axes except the last are tokens, heads or sequences). An even sample of rows
of a large tensor is read, so that memory stays bounded. An `Effect` gives the error relative to the
reference, with standard errors clustered by row. This file knows no sites or verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

F64 = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

# About two megabytes as float64: enough rows for stable standard errors, and small enough for
# hundreds of tensors.
ELEMENTS = 1 << 18
"""Largest number of elements of one tensor that are decoded."""
_LARGEST = 1e140
"""Numbers up to this size can be summed as squares in float64, up to 10^28 of them."""


def index(run: Run) -> Mapping[TensorKey, Record]:
    """Return all records of a run by key."""
    return {record.key: record for record in run.records}


def is_readable(run: Run, record: Record | None) -> bool:
    """Return whether all values of a floating-point or complex tensor can be read."""
    if record is None or record.kept != "full" or run.lost(record):
        return False
    dtype = DTYPES.get(record.dtype)
    if dtype is None or 0 in record.shape:
        return False
    return dtype.kind == "complex" or (dtype.kind == "float" and dtype.bits >= 8)


def rows_and_channels(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as (rows, channels): the last axis is the channels, all others are rows.

    >>> rows_and_channels((2, 16, 64))
    (32, 64)
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def chosen_rows(shape: tuple[int, ...], elements: int = ELEMENTS) -> Places:
    """Return which rows are read: all of a small tensor, an even sample of a large one."""
    rows, channels = rows_and_channels(shape)
    # At least eight rows, so that both halves of very wide tensors have some.
    most = max(8, elements // max(channels, 1))
    if rows <= most:
        return np.arange(rows, dtype=np.intp)
    # A linspace meets even and odd indices of every axis, so that no regular part is missed.
    return np.unique(np.linspace(0, rows - 1, most).astype(np.intp))


def read_rows(run: Run, record: Record, places: Places) -> F64 | None:
    """Return some rows of a tensor as float64, [rows, channels]; None if it cannot be read.

    A complex number counts as two channels.
    """
    rows, channels = rows_and_channels(record.shape)
    try:
        raw: npt.NDArray[Any] = run.raw(record)
    except (DriftlineError, OSError, ValueError):
        return None
    # The length of a damaged or truncated file may differ from that in its record.
    if raw.size != rows * channels:
        return None
    part = raw.reshape(rows, channels)
    if len(places) != rows:
        part = part[places]
    return _reals(to_float64(part, DTYPES[record.dtype]))


def _reals(values: npt.NDArray[Any]) -> F64:
    """Return numbers as float64; complex ones become pairs along the last axis.

    >>> _reals(np.array([[1 + 2j]]))
    array([[1., 2.]])
    """
    if np.iscomplexobj(values):
        # A cast would drop the imaginary parts, so that conjugate numbers would be equal.
        return np.ascontiguousarray(values, dtype=np.complex128).view(np.float64)
    return np.asarray(values, dtype=np.float64)


def read_whole(run: Run, record: Record | None, elements: int = 16 * ELEMENTS) -> F64 | None:
    """Return a tensor in its own shape as float64; None if it is too large or unreadable.

    Complex numbers become pairs along the last axis, which is then twice as long.
    """
    if record is None or not is_readable(run, record) or math.prod(record.shape) > elements:
        return None
    try:
        raw = run.raw(record)
    except (DriftlineError, OSError, ValueError):
        return None
    return _reals(np.asarray(to_float64(raw, DTYPES[record.dtype])).reshape(record.shape))


def rounded(values: F64, name: str) -> F64:
    """Return values rounded to a float format, to nearest even, as float64.

    >>> float(rounded(np.array([1.0 + 2.0**-8]), "bfloat16")[0])
    1.0
    """
    if name == "float64":
        return values
    if name == "float32":
        return values.astype(np.float32).astype(np.float64)
    if name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float64)
    # numpy has no type for the other formats. Values are rounded to the step of their binade, ties
    # to even.
    mantissa, least = _GRIDS[name]
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(values)
        step = np.ldexp(1.0, np.maximum(exponent - 1, least) - mantissa)
        return np.rint(values / step) * step


_GRIDS = {
    "bfloat16": (7, -126),
    "tf32": (10, -126),
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "float8_e4m3fnuz": (3, -7),
    "float8_e5m2fnuz": (2, -15),
}
"""Stored mantissa bits and smallest exponent of formats for which numpy has no type."""

GRIDS = ("float32", "float16", "tf32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Formats to which a value may have been rounded, finest first."""


# The size of an error, its direction and its place, with standard errors.


class Effect(NamedTuple):
    """An error relative to the reference, over elements that are finite on both sides.

    Attributes:
        rows: Number of rows measured.
        elements: Number of elements measured.
        error: Relative L2, `|e| / |r|`.
        projection: `<e, r> / <r, r>`: a scale fault of 3 % is 0.03.
        projection_se: Standard error of the projection, clustered by row.
        offset: Mean of e over the root mean square of r.
        offset_se: Standard error of the offset, clustered by row.
        worst_row: Largest root mean square of a row of e, over that of all of r.
        nonfinite: Number of elements that are not finite on one side only.
        row_scale: Scatter of the projections of single rows (root mean square). It is large if
            every row is off by its own factor, as after statistics in a coarse format.
    """

    rows: int
    elements: int
    error: float
    projection: float
    projection_se: float
    offset: float
    offset_se: float
    worst_row: float
    nonfinite: int
    row_scale: float = math.nan

    @property
    def z(self) -> float:
        """Projection over its standard error: evidence, but never a verdict."""
        if self.projection == 0.0:
            return 0.0
        if not self.projection_se > 0.0:
            return math.copysign(math.inf, self.projection)
        return self.projection / self.projection_se


NOTHING = Effect(0, 0, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0)


class Sums(NamedTuple):
    """Contributions of each row to an effect; tensors with equally many channels can be joined.

    Attributes:
        rr: Squares of the reference, summed by row.
        er: Error times reference, summed by row.
        ee: Squares of the error, summed by row.
        e: Errors, summed by row.
        channels: Number of elements of a row.
        nonfinite: Number of elements that are not finite on one side only.
    """

    rr: F64
    er: F64
    ee: F64
    e: F64
    channels: int
    nonfinite: int

    def part(self, rows: slice | npt.NDArray[np.bool_]) -> Sums:
        """Return some of the rows."""
        return Sums(
            self.rr[rows],
            self.er[rows],
            self.ee[rows],
            self.e[rows],
            self.channels,
            self.nonfinite,
        )


def sums(reference: F64, candidate: F64) -> Sums:
    """Return the sums of every row, computed in one pass over a pair."""
    one_sided = 0
    # NaN, Inf and masks with float64's lowest value are excluded, because one of them would make
    # all sums useless.
    measured = (np.abs(reference) < _LARGEST) & (np.abs(candidate) < _LARGEST)
    if not measured.all():
        one_sided = int(np.count_nonzero(np.isfinite(reference) != np.isfinite(candidate)))
        reference = np.where(measured, reference, 0.0)
        candidate = np.where(measured, candidate, 0.0)
    e = candidate - reference
    return Sums(
        np.einsum("ij,ij->i", reference, reference),
        np.einsum("ij,ij->i", e, reference),
        np.einsum("ij,ij->i", e, e),
        e.sum(axis=1),
        reference.shape[1],
        one_sided,
    )


def without_worst(row_sums: Sums, share: float) -> Sums:
    """Return the sums without a fraction of the rows, at least one, that have the largest error."""
    count = len(row_sums.ee)
    if count < 4:
        return row_sums
    keep = np.ones(count, dtype=np.bool_)
    keep[np.argsort(row_sums.ee)[-max(1, math.ceil(share * count)) :]] = False
    return row_sums.part(keep)


def joined(parts: Sequence[Sums]) -> Sums:
    """Return the rows of several tensors of the same width together."""
    if len(parts) == 1:
        return parts[0]
    return Sums(
        np.concatenate([part.rr for part in parts]),
        np.concatenate([part.er for part in parts]),
        np.concatenate([part.ee for part in parts]),
        np.concatenate([part.e for part in parts]),
        parts[0].channels,
        sum(part.nonfinite for part in parts),
    )


def effect_of(row_sums: Sums) -> Effect:
    """Return the effect of some rows."""
    rows, channels = len(row_sums.rr), row_sums.channels
    if rows == 0 or channels == 0:
        return NOTHING
    size, energy = float(row_sums.rr.sum()), float(row_sums.ee.sum())
    # A reference of zeros has no scale, so any error is infinite.
    if not size > 0.0:
        error = 0.0 if energy == 0.0 else math.inf
        return NOTHING._replace(
            rows=rows, elements=rows * channels, error=error, nonfinite=row_sums.nonfinite
        )
    # Equal rows (padding, repeated tokens) are not independent evidence; they form one cluster.
    groups = _alike(row_sums.rr)
    projection = float(row_sums.er.sum()) / size
    projection_se = _clustered(row_sums.er - projection * row_sums.rr, groups) / size
    elements = rows * channels
    rms = math.sqrt(size / elements)
    offset = float(row_sums.e.sum()) / elements
    offset_se = _clustered(row_sums.e - offset * channels, groups) / elements
    return Effect(
        rows,
        elements,
        math.sqrt(energy / size),
        projection,
        projection_se,
        offset / rms,
        offset_se / rms,
        math.sqrt(float(row_sums.ee.max()) / channels) / rms,
        row_sums.nonfinite,
        _scatter(row_sums, projection),
    )


def effect(reference: F64, candidate: F64) -> Effect:
    """Return the effect of one pair of arrays.

    >>> r = np.array([[3.0, 4.0], [6.0, 8.0]])
    >>> round(effect(r, 1.5 * r).projection, 12)
    0.5
    """
    return effect_of(sums(reference, candidate))


def halves(row_sums: Sums) -> tuple[Effect, Effect]:
    """Return the effects of the even and of the odd rows: one to suspect, the other to confirm."""
    return effect_of(row_sums.part(slice(0, None, 2))), effect_of(row_sums.part(slice(1, None, 2)))


def _scatter(row_sums: Sums, projection: float) -> float:
    nonzero = row_sums.rr > 0.0
    if not nonzero.any():
        return math.nan
    own = row_sums.er[nonzero] / row_sums.rr[nonzero] - projection
    return math.sqrt(float(own @ own) / len(own))


def _alike(rr: F64) -> npt.NDArray[np.intp] | None:
    """Return clusters of equal rows, recognised by their norm; None if all rows differ."""
    unique, groups = np.unique(rr, return_inverse=True)
    return None if len(unique) == len(rr) else groups


def _clustered(residuals: F64, groups: npt.NDArray[np.intp] | None) -> float:
    """Return the standard error of a sum over clusters, from the residual of each cluster."""
    if groups is not None:
        residuals = np.asarray(np.bincount(groups, weights=residuals), dtype=np.float64)
    count = len(residuals)
    # A single cluster says nothing about its scatter.
    if count < 2:
        return math.inf
    return math.sqrt(float(residuals @ residuals) * count / (count - 1))
