"""The right numbers at other places, by reshapes, axes, rolls and picks that people confuse.

Every axis is cut into factors; some of them change places or run backwards. One such order is a
hypothesis without a fitted number, so a few hundred places decide, and the tensor confirms. Where
no order has a name, numbers that a module only moved are recognised by being all still there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue, Flags
from driftline.diagnosis.causes.families.sums_and_means import uneven
from driftline.diagnosis.causes.linear_solve import solve

_PLACES = 512
_LIKELY = 0.6
_MOST_ELEMENTS = 1 << 22
_MOST_ROWS = 1 << 13
_MOST_FACTORS = 48
_MOST_SAMPLES = 64
_NAMED = 0.9
_TOGETHER = 0.25
"""Share of neighbouring tokens that are neighbours still where a block was moved."""
_MADE = 1e-3
"""Share of its energy that a sum of tokens may leave of what it should be."""
_SMALL = (2, 3, 4)
"""One of three factors is small: halves, colours, queries with keys and values."""
Places = npt.NDArray[np.intp]


class _Order(NamedTuple):
    """One rearrangement of a tensor.

    Attributes:
        cause: What it would be called.
        what: In words.
        sizes: Of the factors that the tensor is cut into.
        axes: In which order the factors stand afterwards.
        backwards: Which factors run backwards.
    """

    cause: str
    what: str
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    backwards: tuple[int, ...] = ()

    def sources(self, places: Places) -> Places:
        """Where in the right tensor stands what belongs at some places of the wrong one."""
        sizes = [self.sizes[axis] for axis in self.axes]
        digits = list(np.unravel_index(places, sizes))
        back: list[Places] = [digits[self.axes.index(axis)] for axis in range(len(self.sizes))]
        for axis in self.backwards:
            back[axis] = self.sizes[axis] - 1 - back[axis]
        return np.asarray(np.ravel_multi_index(back, self.sizes), dtype=np.intp)

    def of(self, r: F64) -> F64:
        cut = np.flip(r.reshape(self.sizes), self.backwards)
        return cut.transpose(self.axes).reshape(r.shape)


def rearranged(case: Case) -> Clue | None:
    """One known order of reading, by name."""
    if case.ratio < 2.0 or case.r.ndim < 2 or not 16 <= case.r.size <= _MOST_ELEMENTS:
        return None
    places = _some_places(case)
    r, c = case.r.reshape(-1), (case.r + case.e).reshape(-1)[places]
    energy = float(np.sum((c - r[places]) ** 2))
    best: tuple[float, _Order] | None = None
    for order in _orders(case.r.shape):
        with np.errstate(invalid="ignore"):
            left = float(np.sum((c - r[order.sources(places)]) ** 2))
        if left < (1.0 - _LIKELY) * energy and (best is None or left < 0.9 * best[0]):
            best = left, order
    if best is None:
        return None
    order = best[1]
    return Clue(order.cause, case.explained(order.of(case.r)), order.what, "order")


def _some_places(case: Case) -> Places:
    """Places that are off, spread over the tensor; the same every time."""
    off = np.flatnonzero(case.e.reshape(-1))
    count = min(len(off), _PLACES)
    return np.random.default_rng(3).choice(off, count, replace=False) if count else off


def _orders(shape: tuple[int, ...]) -> Iterator[_Order]:
    for axis, length in enumerate(shape):
        if length > 1:
            yield from _orders_of_axis(shape, axis)
    straight = tuple(range(len(shape)))
    for axes in itertools.permutations(straight) if 2 < len(shape) < 6 else ():
        if axes != straight:
            what = f"axes stand in the order {', '.join(map(str, axes))} of the right ones"
            yield _Order("transpose", what, shape, axes)
    for a, b in itertools.combinations(range(len(shape)), 2):
        if shape[a] > 1 and shape[b] > 1:
            yield from _orders_of_two(shape, a, b)


def _orders_of_axis(shape: tuple[int, ...], axis: int) -> Iterator[_Order]:
    before, length, behind = shape[:axis], shape[axis], shape[axis + 1 :]
    along = f"along axis {axis}"
    place = range(len(shape))
    yield _Order("permutation", f"axis {axis} runs backwards", shape, tuple(place), (axis,))
    for factors in _factors(length):
        sizes, cut = (*before, *factors, *behind), " x ".join(map(str, factors))
        own = tuple(range(axis, axis + len(factors)))
        for turned in itertools.permutations(own):
            axes = (*range(axis), *turned, *range(own[-1] + 1, len(sizes)))
            other = " x ".join(str(sizes[number]) for number in turned)
            if turned != own:
                what = f"{along} numbers stand as {other} where they should stand as {cut}"
                yield _Order("permutation", what, sizes, axes)
        if len(factors) == 2:
            straight = tuple(range(len(sizes)))
            what = f"{along} blocks of {factors[1]} stand in reverse order"
            yield _Order("permutation", what, sizes, straight, (axis,))
            what = f"{along} each block of {factors[1]} runs backwards"
            yield _Order("permutation", what, sizes, straight, (axis + 1,))
        elif factors[1] == 2:
            what = f"{along} neighbouring blocks of {factors[2]} have changed places"
            yield _Order("permutation", what, sizes, tuple(range(len(sizes))), (axis + 1,))


def _factors(length: int) -> Iterator[tuple[int, ...]]:
    """Ways to write a length as a product of two, or of three of which one is small."""
    divisors = [number for number in range(2, length) if length % number == 0]
    for first in divisors[:_MOST_FACTORS]:
        yield first, length // first
    for first, second in itertools.product(divisors[:_MOST_FACTORS], repeat=2):
        third, rest = divmod(length, first * second)
        if rest == 0 and third > 1 and any(size in _SMALL for size in (first, second, third)):
            yield first, second, third


def _orders_of_two(shape: tuple[int, ...], a: int, b: int) -> Iterator[_Order]:
    """Two axes read in each other's order, wholly or with a factor of one of them."""
    axes = list(range(len(shape)))
    axes[a], axes[b] = b, a
    words = "have changed places" if shape[a] == shape[b] else "lie in memory in each other's order"
    yield _Order("transpose", f"axes {a} and {b} {words}", shape, tuple(axes))
    for axis, other in ((a, b), (b, a)):
        for factors in itertools.islice(_factors(shape[axis]), _MOST_FACTORS):
            if len(factors) != 2:
                continue
            sizes = (*shape[:axis], *factors, *shape[axis + 1 :])
            place = other + (other > axis)
            own = sorted((place, axis, axis + 1))
            cut = f"{factors[0]} x {factors[1]}"
            what = f"axis {axis}, which is {cut}, was taken apart or joined across axis {other}"
            for turned in itertools.permutations(own):
                order = list(range(len(sizes)))
                for number, source in zip(own, turned, strict=True):
                    order[number] = source
                moved = order.index(axis + 1) - order.index(axis)
                if order != sorted(order) and moved != 1:
                    yield _Order("transpose", what, sizes, tuple(order))


