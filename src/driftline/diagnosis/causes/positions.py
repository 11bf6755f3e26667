"""Tables of angles by position: cosines and sines with another base, pace or first position.

A table is one if it is the cosine or sine of positions times frequencies that fall geometrically.
Both sides are read so; the parameter that differs is the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue

_BASES = tuple(10.0 ** (power / 8.0) for power in range(8, 65))
_PACES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
_OFFSETS = (-2.0, -1.0, 1.0, 2.0)
_FITS = 1e-4


class _Table(NamedTuple):
    """Parameters of a table of angles.

    Attributes:
        wave: Cosine or sine.
        layout: How frequencies are repeated along the last axis.
        base: Of the geometric series.
        pace: What positions are multiplied by.
        first: What is added to positions.
    """

    wave: Callable[[F64], F64]
    layout: str
    base: float
    pace: float = 1.0
    first: float = 0.0

    def values(self, positions: F64, width: int) -> F64:
        count = width if self.layout == "once" else width // 2
        frequencies = self.base ** (-np.arange(count) / count)
        if self.layout == "halves":
            frequencies = np.concatenate([frequencies, frequencies])
        elif self.layout == "neighbours":
            frequencies = np.repeat(frequencies, 2)
        angles = (positions * self.pace + self.first)[..., None] * frequencies
        return np.asarray(self.wave(angles), np.float64)


def angles(case: Case) -> Clue | None:
    """The parameter of a table of angles that is another one."""
    if case.r.ndim < 2 or case.r.shape[-1] < 4 or case.ratio < 1.5:
        return None
    if not (np.abs(case.r) <= 1.01).all():
        return None
    for positions in _positions(case):
        right = _read(case, case.r, positions)
        if right is not None:
            clues = _mistakes(case, right, positions)
            return max(clues, key=lambda clue: clue.score, default=None)
    return None


def _positions(case: Case) -> Iterator[F64]:
    rows = case.r.shape[:-1]
    for codes in case.codes.values():
        values = codes.astype(np.float64)
        if values.shape == rows:
            yield values
        elif values.size == rows[-1]:
            yield np.broadcast_to(values.reshape(-1), rows)
    yield np.broadcast_to(np.arange(rows[-1], dtype=np.float64), rows)


def _read(case: Case, values: F64, positions: F64) -> _Table | None:
    """The table that gives these values; None if none does."""
    width, size = values.shape[-1], float(np.sum(values * values))

    def left(table: _Table) -> float:
        return float(np.sum((table.values(positions, width) - values) ** 2))

    tables = [
        _Table(wave, layout, base)
        for wave in (np.cos, np.sin)
        for layout in (("once", "halves", "neighbours") if width % 2 == 0 else ("once",))
        for base in _BASES
    ]
    best = _refined(min(tables, key=left), "base", left)
    return best if left(best) <= (_FITS + (3.0 * case.noise) ** 2) * size else None


def _refined(table: _Table, name: str, left: Callable[[_Table], float]) -> _Table:
    """A table with one parameter searched over thirds, around where it is."""
    middle = math.log(float(getattr(table, name)))
    low, high = middle - 0.4, middle + 0.4
    for _ in range(24):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        ends = [left(table._replace(**{name: math.exp(end)})) for end in (a, b)]
        if ends[0] > ends[1]:
            low = a
        else:
            high = b
    return table._replace(**{name: math.exp((low + high) / 2)})


def _mistakes(case: Case, right: _Table, positions: F64) -> Iterator[Clue]:
    width = case.r.shape[-1]
    exact = right.values(positions, width)

    def made(table: _Table) -> F64:
        return case.r + table.values(positions, width) - exact

    def left(table: _Table) -> float:
        return float(np.sum(np.where(case.finite, case.c - made(table), 0.0) ** 2))

    base = _refined(min((right._replace(base=b) for b in _BASES), key=left), "base", left)
    yield Clue(
        "positions",
        case.explained(made(base)),
        f"it has angles of base {base.base:.6g} in place of {right.base:.6g}",
        "base",
    )
    pace = _refined(min((right._replace(pace=p) for p in _PACES), key=left), "pace", left)
    yield Clue(
        "positions",
        case.explained(made(pace)),
        f"it has angles of positions that are taken {pace.pace:.4g} times",
        "pace",
    )
    for first in _OFFSETS:
        yield Clue(
            "shift",
            case.explained(made(right._replace(first=first))),
            f"it has the angles of {abs(first):g} positions {'after' if first > 0 else 'before'}",
            "first",
        )
    for wave in (np.cos, np.sin):
        if wave is not right.wave:
            yield Clue(
                "permutation",
                case.explained(made(right._replace(wave=wave))),
                "cosines and sines have changed places",
                "wave",
            )
