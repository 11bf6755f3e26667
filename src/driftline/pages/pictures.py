"""What a person wants to see of two tensors: figures, histograms, a map of the error, values.

One definition each, for the report (`pictures`, docs/report-format.md) and for the viewer. Every
one of them takes a region of the sheet and a budget: of a region with more elements an even sample
is looked at, and the result says how many that were. Elements are finite on both sides or counted
apart; nothing is patched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.comparison.metrics import derivation
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.moments import PairMoments, merge_moments
from driftline.pages.opened import BUDGET, F64, OpenedPair, Piece, Region, Window
from driftline.pages.suspects import suspects

Counts = npt.NDArray[np.int64]
Scale = Literal["even", "symlog", "auto"]

_BANDS = 256
"""A sample is taken from so many parts of a region's rows, and of its columns."""
_DECADES = 8
"""How far below the largest value a symlog histogram still tells values from zero."""
_ODD: tuple[str, ...] = ("nan", "inf", "-inf")


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


class ErrorMap(NamedTuple):
    """A region cut into cells, and the error in each.

    Attributes:
        extent: How much was looked at.
        height: Cells from top to bottom; cell i begins at row `top + i * rows // height`.
        width: Cells from left to right.
        largest: Greatest |candidate - reference| of each cell; inf where an element is not finite
            on one side only.
        mean: Mean |candidate - reference| of each cell; NaN where nothing is finite on both sides.
        reference: Mean of the reference's values in each cell, over the same elements.
        candidate: Mean of the candidate's values.
    """

    extent: Extent
    height: int
    width: int
    largest: F64
    mean: F64
    reference: F64
    candidate: F64


class Element(NamedTuple):
    """One element of both sides."""

    row: int
    column: int
    reference: float
    candidate: float


def statistics(
    pair: OpenedPair, region: Region | None = None, *, budget: int = BUDGET
) -> Statistics:
    """Figures of a region; of the whole tensor when none is given."""
    inside = pair.clipped(region)
    extent = _extent(pair, inside, budget)
    moments = _moments(pair, inside, budget)
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
    moments = _moments(pair, inside, budget)
    low, high = _range(moments)
    if scale != "auto":
        chosen = scale
    else:
        chosen = "symlog" if moments is not None and _is_heavy(moments, high - low) else "even"
    edges = _even(low, high, bins) if chosen == "even" else _symlog(low, high, bins)
    ours, theirs = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
    for piece in _pieces(pair, inside, budget):
        ours += _binned(piece.window.reference, edges)
        theirs += _binned(piece.window.candidate, edges)
    nonfinite: dict[str, dict[str, int]] = {
        name: dict(zip(_ODD, _odd(side, moments), strict=True))
        for name, side in (("reference", "r"), ("candidate", "c"))
    }
    return Histogram(_extent(pair, inside, budget), edges, ours, theirs, chosen, nonfinite)


def error_histogram(
    pair: OpenedPair, region: Region | None = None, *, bins: int = 64, budget: int = BUDGET
) -> ErrorHistogram:
    """Sizes of the error over even bins of its logarithm."""
    inside = pair.clipped(region)
    low, high, zero, one_sided = math.inf, -math.inf, 0, 0
    for piece in _pieces(pair, inside, budget):
        sizes, equal = _sizes(piece.window)
        zero += equal
        one_sided += int(np.count_nonzero(piece.window.apart))
        if sizes.size:
            low, high = min(low, float(sizes.min())), max(high, float(sizes.max()))
    extent = _extent(pair, inside, budget)
    if high < low:
        edges = np.linspace(-1.0, 0.0, bins + 1)
        return ErrorHistogram(extent, edges, np.zeros(bins, np.int64), zero, one_sided)
    edges = _even(math.log10(low), math.log10(high), bins)
    counts = np.zeros(bins, np.int64)
    for piece in _pieces(pair, inside, budget):
        sizes, _ = _sizes(piece.window)
        counts += _binned(np.log10(sizes), edges)
    return ErrorHistogram(extent, edges, counts, zero, one_sided)


