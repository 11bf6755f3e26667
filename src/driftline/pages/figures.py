"""Two tensors in a few figures: of each side, and of the error between them.

Also says how much of a region was looked at; every picture is made from the same even sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.metrics import derivation
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments, merge_moments
from driftline.pages.opened import BUDGET, OpenedPair, Piece, Region

_BANDS = 256
"""A sample is taken from so many parts of a region's rows, and of its columns."""


class Extent(NamedTuple):
    """How much of a region was looked at.

    Attributes:
        region: The region.
        elements: How many elements it has.
        seen: How many of them were looked at.
    """

    region: Region
    elements: int
    seen: int

    @property
    def note(self) -> str:
        """What a reader must know of a sample; empty when everything was looked at."""
        if self.seen >= self.elements:
            return ""
        share = 100.0 * self.seen / self.elements
        return f"from an even sample of {self.seen:,} of {self.elements:,} elements ({share:.2g} %)"


class SideFigures(NamedTuple):
    """One side's own values. Extremes and moments are over its finite ones."""

    min: float
    max: float
    mean: float
    std: float
    nan: int
    inf: int
    minus_inf: int

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("min", "max", "mean", "std", "nan", "inf")},
            "-inf": self.minus_inf,
        }


class Statistics(NamedTuple):
    """Both sides of a region and the error between them, in a few figures.

    Attributes:
        extent: How much was looked at.
        reference: One side by itself.
        candidate: The other.
        error: Figures of the error by the names of the catalogue of metrics, over elements that
            are finite on both sides.
        different: Elements whose values differ.
        one_sided: Elements that are not finite on one side, or differently on the two.
    """

    extent: Extent
    reference: SideFigures
    candidate: SideFigures
    error: dict[str, float]
    different: int
    one_sided: int

    def as_json(self) -> dict[str, Any]:
        return {
            "elements": self.extent.elements,
            "seen": self.extent.seen,
            "reference": self.reference.as_json(),
            "candidate": self.candidate.as_json(),
            "error": self.error,
            "different": self.different,
            "one_sided": self.one_sided,
        }


def statistics(
    pair: OpenedPair, region: Region | None = None, *, budget: int = BUDGET
) -> Statistics:
    """Figures of a region; of the whole tensor when none is given."""
    inside = pair.clipped(region)
    extent = extent_of(pair, inside, budget)
    moments = moments_of(pair, inside, budget)
    if moments is None:
        nothing = SideFigures(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
        return Statistics(extent, nothing, nothing, {}, 0, 0)
    return Statistics(
        extent,
        _figures("r", moments),
        _figures("c", moments),
        _error_figures(moments),
        moments.different,
        moments.one_sided,
    )


def pieces(pair: OpenedPair, region: Region, budget: int) -> Iterator[Piece]:
    """A region window after window, or the sample of it that every figure is made from."""
    return pair.pieces(region, bands=_BANDS, cells=_BANDS, budget=budget)


def extent_of(pair: OpenedPair, region: Region, budget: int) -> Extent:
    """How much of a region that is."""
    seen = pair.looked_at(region, bands=_BANDS, cells=_BANDS, budget=budget)
    return Extent(region, region.elements, seen)


def moments_of(pair: OpenedPair, region: Region, budget: int) -> PairMoments | None:
    """What one pass over it knows; None of nothing."""
    double = DTYPES["float64"]
    parts: list[PairMoments] = []
    for piece in pieces(pair, region, budget):
        window = piece.window
        ours, theirs = (
            np.ascontiguousarray(side).reshape(-1) for side in (window.reference, window.candidate)
        )
        part = kernel.pair_moments(ours, double, theirs, double, count=ours.size)
        if pair.are_wide_integers:  # which float64 may call equal
            size = np.abs(window.error)
            part = part._replace(
                different=int(np.count_nonzero(size)),
                max_abs_e=float(size.max()),
                sum_abs_e=float(size.sum()),
                sum_ee=float((size * size).sum()),
            )
        parts.append(part)
    return merge_moments(parts) if parts else None


def _figures(side: str, m: PairMoments) -> SideFigures:
    names = ("min", "max", "mean", "std")
    least, most, mean, std = (getattr(m, f"{side}_{name}") for name in names)
    return SideFigures(least, most, mean, std, *odd_of(side, m))


def odd_of(side: str, m: PairMoments | None) -> tuple[int, int, int]:
    """NaN, +inf and -inf of a side, `r` or `c`."""
    if m is None:
        return (0, 0, 0)
    nan, inf, minus = (getattr(m, f"{side}_{name}") for name in ("nan", "pos_inf", "neg_inf"))
    return (nan, inf, minus)


def _error_figures(m: PairMoments) -> dict[str, float]:
    found = {
        "max_abs_error": derivation.max_abs_error(m),
        "mean_abs_error": derivation.mean_abs_error(m),
        "max_rel_error": derivation.max_rel_error(m),
    }
    if not derivation.needs_definition(m):  # squares beyond float64 say nothing
        found |= {
            "rmse": derivation.rmse(m),
            "relative_l2": derivation.relative_l2(m),
            "cosine": derivation.cosine(m),
        }
    return found