# Numbers that were only moved.


def moved(case: Case) -> Clue | None:
    """Both sides hold exactly the numbers they were given, and the order differs."""
    if case.ratio < 8.0 or not 32 <= case.r.size <= _MOST_ELEMENTS:
        return None
    order = rearranged(case)
    if order is not None and order.score >= _NAMED:
        return None  # an order with a name says more
    for name, right, wrong in _shared(case):
        sides = case.r, right, case.c, wrong
        if not _only_moved(*sides) or _same_order(*sides):
            continue
        if (pads := uneven(case)) is not None:
            what = f"it holds the tokens of '{name}' at other places, and {pads.sentence}"
            return Clue("mask", 0.95, what, "moved")
        what = f"it holds the numbers of '{name}', every one of them, in another order"
        return _of_rows(case, name) or Clue("permutation", 0.95, what, "moved")
    return None


def _only_moved(r: F64, right: F64, c: F64, wrong: F64) -> bool:
    """Whether both sides are rearrangements of what they were given, but for zeros around it.

    Equal to the last bit: so many equal numbers are no chance in any format.
    """
    if min(right.size, wrong.size) < 32 or max(right.size, wrong.size) > r.size:
        return False
    return all(
        np.array_equal(np.sort(made[made != 0.0]), np.sort(source[source != 0.0]))
        for made, source in ((r, right), (c, wrong))
    )


def _same_order(r: F64, right: F64, c: F64, wrong: F64) -> bool:
    """Whether both sides put the numbers that they were given into the same order.

    A container that returns the result of one of its parts does so: the part is off, not the order.
    """
    r, right, c, wrong = (tensor.reshape(-1) for tensor in (r, right, c, wrong))
    places, sources = np.flatnonzero(r), np.flatnonzero(right)
    places = places[np.argsort(r[places], kind="stable")]
    sources = sources[np.argsort(right[sources], kind="stable")]
    return right.size == wrong.size and np.array_equal(c[places], wrong[sources])


def _of_rows(case: Case, name: str) -> Clue | None:
    """Whole tokens at other places, in blocks that stayed together: a shift."""
    r, c = case.rows(case.r), case.rows(case.c)
    if case.r.ndim > 3 or r.shape[1] < 4 or not 2 <= len(r) <= _MOST_ROWS:
        return None
    off = np.flatnonzero(np.einsum("ij,ij->i", c - r, c - r) > 0.0)
    sources = np.arange(len(r), dtype=np.intp)
    sources[off] = nearest(r, c[off])
    if case.r.ndim < 2 or case.explained(r[sources].reshape(case.r.shape)) < _NAMED:
        return None
    off = off[np.any(c[off] != 0.0, axis=1)]  # empty places have come from anywhere
    neighbours: Flags = np.diff(sources[off]) == np.diff(off)
    if np.count_nonzero(neighbours) < _TOGETHER * max(neighbours.size, 1):
        return None
    what = f"it holds the tokens of '{name}', every one of them, at other places"
    return Clue("shift", 0.95, what, "moved")