def error_map(
    pair: OpenedPair,
    region: Region | None = None,
    *,
    height: int = 64,
    width: int = 64,
    budget: int = BUDGET,
) -> ErrorMap:
    """The error of a region, cell by cell; never more cells than elements."""
    inside = pair.clipped(region)
    height, width = min(height, inside.height), min(width, inside.width)
    cells = height * width
    largest, total, ours, theirs = (np.zeros(cells) for _ in range(4))
    counted, apart = np.zeros(cells, np.int64), np.zeros(cells, np.bool_)
    for piece in pair.pieces(inside, bands=height, cells=width, budget=budget):
        window = piece.window
        # One band at a time, so that rows are summed first and columns by their cells.
        band = ((int(piece.rows[0]) - inside.top + 1) * height - 1) // inside.height
        cell = ((piece.columns - inside.left + 1) * width - 1) // inside.width
        starts = np.flatnonzero(np.diff(cell, prepend=-1))
        places = band * width + cell[starts]
        size = np.abs(window.error)
        largest[places] = np.maximum(largest[places], np.maximum.reduceat(size.max(axis=0), starts))
        with np.errstate(over="ignore"):
            total[places] += np.add.reduceat(size.sum(axis=0), starts)
            for into, values in ((ours, window.reference), (theirs, window.candidate)):
                finite = np.where(window.both, values, 0.0).sum(axis=0)
                into[places] += np.add.reduceat(finite, starts)
        counted[places] += np.add.reduceat(window.both.sum(axis=0), starts)
        apart[places] |= np.logical_or.reduceat(window.apart.any(axis=0), starts)
    largest[apart] = np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [each / counted for each in (total, ours, theirs)]
    seen = pair.looked_at(inside, bands=height, cells=width, budget=budget)
    extent = Extent(inside, inside.elements, seen)
    shaped = (each.reshape(height, width) for each in (largest, *means))
    return ErrorMap(extent, height, width, *shaped)


def values(pair: OpenedPair, region: Region, *, most: int = 1 << 14) -> dict[str, Any]:
    """Both sides of a small region, element by element, top left first.

    Integers are exact: those that a float64 cannot hold come as text.

    Args:
        pair: The two tensors.
        region: Which part; it is cut where it has more than `most` elements.
    """
    inside = pair.clipped(region)
    right = min(inside.right, inside.left + most)
    bottom = min(inside.bottom, inside.top + max(1, most // max(1, right - inside.left)))
    rows = np.arange(inside.top, bottom, dtype=np.intp)
    columns = np.arange(inside.left, right, dtype=np.intp)
    found = pair.window(rows, columns)
    sides: dict[str, Any] = {"reference": found.reference, "candidate": found.candidate}
    integral = ("int", "uint", "bool")
    if pair.reference.dtype.kind in integral and pair.candidate.dtype.kind in integral:
        wide = any(np.abs(side).max(initial=0.0) >= 2.0**53 for side in sides.values())
        if wide:
            ours, theirs = pair.integers(rows, columns)
            sides = {
                "reference": [str(value) for value in ours.reshape(-1)],
                "candidate": [str(value) for value in theirs.reshape(-1)],
            }
    return {
        "top": inside.top,
        "left": inside.left,
        "height": len(rows),
        "width": len(columns),
        **sides,
        "error": np.where(found.both, found.error, np.where(found.apart, np.nan, 0.0)),
    }


def largest_errors(
    pair: OpenedPair, region: Region | None = None, *, count: int = 8, budget: int = BUDGET
) -> list[Element]:
    """Where the two are farthest apart, the worst first; a one-sided NaN or infinity is worst."""
    inside = pair.clipped(region)
    best: list[tuple[float, Element]] = []
    for piece in _pieces(pair, inside, budget):
        window = piece.window
        size = np.where(window.apart, np.inf, np.abs(window.error)).reshape(-1)
        few = min(count, size.size)
        for at in np.argpartition(size, size.size - few)[size.size - few :]:
            if size[at] > 0.0:
                row, column = divmod(int(at), window.error.shape[1])
                element = Element(
                    int(piece.rows[row]),
                    int(piece.columns[column]),
                    float(window.reference[row, column]),
                    float(window.candidate[row, column]),
                )
                best.append((float(size[at]), element))
        best.sort(key=lambda one: (-one[0], one[1].row, one[1].column))
        del best[count:]
    return [element for _, element in best]


def pictures(
    pair: OpenedPair, row: int, *, cells: int = 64, budget: int = BUDGET
) -> dict[str, Any]:
    """Everything a page shows of a pair without being asked (docs/report-format.md).

    Args:
        pair: The two tensors.
        row: Number of the table's row that they are.
        cells: Most cells of the heat map in one direction.
        budget: Elements to look at for each of its parts.
    """
    if not pair.elements:
        return {
            "row": row,
            **dict.fromkeys(("histogram", "error", "heat")),
            "bad": [],
            "values": [],
            "note": "the tensor is empty",
        }
    extent = _extent(pair, pair.whole, budget)
    notes = [extent.note]
    if pair.stride > 1:
        notes.append(f"only every {ordinal(pair.stride)} element was kept")
    heat = None
    if len(pair.shape) > 1:
        found = error_map(pair, height=cells, width=cells, budget=budget)
        heat = {
            "height": found.height,
            "width": found.width,
            "values": found.largest,
            "rows": {"called": _rows_called(pair), "extent": pair.rows},
            "columns": {"called": pair.axes[-1], "extent": pair.columns},
            "value": "max abs error of a cell",
        }
    return {
        "row": row,
        "histogram": histogram(pair, budget=budget).as_json(),
        "error": error_histogram(pair, budget=budget).as_json(),
        "heat": heat,
        "bad": [suspect.as_json() for suspect in suspects(pair, budget=budget)],
        "values": [
            {"at": place(pair, one), "reference": one.reference, "candidate": one.candidate}
            for one in largest_errors(pair, budget=budget)
        ],
        "note": "; ".join(filter(None, notes)),
    }


def place(pair: OpenedPair, element: Element) -> str:
    """Where an element is, in the tensor's own axes."""
    column = element.column
    if pair.reference.dtype.kind == "complex":
        part = "imaginary" if column % 2 else "real"
        return f"{pair.row_name(element.row)}, {pair.axes[-1]} {column // 2} ({part})"
    if len(pair.shape) == 1:
        return f"{pair.axes[-1]} {column * pair.stride}"
    return f"{pair.row_name(element.row)}, {pair.axes[-1]} {column}"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 16, 22)]
    ['1st', '2nd', '3rd', '4th', '11th', '16th', '22nd']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _rows_called(pair: OpenedPair) -> str:
    """What a row is: the last of the axes that the rows are made of, if there is but one."""
    long = [name for name, size in zip(pair.axes[:-1], pair.shape[:-1], strict=True) if size > 1]
    return " × ".join(long) if long else pair.axes[-2]


