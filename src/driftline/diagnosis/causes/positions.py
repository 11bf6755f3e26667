"""Tables of angles by position: cosines and sines with another base, pace or first position.

A table is one if it is the cosine or sine of positions times frequencies that fall geometrically.
Both sides are read so; the parameter that differs is the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.comparison.evidence.error_stats import rounded
from driftline.diagnosis.causes.case import F64, Case, Clue, Flags

_BASES = tuple(10.0 ** (power / 8.0) for power in range(8, 65))
_PACES = (0.001, 0.01, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 100.0, 1000.0)
_MOST_READ = 128
_DIGITS = ("bfloat16", "float16")
_OFFSETS = (-2.0, -1.0, 1.0, 2.0)
_FITS = 1e-4


class _Table(NamedTuple):
    """Parameters of a table of angles.

    Attributes:
        wave: Cosine or sine; of a table that holds both, which comes first.
        layout: How frequencies are repeated along the last axis, and whether with both waves.
        base: Of the geometric series.
        pace: What positions are multiplied by.
        first: What is added to positions.
        digits: The number format that frequencies are rounded to; empty if they are not.
    """

    wave: Callable[[F64], F64]
    layout: str
    base: float
    pace: float = 1.0
    first: float = 0.0
    digits: str = ""

    def values(self, positions: F64, width: int) -> F64:
        count = width if self.layout == "once" else width // 2
        frequencies = self.base ** (-np.arange(count) / count)
        if self.digits:
            frequencies = rounded(frequencies, self.digits)
        turns = (positions * self.pace + self.first)[..., None] * frequencies
        first = np.asarray(self.wave(turns), np.float64)
        if self.layout == "once":
            return first
        # A table for vectors holds both waves, and one for rotations the same one twice.
        two_waves = self.layout.startswith("both")
        other = np.cos if self.wave is np.sin else np.sin
        second = np.asarray(other(turns), np.float64) if two_waves else first
        if self.layout.endswith("halves"):
            return np.concatenate([first, second], axis=-1)
        return np.stack([first, second], axis=-1).reshape(*turns.shape[:-1], width)


_LAYOUTS = ("once", "halves", "neighbours", "both in halves", "both in neighbours")


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


def frequencies(case: Case) -> Clue | None:
    """Tables of angles whose frequencies are others in some channels: stretched, or in parts."""
    if case.r.ndim < 2 or case.r.shape[-2] < 8 or case.r.shape[-1] > 512 or case.ratio < 1.5:
        return None
    if not (np.abs(case.r) <= 1.01).all():
        return None
    r, c = (x.reshape(-1, *x.shape[-2:])[0] for x in (case.r, case.c))
    tables = (x.reshape(-1, x.shape[-1])[0] for x in _positions(case) if np.ptp(x) > 0.0)
    stated = next(tables, None)
    for wave in (np.cos, np.sin):
        # Positions as they are stated, or those of several axes, as rows and columns are.
        clue = None if stated is None else _other_paces(case, (r, c), [stated], wave)
        if clue is None:
            some = slice(0, _MOST_TOKENS)
            axes = _fewest(case, r[some], _axes(case, r[some], wave), wave)
            few = replace(case, r=r[some], c=c[some], inputs={}, codes={})
            clue = _other_paces(few, (few.r, few.c), axes, wave) if axes else None
        if clue is not None:
            return clue
    return None


def _other_paces(
    case: Case, sides: tuple[F64, F64], axes: Sequence[F64], wave: Callable[[F64], F64]
) -> Clue | None:
    """Channels whose angles grow at another pace, or along another axis of positions."""
    right, wrong = (_by_channel(case, values, axes, wave) for values in sides)
    if right is None or wrong is None:
        return None
    made = wrong.table(wave) - right.table(wave)
    turned = right.axes != wrong.axes
    moved = turned | (np.abs(wrong.paces - right.paces) > 1e-3 * np.abs(right.paces))
    if not moved.any():
        return None
    if turned.any():
        what = (
            f"{int(turned.sum())} of {moved.size} channels have the angles of another axis of "
            "positions, as of rows for columns"
        )
    else:
        ratios = wrong.paces[moved] / np.maximum(right.paces[moved], 1e-300)
        what = (
            f"{int(moved.sum())} of {moved.size} channels have angles that grow "
            f"{float(ratios.min()):.4g} to {float(ratios.max()):.4g} times as fast"
        )
    return Clue("positions", case.explained(case.r + made), what, "frequencies")


def _axes(case: Case, table: F64, wave: Callable[[F64], F64]) -> list[F64]:
    """Positions along several axes: as the site was given them, or read off slow channels.

    The angle of a channel that turns less than half a circle follows from its cosine, and with it
    the positions along its axis, but for a factor.
    """
    # On a grid several tokens have one place along an axis; other numbers seldom repeat.
    repeats = [len(np.unique(column)) <= _REPEATS * len(column) for column in table.T]
    if table.shape[1] > _MOST_CHANNELS or np.mean(repeats) < 0.5:
        return []
    axes: list[F64] = []
    for codes in case.codes.values():
        rows = codes.reshape(-1, codes.shape[-1]) if codes.ndim > 1 else codes[None]
        if codes.shape[-1:] == table.shape[:1] and len(rows) <= _MOST_AXES:
            axes += [row.astype(np.float64) for row in rows if np.ptp(row) > 0]
        columns = codes.reshape(-1, codes.shape[-1]).T
        if len(columns) <= _MOST_AXES and columns.shape[1:] == table.shape[:1]:
            axes += [row.astype(np.float64) for row in columns if np.ptp(row) > 0]
    inverse = np.arccos if wave is np.cos else np.arcsin
    for column in table.T:
        angles = np.asarray(inverse(np.clip(column, -1.0, 1.0)), np.float64)
        if np.ptp(angles) > 1e-3 and (wave is np.cos or np.abs(angles).max() < 1.2):
            axes.append(angles / np.ptp(angles))
    return axes[-_MOST_TRIED:]  # slow channels come last


def _fewest(case: Case, table: F64, axes: Sequence[F64], wave: Callable[[F64], F64]) -> list[F64]:
    """The fewest axes along which all channels of a table turn; none if each needs its own.

    A channel follows itself, so an axis counts only if channels of several paces follow it.
    """
    columns = {column.tobytes(): column for column in np.ascontiguousarray(table.T)}
    distinct = np.stack([*columns.values()], axis=1)
    # Slow cosines are nearly one: what counts is what they vary by.
    sizes, varying = np.sum(distinct**2, axis=0), np.sum((distinct - distinct.mean(0)) ** 2, axis=0)
    follows: list[Flags] = []
    for positions in axes:
        left = _paces(distinct, positions, wave)[1]
        follows.append(left <= _FITS * varying + (3.0 * case.noise) ** 2 * sizes)
    chosen: list[F64] = []
    rest: Flags = np.ones(len(columns), dtype=np.bool_)
    while rest.any() and follows:
        counts = [int(np.count_nonzero(some & rest)) for some in follows]
        best = int(np.argmax(counts))
        if counts[best] < 2 or len(chosen) == _MOST_AXES:
            return []
        chosen.append(axes[best])
        rest &= ~follows[best]
    return chosen


class _Paces(NamedTuple):
    """How the angles of every channel of a table follow from positions.

    Attributes:
        positions: Along every axis, [axes, tokens].
        axes: Which axis each channel follows.
        paces: How fast its angle grows along it.
    """

    positions: F64
    axes: npt.NDArray[np.intp]
    paces: F64

    def table(self, wave: Callable[[F64], F64]) -> F64:
        return np.asarray(wave(self.positions[self.axes].T * self.paces), np.float64)


_MOST_AXES, _MOST_TRIED, _MOST_TOKENS, _MOST_CHANNELS = 4, 24, 256, 128
_REPEATS = 0.9
_PACES_TRIED = 2048


def _by_channel(
    case: Case, table: F64, axes: Sequence[F64], wave: Callable[[F64], F64]
) -> _Paces | None:
    """The axis and the pace of every channel of a table; None if some channel has none."""
    best = np.full(table.shape[1], np.inf)
    chosen, paces = np.zeros(table.shape[1], dtype=np.intp), np.zeros(table.shape[1])
    for number, positions in enumerate(axes):
        fitted, left = _paces(table, positions, wave)
        # Of axes that do as well, as where a channel hardly turns, the first.
        better = left < 0.5 * best
        best, chosen = np.where(better, left, best), np.where(better, number, chosen)
        paces = np.where(better, fitted, paces)
    enough = (_FITS + (3.0 * case.noise) ** 2) * float(np.sum(table * table))
    return _Paces(np.stack(axes), chosen, paces) if float(best.sum()) <= enough else None


def _paces(table: F64, positions: F64, wave: Callable[[F64], F64]) -> tuple[F64, F64]:
    """The pace of every channel along some positions, and its squared error."""
    paces = np.concatenate([[0.0], np.geomspace(1e-7, math.pi, _PACES_TRIED)])
    # Positions that are known but for a factor are as large as places are counted.
    if 0.0 < np.ptp(positions) <= 1.0:
        paces = paces * len(positions)
    waves = np.asarray(wave(positions[:, None] * paces))
    # Nearest by distance: the energies of the waves, less what they have in common.
    apart = np.einsum("ij,ij->j", waves, waves)[:, None] - 2.0 * (waves.T @ table)
    nearest = paces[np.argmin(apart, axis=0)]
    step = math.log(math.pi / 1e-7) / _PACES_TRIED
    low, high = nearest * math.exp(-step), nearest * math.exp(step)
    for _ in range(30):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        left = [np.sum((wave(positions[:, None] * x) - table) ** 2, axis=0) for x in (a, b)]
        worse = left[0] > left[1]
        low, high = np.where(worse, a, low), np.where(worse, high, b)
    middle = (low + high) / 2
    left = np.asarray(wave(positions[:, None] * middle)) - table
    return middle, np.einsum("ij,ij->j", left, left)


_MOST_PLACES, _VARIES = 0.8, 0.1


def by_place(case: Case) -> Clue | None:
    """What every place has added, whatever stands there: embeddings of positions.

    Half of the samples say what it is, the other half are judged by it.
    """
    if case.ratio < 4.0 or case.r.ndim < 3 or len(case.r) < 2 or not case.finite.all():
        return None
    first, rest = slice(0, None, 2), slice(1, None, 2)
    added = case.e[first].mean(axis=0)
    size = float(np.sum(added * added))
    axes = tuple(range(added.ndim - 1))
    # One constant per channel is a bias; and samples must differ to tell anything.
    varying = float(np.sum((added - added.mean(axis=axes)) ** 2))
    for axis in range(added.ndim - 1):
        # So is one constant per channel, where channels do not come last.
        others = tuple(number for number in range(added.ndim) if number != axis)
        left = float(np.sum((added - added.mean(axis=others, keepdims=True)) ** 2))
        varying = min(varying, left)
    places: F64 = np.sum(added * added, axis=-1)
    touched = np.count_nonzero(places > 0.01 * float(places.mean()))
    if touched < _MOST_PLACES * places.size:
        return None  # a matter of which places
    apart = float(np.sum((case.r - case.r.mean(axis=0)) ** 2))
    if varying <= _VARIES * size or apart <= 0.1 * case.size:
        return None
    judged = replace(
        case, r=case.r[rest], c=case.c[rest], inputs={}, parts={}, right_parts={}, spread={}
    )
    score = min(judged.fitted(judged.r + added), 0.98)
    what = "every place has something added that is the same for all samples"
    return Clue("positions", score, what, "places")


def _positions(case: Case) -> Iterator[F64]:
    rows = case.r.shape[:-1]
    for codes in case.codes.values():
        values = codes.astype(np.float64)
        if values.shape == rows:
            yield values
        elif values.size == rows[-1]:
            yield np.broadcast_to(values.reshape(-1), rows)
    for values in (*case.right_parts.values(), *case.inputs.values()):
        # Times may be no whole numbers.
        if values.shape == rows or (len(rows) == 1 and values.size == rows[0]):
            yield values.reshape(rows)
    yield np.broadcast_to(np.arange(rows[-1], dtype=np.float64), rows)


def _read(case: Case, values: F64, positions: F64) -> _Table | None:
    """The table that gives these values; None if none does."""
    width, size = values.shape[-1], float(np.sum(values * values))
    # Some rows tell which table it is; all of them whether it is that one.
    every = max(1, positions.size // _MOST_READ)
    some = positions.reshape(-1)[::every], values.reshape(-1, width)[::every]

    def left(table: _Table) -> float:
        return float(np.sum((table.values(some[0], width) - some[1]) ** 2))

    tables = [
        _Table(wave, layout, base)
        for wave in (np.cos, np.sin)
        for layout in (_LAYOUTS if width % 2 == 0 else _LAYOUTS[:1])
        for base in _BASES
    ]
    best = _refined(min(tables, key=left), "base", left)
    rest = float(np.sum((best.values(positions, width) - values) ** 2))
    return best if rest <= (_FITS + (3.0 * case.noise) ** 2) * size else None


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
    for digits in _DIGITS:
        yield Clue(
            "low-precision",
            case.explained(made(right._replace(digits=digits))),
            f"it has angles of frequencies that are rounded to {digits}",
            "digits",
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
    for layout in _LAYOUTS[1:]:
        if layout != right.layout != "once":
            yield Clue(
                "permutation",
                case.explained(made(right._replace(layout=layout))),
                f"its waves are laid out as {layout}, the reference's as {right.layout}",
                "layout",
            )
    for wave in (np.cos, np.sin):
        if wave is not right.wave:
            yield Clue(
                "permutation",
                case.explained(made(right._replace(wave=wave))),
                "cosines and sines have changed places",
                "wave",
            )
