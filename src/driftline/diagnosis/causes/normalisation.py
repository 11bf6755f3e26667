"""Constants of a normalisation: epsilon, the subtracted mean, the number of elements.

A module is a normalisation if each channel of its output is a linear function of the same channel
of its normalised input. The normalised elements (the last axis, groups of channels, the batch) and
the epsilon are found by trying; names are not used. Then one constant at a time is changed, and the
change that gives the candidate's output is the mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue

_EPSILONS = (0.0, *(10.0**-power for power in range(12, 2, -1)))
_FEW_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5)
_MOST_ELEMENTS = 1 << 20
_MOST_GROUPS = 64
_SEARCHED = tuple(10.0 ** (power / 2.0) for power in range(-26, 1))
_HARDLY = 0.9
"""If a normalisation leaves more than this share unexplained, other epsilons are not tried."""
_FITS = 1e-7
"""Largest share of the reference's energy that an accepted normalisation leaves unexplained."""


class _Statistics(NamedTuple):
    """One way to normalise.

    Attributes:
        over: Which elements are normalised together, in words.
        centred: The input, with or without its mean subtracted.
        square: Mean square of `centred`, with the same number of axes.
        elements: Number of elements in each mean.
        axis: The axis of channels, each of which has a weight and a bias.
    """

    over: str
    centred: F64
    square: F64
    elements: int
    axis: int

    def normal(self, epsilon: float) -> F64:
        return self.centred / np.sqrt(self.square + epsilon)


class _Norm(NamedTuple):
    """A way to normalise that gives the reference's output, with its epsilon and weights."""

    statistics: _Statistics
    epsilon: float
    weight: F64

    def output(self, normal: F64) -> F64:
        """The output without the bias, which none of the constants changes."""
        return normal * self.weight


def normalisation(case: Case) -> Clue | None:
    """The constant that differs between the normalisations of the two sides."""
    if case.r.ndim < 2 or case.r.shape[-1] < 2:
        return None
    for x in case.inputs.values():
        if x.shape != case.r.shape or not np.isfinite(x).all():
            continue
        norm = _norm_of(case, x)
        if norm is not None:
            return max(_mistakes(case, norm, x), key=lambda clue: clue.score, default=None)
    return None


def _norm_of(case: Case, x: F64) -> _Norm | None:
    r = np.where(case.finite, case.r, 0.0)
    return _nearest_norm(case, r, _ways(x), _EPSILONS) or _nearest_norm(
        case, r, _other_ways(x), _FEW_EPSILONS
    )


def _nearest_norm(
    case: Case, r: F64, ways: Iterator[_Statistics], epsilons: Sequence[float]
) -> _Norm | None:
    """The way to normalise that is nearest to the reference's output; None if none fits."""
    best: tuple[float, _Norm] | None = None
    varying = float(np.sum((r - r.mean(axis=0)) ** 2))
    for statistics in ways:
        # The largest and the smallest epsilon are tried first. If neither helps, it is no norm of
        # this kind with any epsilon.
        least = math.inf
        for number, epsilon in enumerate((epsilons[-1], *epsilons[:-1])):
            if number >= 2 and least > _HARDLY * varying:
                break
            with np.errstate(all="ignore"):
                normal = statistics.normal(epsilon)
            if not np.isfinite(normal).all():
                continue
            weight, left = _line(normal, r, statistics.axis)
            least = min(least, left)
            if best is None or left < best[0]:
                best = left, _Norm(statistics, epsilon, weight)
    if best is None:
        return None
    # The reference may have had a slightly different input, so some of the output may remain
    # unexplained.
    allowed = (_FITS + (3.0 * case.noise) ** 2) * case.size
    return best[1] if best[0] <= allowed and best[0] < 0.01 * max(varying, 1e-300) else None


