"""What goes on from token to token, and from one call to the next.

A running mean, a sum so far or a decaying state follows from itself one token before and from an
input; both sides are read so. A state that a call should go on from shows at its first tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.linear_solve import solve

_MOST_ELEMENTS, _MOST_TENSORS, _MOST_ROWS = 1 << 18, 4, 1 << 13
_ALIKE = 0.005
_MOST_CARRIED = 8


# From token to token.


class _Running(NamedTuple):
    """How a side follows from itself one place before, and from an input.

    Attributes:
        keeps: Of what was one place before.
        takes: Of the input.
        backwards: Whether it runs from the last place to the first.
    """

    keeps: float
    takes: float
    backwards: bool

    def of(self, x: F64, start: F64) -> F64:
        """All places, [..., places, channels], of which the first is known."""
        values = np.empty_like(x)
        order = range(x.shape[-2])
        state = start
        for number, place in enumerate(reversed(order) if self.backwards else order):
            state = self.keeps * state + self.takes * x[..., place, :] if number else start
            values[..., place, :] = state
        return values

    def __str__(self) -> str:
        way = "behind" if self.backwards else "before"
        return f"{self.keeps:.4g} of the token {way} and {self.takes:.4g} of its input"


def running(case: Case) -> Clue | None:
    """A running sum or mean that keeps another share, or runs the other way."""
    if case.ratio < 4.0 or not 32 <= case.r.size <= _MOST_ELEMENTS or case.r.ndim < 2:
        return None
    c = case.r + case.e
    for rights, wrongs in case.sources:
        for name in list(rights)[-_MOST_TENSORS:]:
            x, own = rights[name], wrongs.get(name)
            if own is None or x.shape != case.r.shape or own.shape != case.r.shape:
                continue
            for axis in sorted({1, case.r.ndim - 1}):
                if case.r.shape[axis] < 8 or not np.isfinite(x).all():
                    continue
                sides = [_laid(side, axis) for side in (case.r, x, c, own)]
                right = _read(case, *sides[:2])
                wrong = _read(case, *sides[2:]) if right is not None else None
                if right is None or wrong is None:
                    continue
                return _differing(case, right, wrong, sides, name)
    return None


def _laid(values: F64, axis: int) -> F64:
    return np.moveaxis(values[..., None] if axis == values.ndim - 1 else values, axis, -2)


def _read(case: Case, made: F64, x: F64) -> _Running | None:
    rows = made.size // made.shape[-2]
    size = float(np.sum(made * made))
    for backwards in (False, True):
        now, before = (
            (slice(0, -1), slice(1, None)) if backwards else (slice(1, None), slice(0, -1))
        )
        terms = np.stack([made[..., before, :].reshape(-1), x[..., now, :].reshape(-1)], axis=1)
        wanted = made[..., now, :].reshape(-1)
        every = max(1, rows * made.shape[-2] // _MOST_ROWS)
        keeps, takes = solve(terms[::every], wanted[::every])
        left = wanted - terms @ np.array([keeps, takes])
        if float(left @ left) <= (1e-9 + (3.0 * case.noise) ** 2) * size and abs(keeps) > _ALIKE:
            return _Running(float(keeps), float(takes), backwards)
    return None


def _differing(
    case: Case, right: _Running, wrong: _Running, sides: list[F64], name: str
) -> Clue | None:
    r, x, c, own = sides
    starts = [
        values[..., -1 if way.backwards else 0, :] for values, way in ((r, right), (c, wrong))
    ]
    apart = wrong.of(own, starts[1]) - right.of(x, starts[0])
    energy, left = float(np.sum((c - r) ** 2)), float(np.sum((c - r - apart) ** 2))
    if not energy > 0.0 or left > 0.1 * energy:
        return None
    what = f"every token is {wrong}, '{name}', where the reference's is {right}"
    if wrong.backwards != right.backwards:
        return Clue("permutation", 1.0 - left / energy, what, "backwards")
    pairs = ((right.keeps, wrong.keeps), (right.takes, wrong.takes))
    if all(abs(a - b) <= _ALIKE * max(abs(a), abs(b)) for a, b in pairs):
        what = "it runs on as the reference does, and begins with another state"
        return Clue("stale", 1.0 - left / energy, what, "state")
    return Clue("scale", 1.0 - left / energy, what, "running")


# From one call to the next.


def carried(case: Case) -> tuple[int, int] | None:
    """Axis and number of first places that the reference has from the end of the call before."""
    if case.earlier is None or case.r.ndim < 2:
        return None
    past, _ = case.earlier
    if past.ndim != case.r.ndim:
        return None
    for axis in range(1, case.r.ndim):
        r, before = (np.moveaxis(x, axis, -1) for x in (case.r, past))
        if r.shape[:-1] != before.shape[:-1]:
            continue
        for count in range(min(_MOST_CARRIED, r.shape[-1] - 1, before.shape[-1]), 0, -1):
            first, last = r[..., :count], before[..., -count:]
            # Equal but for rounding; a tensor of zeros would be carried by chance.
            size = float(np.sum(last * last))
            near = float(np.sum((first - last) ** 2)) <= (2.0 * case.noise) ** 2 * size
            if size > 0.0 and near:
                return axis, count
    return None


def state(case: Case) -> Clue | None:
    """What a call should go on from, the end of the call before, is another thing there."""
    place = carried(case)
    if place is not None:
        axis, count = place
        start = np.moveaxis(np.zeros(case.r.shape, dtype=np.bool_), axis, -1)
        start[..., :count] = True
        start = np.moveaxis(start, -1, axis)
        score = case.explained(np.where(start, case.c, case.r))
        if score >= 0.9:
            holds = "zeros" if not np.any(case.c[start]) else "something else"
            what = (
                f"the first {count} places of axis {axis} hold {holds}, where the reference has "
                "what the call before ended with"
            )
            return Clue("stale", score, what, "state")
    return _fading(case)


def _fading(case: Case) -> Clue | None:
    """A later call that is off from its first token on, and less and less."""
    if case.earlier is None or case.tokens is None or case.ratio < 8.0:
        return None
    right, made = case.earlier
    if right.shape != made.shape or right.ndim != case.r.ndim:
        return None
    apart, size = float(np.sum((made - right) ** 2)), float(np.sum(right * right))
    if apart > (3.0 * case.noise) ** 2 * size:
        return None  # the call before was wrong as well
    axis = case.tokens
    others = tuple(number for number in range(case.r.ndim) if number != axis)
    energy: F64 = np.sum(case.e * case.e, axis=others)
    quarter = len(energy) // 4
    if quarter < 2:
        return None
    parts = [float(energy[start : start + quarter].sum()) for start in _starts(len(energy))]
    falls = all(a > b for a, b in itertools.pairwise(parts))
    if not falls or parts[0] < 8.0 * parts[-1] or int(np.argmax(energy)) >= quarter:
        return None
    what = (
        "the call before was right, and this one is off from its first token on, less and less: "
        "it does not go on from where the call before ended"
    )
    return Clue("stale", 0.88, what, "state", measured=False)


def _starts(length: int) -> Iterator[int]:
    yield from range(0, 4 * (length // 4), length // 4)
