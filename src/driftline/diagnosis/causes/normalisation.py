"""Constants of a normalisation: epsilon, the subtracted mean, the number of elements.

A module is a normalisation if each channel of its output is a linear function of the same channel
of its normalised input. The normalised elements (the last axis, groups of channels, the batch) and
the epsilon are found by trying; names are not used. Then one constant at a time is changed, and the
change that gives the candidate's output is the mistake. A norm of neighbours, which divides by a
power of a constant and a sum of their squares, is read on both sides instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.linear_solve import solve

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

    def normal(self, epsilon: float, *, outside: bool = False) -> F64:
        if outside:
            return self.centred / (np.sqrt(self.square) + epsilon)
        return self.centred / np.sqrt(self.square + epsilon)


class _Norm(NamedTuple):
    """A way to normalise that gives the reference's output.

    Attributes:
        statistics: What is subtracted, and the mean square.
        epsilon: The constant beside it.
        weight: Factors of the channels.
        outside: Whether the constant is added to the root and not below it.
    """

    statistics: _Statistics
    epsilon: float
    weight: F64
    outside: bool = False

    @property
    def normal(self) -> F64:
        return self.statistics.normal(self.epsilon, outside=self.outside)

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
            for outside in (False, True) if epsilon else (False,):
                with np.errstate(all="ignore"):
                    normal = statistics.normal(epsilon, outside=outside)
                if not np.isfinite(normal).all():
                    continue
                weight, left = _line(normal, r, statistics.axis)
                least = min(least, left)
                if best is None or left < best[0]:
                    best = left, _Norm(statistics, epsilon, weight, outside)
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
    right = norm.output(norm.normal)

    def made(normal: F64) -> F64:
        return case.r + norm.output(normal) - right

    def left(epsilon: float) -> float:
        normal = statistics.normal(epsilon, outside=norm.outside)
        rest = np.where(case.finite, case.c - made(normal), 0.0)
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
        case.fitted(made(statistics.normal(epsilon, outside=norm.outside))),
        f"it normalises {statistics.over} with an epsilon of about {epsilon:.2g} in place of "
        f"{norm.epsilon:.2g}",
        "epsilon",
    )
    if norm.epsilon:
        places = ("below the root", "to the root")
        yield Clue(
            "scale",
            case.explained(made(statistics.normal(norm.epsilon, outside=not norm.outside))),
            f"its epsilon of {norm.epsilon:.2g} is added {places[not norm.outside]}, and should be "
            f"added {places[norm.outside]}",
            "epsilon",
        )
    if statistics.elements > 1:
        more = statistics.square * statistics.elements / (statistics.elements - 1)
        yield Clue(
            "scale",
            case.explained(made(norm._replace(statistics=statistics._replace(square=more)).normal)),
            f"it divides the sum of squares by {statistics.elements - 1} elements in place of "
            f"{statistics.elements}",
            "count",
        )
    for other in itertools.chain(_ways(x), _other_ways(x)):
        if other.over != statistics.over and other.axis == statistics.axis:
            yield Clue(
                "scale",
                case.explained(made(other.normal(norm.epsilon, outside=norm.outside))),
                f"it normalises {other.over} in place of {statistics.over}",
                "statistics",
            )


# Norms of neighbours.


_NEIGHBOURS = (3, 5, 7, 9, 11)
_POWERS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_MOST_PLACES = 1 << 16


class _Crowd(NamedTuple):
    """A number over a power of a constant and the squares of its neighbours.

    Attributes:
        axis: Along which neighbours lie.
        width: Number of neighbours, itself included.
        power: Of the sum.
        constant: That is added to the squares.
        factor: Of their sum.
    """

    axis: int
    width: int
    power: float
    constant: float
    factor: float

    def of(self, x: F64) -> F64:
        sums = _squares_nearby(x, self.axis, self.width)
        return x * (self.constant + self.factor * sums) ** -self.power

    def __str__(self) -> str:
        return (
            f"the power {self.power:.3g} of {self.constant:.3g} and {self.factor:.3g} times the "
            f"squares of {self.width} neighbours along axis {self.axis}"
        )


def neighbours(case: Case) -> Clue | None:
    """A norm over neighbours with another constant, factor, power or number of them."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not 64 <= case.r.size <= _MOST_ELEMENTS:
        return None
    for rights, wrongs in case.sources:
        for name, x in rights.items():
            own = wrongs.get(name)
            if own is None or x.shape != case.r.shape or own.shape != case.r.shape:
                continue
            right = _crowd_of(case, x, case.r, None)
            wrong = None if right is None else _crowd_of(case, own, case.r + case.e, right)
            if right is None or wrong is None:
                continue
            made = wrong.of(own) - right.of(x)
            score = case.explained(case.r + made)
            what = f"it divides by {wrong}, where the reference divides by {right}"
            return Clue("scale", min(score, 0.98), what, "neighbours")
    return None


def _crowd_of(case: Case, x: F64, made: F64, like: _Crowd | None) -> _Crowd | None:
    """The norm over neighbours that gives a side; None if none does, or if it hardly varies."""
    with np.errstate(all="ignore"):
        factors = made / x
    use = np.isfinite(factors) & (factors > 0.0) & (np.abs(x) > 0.05 * np.abs(x).mean())
    if np.count_nonzero(use) < 64:
        return None
    # Where numbers are nothing, so is their quotient; elsewhere it must be above zero.
    if np.any((made * x < 0.0) & (np.abs(made) > 1e-6 * np.abs(made).max())):
        return None
    flat = factors[use]
    every = max(1, len(flat) // _MOST_PLACES)
    flat = flat[::every]
    if float(np.std(flat)) < 0.01 * float(flat.mean()):
        return None
    enough = (1e-8 + (3.0 * case.noise) ** 2) * float(np.sum(made * made))
    best: tuple[float, _Crowd] | None = None
    for axis in sorted({1, x.ndim - 1}):
        length = x.shape[axis]
        for width in (*(n for n in _NEIGHBOURS if n < 2 * length), 2 * length - 1):
            sums = _squares_nearby(x, axis, width)[use][::every]
            for power in _POWERS:
                line = flat ** (-1.0 / power)
                matrix = np.stack([np.ones(len(sums)), sums], axis=1)
                # What counts is the quotient, not its power: that is how rows are weighed.
                weigh = flat ** (1.0 + 1.0 / power)
                constant, factor = solve(matrix * weigh[:, None], line * weigh)
                if factor <= 0.0:
                    continue
                crowd = _Crowd(axis, width, power, max(float(constant), 0.0), float(factor))
                with np.errstate(all="ignore"):
                    left = float(np.sum((crowd.of(x) - made) ** 2))
                if not math.isfinite(left):
                    continue
                # Of two that fit, the one that is more like the reference's.
                if like is not None and (axis, width, power) == (like.axis, like.width, like.power):
                    left = left if left > enough else 0.0
                if best is None or left < best[0]:
                    best = left, crowd
    return best[1] if best is not None and best[0] <= enough else None


def _squares_nearby(x: F64, axis: int, width: int) -> F64:
    """The sum of squares of the places around each, itself included; none lie beyond the ends."""
    length, reach = x.shape[axis], width // 2
    squares = np.moveaxis(x * x, axis, -1)
    sums = np.concatenate([np.zeros((*squares.shape[:-1], 1)), np.cumsum(squares, axis=-1)], -1)
    places = np.arange(length, dtype=np.intp)
    last, first = np.minimum(places + reach + 1, length), np.maximum(places - reach, 0)
    return np.moveaxis(sums[..., last] - sums[..., first], -1, axis)