def _ways(x: F64) -> Iterator[_Statistics]:
    count = x.shape[-1]
    if count >= 8:
        mean = x.mean(axis=-1, keepdims=True)
        for over, centred in (("", x), (" around its mean", x - mean)):
            square = np.mean(centred * centred, axis=-1, keepdims=True)
            yield _Statistics(f"each row{over}", centred, square, count, x.ndim - 1)
    if x.ndim < 3:
        return
    channels = x.shape[1]
    for groups in range(1, min(channels, _MOST_GROUPS) + 1):
        if channels % groups:
            continue
        grouped = x.reshape(x.shape[0], groups, -1)
        centred = grouped - grouped.mean(axis=-1, keepdims=True)
        square = np.mean(centred * centred, axis=-1, keepdims=True)
        spread = np.broadcast_to(square, grouped.shape).reshape(x.shape)
        over = f"{groups} groups of channels" if groups > 1 else "each element of the batch"
        yield _Statistics(over, centred.reshape(x.shape), spread, grouped.shape[-1], 1)
    axes = (0, *range(2, x.ndim))
    centred = x - x.mean(axis=axes, keepdims=True)
    square = np.mean(centred * centred, axis=axes, keepdims=True)
    yield _Statistics("the batch", centred, square, x.size // channels, 1)


def _other_ways(x: F64) -> Iterator[_Statistics]:
    """Yield normalisations over any axes, with the channels in the second or the last axis."""
    if x.size > _MOST_ELEMENTS:
        return
    for count in range(1, x.ndim + 1):
        for axes in itertools.combinations(range(x.ndim), count):
            elements = math.prod(x.shape[axis] for axis in axes)
            if elements < 4:
                continue
            over = f"axis {axes[0]}" if count == 1 else f"axes {', '.join(map(str, axes))}"
            mean = x.mean(axis=axes, keepdims=True)
            for words, centred in ((over, x), (f"{over} around the mean", x - mean)):
                square = np.mean(centred * centred, axis=axes, keepdims=True)
                for channels in sorted({1, x.ndim - 1}):
                    yield _Statistics(words, centred, square, elements, channels)


def _line(normal: F64, r: F64, axis: int) -> tuple[F64, float]:
    """Slope of `r` over `normal` in each channel, and the squared error of these lines."""
    axes = tuple(number for number in range(r.ndim) if number != axis)
    middle = normal - normal.mean(axis=axes, keepdims=True)
    varying = r - r.mean(axis=axes, keepdims=True)
    size = np.maximum(np.sum(middle * middle, axis=axes, keepdims=True), 1e-300)
    weight = np.sum(middle * varying, axis=axes, keepdims=True) / size
    left = varying - weight * middle
    return weight, float(np.sum(left * left))


def _mistakes(case: Case, norm: _Norm, x: F64) -> Iterator[Clue]:
    statistics = norm.statistics
    right = norm.output(statistics.normal(norm.epsilon))

    def made(normal: F64) -> F64:
        return case.r + norm.output(normal) - right

    def left(epsilon: float) -> float:
        rest = np.where(case.finite, case.c - made(statistics.normal(epsilon)), 0.0)
        return float(np.sum(rest * rest))

    best = min(_SEARCHED, key=left)
    low, high = math.log(best) - 1.5, math.log(best) + 1.5
    for _ in range(20):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if left(math.exp(a)) > left(math.exp(b)):
            low = a
        else:
            high = b
    epsilon = math.exp((low + high) / 2)
    yield Clue(
        "scale",
        case.fitted(made(statistics.normal(epsilon))),
        f"it normalises {statistics.over} with an epsilon of about {epsilon:.2g} in place of "
        f"{norm.epsilon:.2g}",
        "epsilon",
    )
    if statistics.elements > 1:
        more = statistics.square * statistics.elements / (statistics.elements - 1)
        yield Clue(
            "scale",
            case.explained(made(statistics._replace(square=more).normal(norm.epsilon))),
            f"it divides the sum of squares by {statistics.elements - 1} elements in place of "
            f"{statistics.elements}",
            "count",
        )
    for other in itertools.chain(_ways(x), _other_ways(x)):
        if other.over != statistics.over and other.axis == statistics.axis:
            yield Clue(
                "scale",
                case.explained(made(other.normal(norm.epsilon))),
                f"it normalises {other.over} in place of {statistics.over}",
                "statistics",
            )
