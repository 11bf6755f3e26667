"""Statistics and histograms of a pair of tensors, and of the error between them.

A number's bin is computed by arithmetic and then corrected by the edges: searching the edges for
every one of 16 million numbers takes five times as long. Knows regions of an opened pair, not runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.comparison.metrics import from_moments
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments, merge_moments
from driftline.reporting.html.tensors.pair import BUDGET, F64, OpenedPair, Piece, Region, Window

Float64Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

_DECADES = 8
"""How far below the largest value a symlog histogram still separates values from zero."""


class Bins(NamedTuple):
    """Bins between ascending edges; the last one holds its upper edge too.

    Attributes:
        edges: One more than there are bins.
        scale: `even`, or `symlog`: even in the logarithm on both sides of one bin around zero.
        below: Bins below the one around zero, for `symlog`.
        bottom: Where that one ends.
    """

    edges: Float64Array
    scale: Literal["even", "symlog"] = "even"
    below: int = 0
    bottom: float = 0.0

    def counted(self, numbers: Float64Array) -> Counts:
        """How many finite numbers fall into each bin; what is outside goes to the nearest."""
        finite = np.isfinite(numbers)
        inside = numbers.reshape(-1) if finite.all() else numbers[finite]
        last = len(self.edges) - 2
        places = np.clip(self._guessed(inside), 0, last)
        # Rounding may have put a number one bin too high or too low; the edges decide.
        places -= inside < self.edges[places]
        np.clip(places, 0, last, out=places)
        places += (inside >= self.edges[places + 1]) & (places < last)
        return np.bincount(places, minlength=last + 1).astype(np.int64)

    def _guessed(self, numbers: Float64Array) -> Places:
        """The bin, or one next to it."""
        low, high = float(self.edges[0]), float(self.edges[-1])
        bins = len(self.edges) - 1
        if self.scale == "even":
            # Halves first: the distance of the two ends may be beyond float64.
            step = (high / 2 - low / 2) / bins
            return ((numbers / 2 - low / 2) / step).astype(np.intp)
        with np.errstate(divide="ignore"):
            decades = np.log10(np.abs(numbers) / self.bottom)
        decades = np.maximum(decades, 0.0)
        above = bins - 1 - self.below
        up = _step(high, self.bottom, above)
        down = _step(-low, self.bottom, self.below)
        guess = np.where(
            numbers > 0, self.below + 1 + decades / up, self.below - 1 - np.floor(decades / down)
        ).astype(np.intp)
        return np.where(np.abs(numbers) < self.bottom, self.below, guess)


def even(low: float, high: float, bins: int) -> Bins:
    """Even bins; a single value is in the middle of its own range."""
    # All values equal: a range around it, so that the bar is visible.
    if not low < high:
        reach = max(abs(low) * 1e-3, 1e-6) if low else 1.0
        low, high = low - reach, high + reach
    steps = np.arange(bins + 1) / bins
    edges: Float64Array = low * (1.0 - steps) + high * steps
    edges[0], edges[-1] = low, high
    if not (np.diff(edges) > 0.0).all():  # fewer numbers than bins between the two
        edges = np.array([low, high])
    return Bins(edges)


def symlog(low: float, high: float, bins: int) -> Bins:
    """Bins even in the logarithm, on either side of one around zero."""
    top = max(abs(low), abs(high))
    # So far down the bottom of a logarithmic scale would underflow.
    if top < 1e-290:
        return even(low, high, bins)
    bottom = top * 10.0**-_DECADES
    # A side without values gets no bins.
    negative, positive = low < -bottom, high > bottom
    bins_per_sign = max(1, (bins - 1) // (negative + positive))
    first = (
        -np.geomspace(max(-low, 2.0 * bottom), bottom, bins_per_sign + 1) if negative else [-bottom]
    )
    last = (
        np.geomspace(bottom, max(high, 2.0 * bottom), bins_per_sign + 1) if positive else [bottom]
    )
    edges = np.concatenate([first, last])
    return Bins(edges, "symlog", bins_per_sign if negative else 0, bottom)


def _step(end: float, bottom: float, bins: int) -> float:
    return math.log10(end / bottom) / bins if bins and end > bottom else 1.0


# Statistics of each side, and of the error.


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
    # Nothing was read: there is nothing to state but the extent.
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
    """How many elements of a region are read under a budget."""
    seen = pair.looked_at(region, bands=_BANDS, cells=_BANDS, budget=budget)
    return Extent(region, region.elements, seen)


def moments_of(pair: OpenedPair, region: Region, budget: int) -> PairMoments | None:
    """Sums and extremes of a region from one pass; None for an empty region."""
    double = DTYPES["float64"]
    parts: list[PairMoments] = []
    for piece in pieces(pair, region, budget):
        window = piece.window
        reference, candidate = (
            np.ascontiguousarray(side).reshape(-1) for side in (window.reference, window.candidate)
        )
        # The same kernel as the comparison, so that page and table agree.
        part = kernel.pair_moments(reference, double, candidate, double, count=reference.size)
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
    figures = {
        "max_abs_error": from_moments.max_abs_error(m),
        "mean_abs_error": from_moments.mean_abs_error(m),
        "max_rel_error": from_moments.max_rel_error(m),
    }
    if not from_moments.needs_definition(m):  # squares beyond float64 say nothing
        figures |= {
            "rmse": from_moments.rmse(m),
            "relative_l2": from_moments.relative_l2(m),
            "cosine": from_moments.cosine(m),
        }
    return figures


# Histograms of both sides over the same bins, and of the error.


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
    reference_counts, candidate_counts = (
        np.zeros(len(sorter.edges) - 1, np.int64) for _ in range(2)
    )
    for piece in pieces(pair, inside, budget):
        reference_counts += sorter.counted(piece.window.reference)
        candidate_counts += sorter.counted(piece.window.candidate)
    nonfinite: dict[str, dict[str, int]] = {
        name: dict(zip(_ODD, odd_of(side, moments), strict=True))
        for name, side in (("reference", "r"), ("candidate", "c"))
    }
    extent = extent_of(pair, inside, budget)
    return Histogram(
        extent, sorter.edges, reference_counts, candidate_counts, sorter.scale, nonfinite
    )


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
    # No element differs: an empty histogram still needs edges.
    if high < low:
        edges = np.linspace(-1.0, 0.0, bins + 1)
        return ErrorHistogram(extent, edges, np.zeros(bins, np.int64), zero, one_sided)
    # Errors spread over many powers of ten.
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
    # 60 standard deviations: even bins would put nearly everything into one.
    return not math.isfinite(width) or (bool(stds) and width > 60.0 * min(stds))


def _sizes(window: Window) -> tuple[F64, int]:
    """Sizes of the errors that are there, and how many elements have none."""
    size = np.minimum(np.abs(window.error), np.finfo(np.float64).max)  # 1.7e308 against -1.7e308
    nonzero = size > 0.0
    equal = int(size.size - np.count_nonzero(nonzero) - np.count_nonzero(window.apart))
    return size[nonzero], equal
