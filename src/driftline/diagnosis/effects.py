"""How large an error is, which way it leans and where it sits; sizes, with their standard errors.

Every function takes two arrays [rows, channels], reference first. A row is a token; elements of one
row depend on each other, so standard errors are those of sums over rows, and rows that repeat (a
token that occurs twice has one embedding) count as one. Nothing here says what is too much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


class Effect(NamedTuple):
    """An error in units of the reference, over elements that are finite on both sides.

    Attributes:
        rows: Rows it was measured on.
        elements: Elements it was measured on.
        error: Relative L2, `|e| / |r|`.
        projection: `<e, r> / <r, r>`: a scale fault of 3 % is 0.03.
        projection_se: Standard error of that, clustered by row.
        offset: Mean of e over the root mean square of r.
        offset_se: Standard error of that, clustered by row.
        worst_row: Largest root mean square of a row of e over that of all of r.
        nonfinite: Elements that are not finite on one side only.
        row_scale: How much projections of single rows scatter (root mean square): rows that are
            each off by a factor of their own, as behind statistics in a coarse format.
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
        """Projection over its standard error: evidence, never a verdict."""
        if self.projection == 0.0:
            return 0.0
        if not self.projection_se > 0.0:
            return math.copysign(math.inf, self.projection)
        return self.projection / self.projection_se


NOTHING = Effect(0, 0, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0)


class Sums(NamedTuple):
    """What each row adds to an effect; several tensors with as many channels may be joined.

    Attributes:
        rr: Squares of the reference.
        er: Error times reference.
        ee: Squares of the error.
        e: Errors.
        channels: Elements of a row.
        nonfinite: Elements that are not finite on one side only.
    """

    rr: F64
    er: F64
    ee: F64
    e: F64
    channels: int
    nonfinite: int

    def part(self, rows: slice | npt.NDArray[np.bool_]) -> Sums:
        """Some of the rows."""
        return Sums(
            self.rr[rows],
            self.er[rows],
            self.ee[rows],
            self.e[rows],
            self.channels,
            self.nonfinite,
        )


def sums(reference: F64, candidate: F64) -> Sums:
    """One pass over a pair."""
    finite_r, finite_c = np.isfinite(reference), np.isfinite(candidate)
    one_sided = int(np.count_nonzero(finite_r != finite_c))
    both = finite_r & finite_c
    if not both.all():
        reference = np.where(both, reference, 0.0)
        candidate = np.where(both, candidate, 0.0)
    e = candidate - reference
    return Sums(
        np.einsum("ij,ij->i", reference, reference),
        np.einsum("ij,ij->i", e, reference),
        np.einsum("ij,ij->i", e, e),
        e.sum(axis=1),
        reference.shape[1],
        one_sided,
    )


def without_worst(found: Sums, share: float) -> Sums:
    """Without the rows that err most: a share of them, at least one."""
    count = len(found.ee)
    if count < 4:
        return found
    keep = np.ones(count, dtype=np.bool_)
    keep[np.argsort(found.ee)[-max(1, math.ceil(share * count)) :]] = False
    return found.part(keep)


def joined(parts: Sequence[Sums]) -> Sums:
    """The rows of several tensors of one width together."""
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


def effect_of(found: Sums) -> Effect:
    """The effect of some rows."""
    rows, channels = len(found.rr), found.channels
    if rows == 0 or channels == 0:
        return NOTHING
    size, energy = float(found.rr.sum()), float(found.ee.sum())
    if not size > 0.0:
        error = 0.0 if energy == 0.0 else math.inf
        return NOTHING._replace(
            rows=rows, elements=rows * channels, error=error, nonfinite=found.nonfinite
        )
    groups = _alike(found.rr)
    projection = float(found.er.sum()) / size
    projection_se = _clustered(found.er - projection * found.rr, groups) / size
    elements = rows * channels
    rms = math.sqrt(size / elements)
    offset = float(found.e.sum()) / elements
    offset_se = _clustered(found.e - offset * channels, groups) / elements
    return Effect(
        rows,
        elements,
        math.sqrt(energy / size),
        projection,
        projection_se,
        offset / rms,
        offset_se / rms,
        math.sqrt(float(found.ee.max()) / channels) / rms,
        found.nonfinite,
        _scatter(found, projection),
    )


def effect(reference: F64, candidate: F64) -> Effect:
    """All of it, of one pair of arrays.

    >>> r = np.array([[3.0, 4.0], [6.0, 8.0]])
    >>> round(effect(r, 1.5 * r).projection, 12)
    0.5
    """
    return effect_of(sums(reference, candidate))


def halves(found: Sums) -> tuple[Effect, Effect]:
    """The same on every second row, and on the others: one to screen, one to confirm."""
    return effect_of(found.part(slice(0, None, 2))), effect_of(found.part(slice(1, None, 2)))


def _scatter(found: Sums, projection: float) -> float:
    there = found.rr > 0.0
    if not there.any():
        return math.nan
    own = found.er[there] / found.rr[there] - projection
    return math.sqrt(float(own @ own) / len(own))


def _alike(rr: F64) -> npt.NDArray[np.intp] | None:
    """Which rows are the same one again, by their norm; None when all differ."""
    unique, groups = np.unique(rr, return_inverse=True)
    return None if len(unique) == len(rr) else groups


def _clustered(residuals: F64, groups: npt.NDArray[np.intp] | None) -> float:
    """Standard deviation of a sum over clusters, from what each cluster is off by."""
    if groups is not None:
        residuals = np.asarray(np.bincount(groups, weights=residuals), dtype=np.float64)
    count = len(residuals)
    if count < 2:
        return math.inf
    return math.sqrt(float(residuals @ residuals) * count / (count - 1))
