"""Edges of a histogram's bins, and how many numbers fall between them.

Numbers are sorted in by arithmetic and then put right by the edges themselves: searching the edges
for every one of 16 million numbers takes five times as long.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

_DECADES = 8
"""How far below the largest value a symlog histogram still tells values from zero."""


class Bins(NamedTuple):
    """Bins between ascending edges; the last one holds its upper edge too.

    Attributes:
        edges: One more than there are bins.
        scale: `even`, or `symlog`: even in the logarithm on both sides of one bin around zero.
        below: Bins below the one around zero, for `symlog`.
        bottom: Where that one ends.
    """

    edges: F64
    scale: Literal["even", "symlog"] = "even"
    below: int = 0
    bottom: float = 0.0

    def counted(self, numbers: F64) -> Counts:
        """How many finite numbers fall into each bin; what is outside goes to the nearest."""
        finite = np.isfinite(numbers)
        inside = numbers.reshape(-1) if finite.all() else numbers[finite]
        last = len(self.edges) - 2
        places = np.clip(self._guessed(inside), 0, last)
        places -= inside < self.edges[places]
        np.clip(places, 0, last, out=places)
        places += (inside >= self.edges[places + 1]) & (places < last)
        return np.bincount(places, minlength=last + 1).astype(np.int64)

    def _guessed(self, numbers: F64) -> Places:
        """The bin, or one beside it."""
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
    """Even bins; a single value stands in the middle of a range of its own."""
    if not low < high:
        reach = max(abs(low) * 1e-3, 1e-6) if low else 1.0
        low, high = low - reach, high + reach
    steps = np.arange(bins + 1) / bins
    edges: F64 = low * (1.0 - steps) + high * steps
    edges[0], edges[-1] = low, high
    if not (np.diff(edges) > 0.0).all():  # fewer numbers than bins between the two
        edges = np.array([low, high])
    return Bins(edges)


def symlog(low: float, high: float, bins: int) -> Bins:
    """Bins even in the logarithm, on either side of one around zero."""
    top = max(abs(low), abs(high))
    if top < 1e-290:
        return even(low, high, bins)
    bottom = top * 10.0**-_DECADES
    negative, positive = low < -bottom, high > bottom
    each = max(1, (bins - 1) // (negative + positive))
    first = -np.geomspace(max(-low, 2.0 * bottom), bottom, each + 1) if negative else [-bottom]
    last = np.geomspace(bottom, max(high, 2.0 * bottom), each + 1) if positive else [bottom]
    edges = np.concatenate([first, last])
    return Bins(edges, "symlog", each if negative else 0, bottom)


def _step(end: float, bottom: float, bins: int) -> float:
    return math.log10(end / bottom) / bins if bins and end > bottom else 1.0
