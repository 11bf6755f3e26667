"""Histograms of two tensors over the same bins, and of the error between them."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from driftline.numerics.fields import PairMoments
from driftline.pages.bins import Counts, even, symlog
from driftline.pages.figures import Extent, extent_of, moments_of, odd_of, pieces
from driftline.pages.opened import BUDGET, F64, OpenedPair, Region, Window

Scale = Literal["even", "symlog", "auto"]

_ODD: tuple[str, ...] = ("nan", "inf", "-inf")


class Histogram(NamedTuple):
    """How often values of both sides fall between the same edges.

    Attributes:
        extent: How much was looked at.
        edges: One more than there are bins, ascending.
        reference: Finite elements of the reference per bin.
        candidate: The same of the candidate.
        scale: `even`, or `symlog`: even in the logarithm on both sides of one bin around zero.
        nonfinite: NaN, +inf and -inf of each side.
    """

    extent: Extent
    edges: F64
    reference: Counts
    candidate: Counts
    scale: Literal["even", "symlog"]
    nonfinite: dict[str, dict[str, int]]

    def as_json(self) -> dict[str, Any]:
        return {
            "edges": self.edges,
            "reference": self.reference,
            "candidate": self.candidate,
            **({"scale": "symlog"} if self.scale == "symlog" else {}),
            "nonfinite": self.nonfinite,
        }


class ErrorHistogram(NamedTuple):
    """How often |candidate - reference| is of which size.

    Attributes:
        extent: How much was looked at.
        edges: log10 of the error, one more than there are bins.
        counts: Elements per bin that are finite on both sides and differ.
        zero: Elements that agree exactly; the same non-finite value on both sides is one too.
        one_sided: Elements that are not finite on one side, or differently on the two.
    """

    extent: Extent
    edges: F64
    counts: Counts
    zero: int
    one_sided: int

    def as_json(self) -> dict[str, Any]:
        return {
            "edges": self.edges,
            "counts": self.counts,
            "zero": self.zero,
            "one_sided": self.one_sided,
        }


def histogram(
    pair: OpenedPair,
    region: Region | None = None,
    *,
    bins: int = 64,
    scale: Scale = "auto",
    budget: int = BUDGET,
) -> Histogram:
    """Values of both sides over the same bins.

    Args:
        pair: The two tensors.
        region: Which part; everything when not given.
        bins: How many.
        scale: `auto` takes `symlog` where even bins would put nearly everything into a few.
        budget: Elements to look at.
    """
    inside = pair.clipped(region)
    moments = moments_of(pair, inside, budget)
    low, high = _range(moments)
    if scale != "auto":
        chosen = scale
    else:
        chosen = "symlog" if moments is not None and _is_heavy(moments, high - low) else "even"
    sorter = even(low, high, bins) if chosen == "even" else symlog(low, high, bins)
    ours, theirs = (np.zeros(len(sorter.edges) - 1, np.int64) for _ in range(2))
    for piece in pieces(pair, inside, budget):
        ours += sorter.counted(piece.window.reference)
        theirs += sorter.counted(piece.window.candidate)
    nonfinite: dict[str, dict[str, int]] = {
        name: dict(zip(_ODD, odd_of(side, moments), strict=True))
        for name, side in (("reference", "r"), ("candidate", "c"))
    }
    extent = extent_of(pair, inside, budget)
    return Histogram(extent, sorter.edges, ours, theirs, sorter.scale, nonfinite)


def error_histogram(
    pair: OpenedPair, region: Region | None = None, *, bins: int = 64, budget: int = BUDGET
) -> ErrorHistogram:
    """Sizes of the error over even bins of its logarithm."""
    inside = pair.clipped(region)
    low, high, zero, one_sided = math.inf, -math.inf, 0, 0
    for piece in pieces(pair, inside, budget):
        sizes, equal = _sizes(piece.window)
        zero += equal
        one_sided += int(np.count_nonzero(piece.window.apart))
        if sizes.size:
            low, high = min(low, float(sizes.min())), max(high, float(sizes.max()))
    extent = extent_of(pair, inside, budget)
    if high < low:
        edges = np.linspace(-1.0, 0.0, bins + 1)
        return ErrorHistogram(extent, edges, np.zeros(bins, np.int64), zero, one_sided)
    sorter = even(math.log10(low), math.log10(high), bins)
    counts = np.zeros(len(sorter.edges) - 1, np.int64)
    for piece in pieces(pair, inside, budget):
        counts += sorter.counted(np.log10(_sizes(piece.window)[0]))
    return ErrorHistogram(extent, sorter.edges, counts, zero, one_sided)


def _range(m: PairMoments | None) -> tuple[float, float]:
    if m is None:
        return 0.0, 0.0
    lows = [low for low in (m.r_min, m.c_min) if not math.isnan(low)]
    highs = [high for high in (m.r_max, m.c_max) if not math.isnan(high)]
    return (min(lows), max(highs)) if lows else (0.0, 0.0)


def _is_heavy(m: PairMoments, width: float) -> bool:
    """Whether most values are packed into a small part of the range."""
    stds = [std for std in (m.r_std, m.c_std) if math.isfinite(std) and std > 0.0]
    return not math.isfinite(width) or (bool(stds) and width > 60.0 * min(stds))


def _sizes(window: Window) -> tuple[F64, int]:
    """Sizes of the errors that are there, and how many elements have none."""
    size = np.minimum(np.abs(window.error), np.finfo(np.float64).max)  # 1.7e308 against -1.7e308
    there = size > 0.0
    equal = int(size.size - np.count_nonzero(there) - np.count_nonzero(window.apart))
    return size[there], equal
