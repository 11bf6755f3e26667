"""Statistics of clean values with their confidence intervals: percentiles, averages, l2, std.

This file knows neither files nor models. A NaN among the values makes the result NaN; it is never
left out and never replaced.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.table.row import Direction
from driftline.errors import BadInput, did_you_mean

Values = np.ndarray[Any, np.dtype[np.float64]]

RESAMPLES = 1000
CONFIDENCE = 0.95
BLOCKS = 200
"""Averages are resampled in this many blocks of neighbouring values. This also keeps dependent
values together, such as the tokens of one text."""

_NAMED = {"median": 50.0, "max": 100.0}
_MOMENTS = {"average": "average", "avg": "average", "mean": "average", "l2": "l2", "std": "std"}
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")


class Statistic(NamedTuple):
    """A statistic of the values of a metric.

    Attributes:
        name: Its name in files: p99, average, l2, std, median, max.
        percentile: 0 to 100 from the best to the worst value; None for the other statistics.
    """

    name: str
    percentile: float | None = None

    def rank(self, direction: Direction) -> float:
        """Return the percentile for numpy; if higher is better, the worst values are the lowest."""
        part = 50.0 if self.percentile is None else self.percentile
        return 100.0 - part if direction == "higher" else part

    def of(self, values: Values, direction: Direction = "lower") -> float:
        """Return the statistic; NaN if a value is NaN, so that nothing passes by accident.

        >>> P99.of(np.arange(101.0)), P99.of(np.arange(101.0), "higher")
        (99.0, 1.0)
        """
        if not values.size:
            return math.nan
        if self.percentile is not None:
            with np.errstate(invalid="ignore"):
                return float(np.percentile(_sized(values, direction), self.rank(direction)))
        with np.errstate(invalid="ignore", over="ignore"):
            if self.name == "l2":
                return float(np.linalg.norm(values))
            if self.name == "std":
                return float(np.std(values))
            return float(np.mean(values))

    def interval(
        self, values: Values, direction: Direction = "lower", *, seed: int = 0
    ) -> tuple[float, float] | None:
        """Return the 95 % bootstrap interval; None for fewer than two or for non-finite values.

        The bootstrap of a percentile needs no resampling of the values: the order statistics of n
        draws from n sorted values have Beta-distributed ranks, which are drawn directly.
        """
        if values.size < 2 or not bool(np.isfinite(values).all()):
            return None
        if self.percentile is None:
            drawn = self._from_blocks(values, seed)
        else:
            draw = np.random.default_rng(seed)
            drawn = _percentiles(_sized(values, direction), self.rank(direction), draw)
        edge = 50.0 * (1.0 - CONFIDENCE)
        low, high = np.percentile(drawn, [edge, 100.0 - edge])
        return float(low), float(high)

    def _from_blocks(self, values: Values, seed: int) -> Values:
        blocks = np.array_split(values, min(BLOCKS, values.size))
        sums = np.array([(b.size, b.sum(), np.square(b).sum()) for b in blocks])
        drawn = _times_drawn(len(blocks), seed) @ sums
        count, total, squares = drawn.T
        if self.name == "l2":  # scaled to the original number of values
            return np.sqrt(squares / count * values.size)
        if self.name == "std":
            return np.sqrt(np.maximum(squares / count - np.square(total / count), 0.0))
        return total / count


P99 = Statistic("p99", 99.0)
AVERAGE = Statistic("average")
L2 = Statistic("l2")


def parse_statistic(word: str) -> Statistic:
    """Return a statistic by its name.

    >>> parse_statistic("p99.9")
    Statistic(name='p99.9', percentile=99.9)

    Raises:
        BadInput: There is no such statistic.
    """
    name = word.strip().lower()
    if name in _NAMED:
        return Statistic(name, _NAMED[name])
    if name in _MOMENTS:
        return Statistic(_MOMENTS[name])
    match = _PERCENTILE.fullmatch(name)
    if match is None:
        raise BadInput(
            f"there is no statistic '{word}'",
            hint=did_you_mean(name, ["p99", "p95", *_NAMED, "average", "l2", "std"]),
        )
    return Statistic(name, float(match[1]))


@lru_cache(maxsize=8)
def _times_drawn(blocks: int, seed: int) -> Values:
    """Return how often each resample contains each block; cached for the layers of a model."""
    draw = np.random.default_rng(seed)
    drawn = draw.multinomial(blocks, np.full(blocks, 1.0 / blocks), RESAMPLES)
    return drawn.astype(np.float64)


def _sized(values: Values, direction: Direction) -> Values:
    """Return absolute values where 0 is best, because both signs are equally bad."""
    return np.abs(values) if direction == "zero" else values


def _percentiles(values: Values, rank: float, draw: np.random.Generator) -> Values:
    """Return what `numpy.percentile` would give for resamples of the values."""
    ordered = np.sort(values)
    size = len(ordered)
    place = (size - 1) * rank / 100.0
    lower = int(place)
    share = place - lower
    # The (lower + 1)-th smallest of `size` uniform numbers; `second` is the next one.
    first = draw.beta(lower + 1, size - lower, RESAMPLES)
    low = ordered[np.minimum((first * size).astype(np.int64), size - 1)]
    if share == 0.0 or lower + 1 >= size:
        return low
    second = first + (1.0 - first) * draw.beta(1, size - lower - 1, RESAMPLES)
    high = ordered[np.minimum((second * size).astype(np.int64), size - 1)]
    return low + share * (high - low)