def nearest(r: F64, wanted: F64) -> Places:
    """The row of a tensor that is nearest to each of some rows."""
    size = np.einsum("ij,ij->i", r, r)
    return np.asarray(np.argmin(size[None, :] - 2.0 * (wanted @ r.T), axis=1), dtype=np.intp)


def picked(case: Case) -> Clue | None:
    """Both sides pick rows of the same tensor, and other ones."""
    if case.ratio < 8.0 or case.r.ndim < 2 or case.r.shape[-1] < 8:
        return None
    r, c = case.rows(case.r), case.rows(case.r + case.e)
    for name, right, wrong in _shared(case):
        if not _may_hold(case, right, wrong):
            continue
        rows = case.rows(right) if right.shape == case.r.shape else right.reshape(-1, r.shape[1])
        places = nearest(rows, r), nearest(wrong.reshape(rows.shape), c)
        if not _are(case, rows[places[0]], r) or not np.any(places[0] != places[1]):
            continue
        score = case.explained(
            (case.rows(case.r) + rows[places[1]] - rows[places[0]]).reshape(case.r.shape)
        )
        apart = np.unique(places[1] - places[0])
        if len(apart) == 1:
            what = (
                f"of '{name}' it takes the token that stands {int(apart[0]):+d} from the right one"
            )
            return Clue("shift", score, what, f"{int(apart[0]):+d}")
        first = int(np.argmax(places[0] != places[1]))
        what = (
            f"{int(np.count_nonzero(places[0] != places[1]))} of {len(r)} rows hold what belongs "
            f"to other tokens of '{name}': row {first} has row {int(places[1][first])} of it in "
            f"place of row {int(places[0][first])}"
        )
        return Clue("stale", score, what, "rows")
    return None


def _shared(case: Case) -> Iterator[tuple[str, F64, F64]]:
    """Tensors that both sides had, latest first, by name."""
    for rights, wrongs in case.sources:
        for name in reversed(list(rights)):
            if name in wrongs:
                yield name, rights[name], wrongs[name]


def _may_hold(case: Case, right: F64, wrong: F64) -> bool:
    if right.shape != wrong.shape or right.ndim < 2 or right.shape[-1] != case.r.shape[-1]:
        return False
    rows = right.size // right.shape[-1]
    return rows > 1 and right.shape != case.r.shape and rows <= _MOST_ROWS


def _are(case: Case, rows: F64, r: F64) -> bool:
    left = float(np.sum((rows - r) ** 2))
    return left <= (1e-10 + (2.0 * case.noise) ** 2) * case.size


def pooled(case: Case) -> Clue | None:
    """Both sides add up tokens of one tensor, with other shares: pads in a mean, other tokens.

    The shares of every sample are fitted on one half of the channels and judged on the other.
    """
    if case.ratio < 8.0 or case.r.ndim != 2 or not 1 <= len(case.r) <= _MOST_SAMPLES:
        return None
    c = case.r + case.e
    for name, right, wrong in _shared(case):
        if right.shape != wrong.shape or right.ndim != 3:
            continue
        if (right.shape[0], right.shape[2]) != case.r.shape or 4 * right.shape[1] > right.shape[2]:
            continue
        shares, made = _shares(right, case.r)
        others, _ = _shares(wrong, c)
        if shares is None or others is None:
            continue
        score = case.explained(case.r - made + np.einsum("bt,btc->bc", others, right))
        counts = [np.count_nonzero(np.abs(x) > 0.01 * np.abs(x).max()) for x in (shares, others)]
        what = (
            f"of '{name}' it adds up {counts[1]} tokens in all, where the reference adds up "
            f"{counts[0]}, with shares of {float(others.max()):.3g} and {float(shares.max()):.3g} "
            "at most"
        )
        cause = "mask" if counts[0] != counts[1] else "scale"
        return Clue(cause, score, what, "shares")
    return None


def _shares(tokens: F64, made: F64) -> tuple[F64 | None, F64]:
    """What is taken of every token of every sample, and what that gives; None if it does not."""
    shares = np.stack(
        [solve(x[:, ::2].T, y[::2]) for x, y in zip(tokens, made, strict=True)], axis=0
    )
    again = np.einsum("bt,btc->bc", shares, tokens)
    left = again[:, 1::2] - made[:, 1::2]
    enough = _MADE * float(np.sum(made[:, 1::2] ** 2))
    return (shares if float(np.sum(left * left)) <= enough else None), again