def _pieces(pair: OpenedPair, region: Region, budget: int) -> Iterator[Piece]:
    return pair.pieces(region, bands=_BANDS, cells=_BANDS, budget=budget)


def _extent(pair: OpenedPair, region: Region, budget: int) -> Extent:
    seen = pair.looked_at(region, bands=_BANDS, cells=_BANDS, budget=budget)
    return Extent(region, region.elements, seen)


def _moments(pair: OpenedPair, region: Region, budget: int) -> PairMoments | None:
    double = DTYPES["float64"]
    parts: list[PairMoments] = []
    for piece in _pieces(pair, region, budget):
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
    finite = getattr(m, f"{side}_finite")
    mean = getattr(m, f"{side}_sum") / finite if finite else math.nan
    least, most, std = (getattr(m, f"{side}_{name}") for name in ("min", "max", "std"))
    return SideFigures(least, most, mean, std if finite else math.nan, *_odd(side, m))


def _odd(side: str, m: PairMoments | None) -> tuple[int, int, int]:
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


def _even(low: float, high: float, bins: int) -> F64:
    """Edges of even bins; a single value stands in the middle of a range of its own."""
    if not low < high:
        reach = max(abs(low) * 1e-3, 1e-6) if low else 1.0
        low, high = low - reach, high + reach
    # Halves first: the distance of the two ends may be beyond float64.
    steps = np.arange(bins + 1) / bins
    edges: F64 = low * (1.0 - steps) + high * steps
    edges[0], edges[-1] = low, high
    return edges


def _symlog(low: float, high: float, bins: int) -> F64:
    """Edges even in the logarithm, on either side of one bin around zero."""
    top = max(abs(low), abs(high))
    if top == 0.0:
        return _even(low, high, bins)
    bottom = max(top * 10.0**-_DECADES, 5e-308)
    negative, positive = low < -bottom, high > bottom
    each = max(1, (bins - 1) // (negative + positive))
    edges: list[F64] = []
    if negative:
        least = min(-low, top)
        edges.append(-np.geomspace(max(least, 2.0 * bottom), bottom, each + 1))
    else:
        edges.append(np.array([min(low, -bottom)]))
    if positive:
        edges.append(np.geomspace(bottom, max(high, 2.0 * bottom), each + 1))
    else:
        edges.append(np.array([max(high, bottom)]))
    found = np.concatenate(edges)
    found[0], found[-1] = min(found[0], low), max(found[-1], high)
    return found


def _binned(numbers: F64, edges: F64) -> Counts:
    """How many finite numbers fall between edges; the last bin holds its upper edge too."""
    finite = numbers[np.isfinite(numbers)]
    places = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(places, minlength=len(edges) - 1).astype(np.int64)


def _sizes(window: Window) -> tuple[F64, int]:
    """Sizes of the errors that are there, and how many elements have none."""
    size = np.minimum(np.abs(window.error), np.finfo(np.float64).max)  # 1.7e308 against -1.7e308
    there = size > 0.0
    equal = int(size.size - np.count_nonzero(there) - np.count_nonzero(window.apart))
    return size[there], equal
