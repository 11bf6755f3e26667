"""What a page shows of two tensors: a map of the error, the largest errors, and values.

The report (`pictures`, docs/report-format.md) and the viewer share these functions. Each takes a
region and a budget: of a larger region an even sample is read, and the result states its size.
Elements that are not finite on both sides are counted separately and never replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.reporting.html.tensors.outliers import outlier_slices
from driftline.reporting.html.tensors.pair import BUDGET, F64, OpenedPair, Region, open_pair
from driftline.reporting.html.tensors.pair_statistics import (
    Extent,
    error_histogram,
    extent_of,
    histogram,
    pieces,
)
from driftline.runs.run import Run

IN_A_FILE = 1 << 21
"""Elements that are looked at for each picture of a report; the viewer looks at twice as many. Of a
larger part it is an even sample, and the page says so. Two tensors of 39 GB each on a machine with
23 GB: a map of everything takes 3.1 s, of a part 0.15 s, with at most 250 MB of memory in use."""


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
    # A cell smaller than an element would repeat it.
    height, width = min(height, inside.height), min(width, inside.width)
    cells = height * width
    largest, total, reference_sizes, candidate_sizes = (np.zeros(cells) for _ in range(4))
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
            for into, values in (
                (reference_sizes, window.reference),
                (candidate_sizes, window.candidate),
            ):
                finite = np.where(window.finite, values, 0.0).sum(axis=0)
                into[places] += np.add.reduceat(finite, starts)
        counted[places] += np.add.reduceat(window.finite.sum(axis=0), starts)
        apart[places] |= np.logical_or.reduceat(window.apart.any(axis=0), starts)
    # NaN against a number is worse than any finite error.
    largest[apart] = np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [cell_values / counted for cell_values in (total, reference_sizes, candidate_sizes)]
    seen = pair.looked_at(inside, bands=height, cells=width, budget=budget)
    extent = Extent(inside, inside.elements, seen)
    shaped = (cell_values.reshape(height, width) for cell_values in (largest, *means))
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
    window = pair.window(rows, columns)
    sides: dict[str, Any] = {"reference": window.reference, "candidate": window.candidate}
    integral = ("int", "uint", "bool")
    if pair.reference.dtype.kind in integral and pair.candidate.dtype.kind in integral:
        # The front end's numbers are float64 and would round these.
        wide = any(np.abs(side).max(initial=0.0) >= 2.0**53 for side in sides.values())
        if wide:
            reference_integers, candidate_integers = pair.integers(rows, columns)
            sides = {
                "reference": [str(value) for value in reference_integers.reshape(-1)],
                "candidate": [str(value) for value in candidate_integers.reshape(-1)],
            }
    return {
        "top": inside.top,
        "left": inside.left,
        "height": len(rows),
        "width": len(columns),
        **sides,
        "error": np.where(window.finite, window.error, np.where(window.apart, np.nan, 0.0)),
    }


def largest_errors(
    pair: OpenedPair, region: Region | None = None, *, count: int = 8, budget: int = BUDGET
) -> list[Element]:
    """The elements with the largest errors, the worst first; a one-sided NaN or inf is worst."""
    inside = pair.clipped(region)
    best: list[tuple[float, Element]] = []
    for piece in pieces(pair, inside, budget):
        window = piece.window
        size = np.where(window.apart, np.inf, np.abs(window.error)).reshape(-1)
        few = min(count, size.size)
        # Partition instead of sort: windows are large, and few elements are wanted.
        for index in np.argpartition(size, size.size - few)[size.size - few :]:
            if size[index] > 0.0:
                row, column = divmod(int(index), window.error.shape[1])
                element = Element(
                    int(piece.rows[row]),
                    int(piece.columns[column]),
                    float(window.reference[row, column]),
                    float(window.candidate[row, column]),
                )
                best.append((float(size[index]), element))
        # Ties by position, so that a page is the same every time.
        best.sort(key=lambda entry: (-entry[0], entry[1].row, entry[1].column))
        del best[count:]
    return [element for _, element in best]


def pictures_of(
    pair: Pair, reference: Run, candidate: Run, *, cells: int = 64, budget: int = IN_A_FILE
) -> dict[str, Any]:
    """Everything a page shows of a pair without being asked (docs/report-format.md).

    Args:
        pair: Of the plan.
        reference: Where the bytes of its one side are.
        candidate: Where those of the other are.
        cells: Most cells of the heat map in one direction.
        budget: Elements to look at for each of its parts.

    Raises:
        DriftlineError: They cannot be compared with each other, or their values are not there.
    """
    return pictures(open_pair(reference, candidate, pair), cells=cells, budget=budget)


def pictures(pair: OpenedPair, *, cells: int = 64, budget: int = IN_A_FILE) -> dict[str, Any]:
    """The same for a pair that is already open."""
    if not pair.elements:
        return {
            **dict.fromkeys(("histogram", "error", "heat")),
            "bad": [],
            "values": [],
            "note": "the tensor is empty",
        }
    extent = extent_of(pair, pair.whole, budget)
    notes = [extent.note]
    if pair.stride > 1:
        notes.append(f"only every {ordinal(pair.stride)} element was kept")
    heat = None
    # A vector has no second direction for a map.
    if len(pair.shape) > 1:
        heat_map = error_map(pair, height=cells, width=cells, budget=budget)
        heat = {
            "height": heat_map.height,
            "width": heat_map.width,
            "values": heat_map.largest,
            "rows": {"called": _rows_called(pair), "extent": pair.rows},
            "columns": {"called": pair.axes[-1], "extent": pair.columns},
            "value": "max abs error of a cell",
        }
    return {
        "histogram": histogram(pair, budget=budget).as_json(),
        "error": error_histogram(pair, budget=budget).as_json(),
        "heat": heat,
        "bad": [outlier.as_json() for outlier in outlier_slices(pair, budget=budget)],
        "values": [
            {
                "at": place(pair, element),
                "reference": element.reference,
                "candidate": element.candidate,
            }
            for element in largest_errors(pair, budget=budget)
        ],
        "note": "; ".join(filter(None, notes)),
    }


def place(pair: OpenedPair, element: Element) -> str:
    """Where an element is, in the tensor's own axes."""
    column = element.column
    if pair.reference.dtype.kind == "complex":
        part = "imaginary" if column % 2 else "real"
        return f"{pair.row_name(element.row)}, {pair.axes[-1]} {column // 2} ({part})"
    # A sample's columns are counted in the original tensor.
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
