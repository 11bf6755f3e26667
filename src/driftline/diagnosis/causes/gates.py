"""Products of an activation and what it lets through, and functions along other axes.

Both sides are read as members of one small family of functions of what the site was given: which
part of a tensor is the gate, which function it goes through, along which axis a row is taken. A
side is read if a member gives it to within noise; the parameter in which two readings differ is the
mistake. Nothing is fitted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.leaf_functions import ACTIVATIONS
from driftline.diagnosis.causes.case import F64, Case, Clue

_MOST_ROWS = 32
_MOST_CHANNELS = 1024
_MOST_TENSORS = 6
_MOST_ELEMENTS = 1 << 18
_EXACT, _AS_NEAR = 1e-9, 1.2


class Member(NamedTuple):
    """One function of the inputs.

    Attributes:
        settings: What it does, in words, by the cause that another word there has.
        values: Its result.
        source: Which of the tensors it is a function of, where settings do not say so.
    """

    settings: Mapping[str, str]
    values: F64
    source: int = 0

    def other_than(self, other: Member) -> list[str]:
        """The causes whose settings differ."""
        return [cause for cause in self.settings if self.settings[cause] != other.settings[cause]]


def gate(case: Case) -> Clue | None:
    """A gate that is read from another place, or goes through another function."""
    if case.ratio < 4.0 or case.r.ndim < 2 or case.r.size < 32:
        return None
    for axis in {case.r.ndim - 1, 1}:
        r, c = (_few(values, axis) for values in (case.r, case.c))
        for rights, wrongs in case.sources:
            members = (_gates(tensors, case.r.shape, axis) for tensors in (rights, wrongs))
            clue = compared(case, (r, c), *members)
            if clue is not None:
                return clue
    return None


def along_an_axis(case: Case) -> Clue | None:
    """Softmax and its like: of rows, along another axis, or of every element."""
    if case.ratio < 4.0 or case.r.ndim < 2 or case.r.size > _MOST_ELEMENTS:
        return None
    for rights, wrongs in case.sources:
        members = (_of_axes(tensors, case.r.shape) for tensors in (rights, wrongs))
        clue = compared(case, (case.r, case.c), *members)
        if clue is not None:
            return clue
    return None


def compared(
    case: Case, sides: tuple[F64, F64], rights: Iterator[Member], wrongs: Iterator[Member]
) -> Clue | None:
    """Read the reference among some members, and the candidate among those of its own inputs."""
    r, c = sides
    right = _read(case, r, rights)
    if right is None:
        return None
    members = list(wrongs)
    wrong = _read(case, c, members, right)
    same = next(
        (
            member.values
            for member in members
            if member.settings == right.settings and wrong and member.source == wrong.source
        ),
        None,
    )
    if wrong is None or same is None or wrong.settings == right.settings:
        return None
    energy, left = float(np.sum((c - r) ** 2)), float(np.sum((c - r - wrong.values + same) ** 2))
    other = right.other_than(wrong)
    noise = case.noise**2 * float(np.sum(r * r))
    if len(other) != 1 or energy <= 4.0 * noise:
        return None
    cause = other[0]
    what = f"it computes {_words(wrong)}, where the reference computes {_words(right)}"
    return Clue(cause, min(max((energy - left) / (energy - noise), 0.0), 1.0), what, "gate")


def _words(member: Member) -> str:
    return " ".join(member.settings.values())


def _read(
    case: Case, made: F64, members: Iterable[Member], like: Member | None = None
) -> Member | None:
    """The member that gives some values, to within noise; of equals the one most like another."""
    enough = (_EXACT + (3.0 * case.noise) ** 2) * float(np.sum(made * made))
    near: list[tuple[float, Member]] = []
    for member in members:
        if member.values.shape == made.shape:
            with np.errstate(all="ignore"):
                left = float(np.sum((member.values - made) ** 2))
            if left <= enough:
                near.append((left, member))
    least = min((left for left, _ in near), default=0.0)
    # In coarse formats some functions are the same but for rounding.
    alike = [entry for entry in near if entry[0] <= _AS_NEAR * least + _EXACT * enough]
    if like is not None:
        alike.sort(key=lambda entry: (len(entry[1].other_than(like)), entry[0]))
    else:
        alike.sort(key=lambda entry: entry[0])
    return alike[0][1] if alike else None


def _few(values: F64, axis: int) -> F64:
    """Some rows of an axis, [rows, channels]: enough to tell functions apart."""
    rows = np.moveaxis(values, axis, -1).reshape(-1, values.shape[axis])
    return np.where(np.isfinite(rows), rows, 0.0)[:: max(1, len(rows) // _MOST_ROWS)]


def _gates(tensors: Mapping[str, F64], shape: tuple[int, ...], axis: int) -> Iterator[Member]:
    """Products of two parts of a tensor, or of two tensors, one of them through a function."""
    width = shape[axis]
    if width > _MOST_CHANNELS:
        return
    full: dict[str, F64] = {}
    for name, x in tensors.items():
        if not np.isfinite(x).all():
            continue
        if x.shape == shape:
            full[name] = _few(x, axis)
        elif x.ndim == len(shape) and x.shape[axis] == 2 * width and x.size == 2 * np.prod(shape):
            rows = _few(x, axis)
            cuts = {
                "the two halves": (rows[:, :width], rows[:, width:]),
                "neighbouring channels": (rows[:, ::2], rows[:, 1::2]),
            }
            for cut, (first, second) in cuts.items():
                yield from _products(first, second, f"of the first of {cut} of '{name}'")
                yield from _products(second, first, f"of the second of {cut} of '{name}'")
    names = list(full)[-_MOST_TENSORS:]
    for gated in names:
        for through in names:
            if gated != through:
                yield from _products(full[gated], full[through], f"of '{gated}' (and '{through}')")


def _products(a: F64, b: F64, where: str) -> Iterator[Member]:
    for name, function in ACTIVATIONS.items():
        with np.errstate(all="ignore"):
            values = function(a) * b
        yield Member({"activation": name, "permutation": f"{where}, times the other"}, values)


def _of_axes(tensors: Mapping[str, F64], shape: tuple[int, ...]) -> Iterator[Member]:
    for name, x in tensors.items():
        if x.shape != shape or not np.isfinite(x).all():
            continue
        for axis, length in enumerate(shape):
            if length < 2:
                continue
            where = f"of '{name}' along axis {axis}"
            raised = np.exp(x - x.max(axis=axis, keepdims=True))
            total = raised.sum(axis=axis, keepdims=True)
            bent = 1.0 / (1.0 + np.exp(-x))
            sizes = np.sqrt(np.sum(x * x, axis=axis, keepdims=True))
            for label, values in {
                "softmax": raised / total,
                "log softmax": x - x.max(axis=axis, keepdims=True) - np.log(total),
                "sigmoids that add up to one": bent / bent.sum(axis=axis, keepdims=True),
                "vectors of length one": x / np.maximum(sizes, 1e-12),
                "sigmoid, of every number by itself,": bent,
                "nothing but the numbers": x,
            }.items():
                yield Member({"activation": label, "scale": where}, values)


# The first step of a recurrence, whose state was zero.


def recurrence(case: Case) -> Clue | None:
    """Gates of a recurrence that are read in another order."""
    if case.ratio < 8.0 or case.r.ndim != 2 or case.r.size < 32:
        return None
    for rights, wrongs in case.sources:
        members = (_steps(tensors, case.r.shape) for tensors in (rights, wrongs))
        clue = compared(case, (case.r, case.c), *members)
        if clue is not None:
            return clue
    return None


def _steps(tensors: Mapping[str, F64], shape: tuple[int, ...]) -> Iterator[Member]:
    rows, width = shape
    for count in (4, 3):
        sums: list[F64] = []
        for x in tensors.values():
            if not x.ndim or x.shape[-1] != count * width or len(x) != rows or x.ndim > 3:
                continue
            steps = [x] if x.ndim == 2 else [x[:, 0], x[:, -1]]
            # What the input gives and what the state gives are added up.
            sums += [*steps, *(first + other for first in sums for other in steps)]
        for number, gates in enumerate(sums):
            parts = gates.reshape(rows, count, width)
            for member in _four_gates(parts) if count == 4 else _three_gates(parts):
                yield member._replace(source=number)


def _four_gates(parts: F64) -> Iterator[Member]:
    bent, curved = 1.0 / (1.0 + np.exp(-parts)), np.tanh(parts)
    for take, new, show in itertools.permutations(range(4), 3):
        values = bent[:, show] * np.tanh(bent[:, take] * curved[:, new])
        order = f"input {take + 1}, candidate {new + 1}, output {show + 1}"
        yield Member(
            {"activation": "a state", "permutation": f"of gates in the order {order}"}, values
        )


def _three_gates(parts: F64) -> Iterator[Member]:
    bent, curved = 1.0 / (1.0 + np.exp(-parts)), np.tanh(parts)
    for keep, new in itertools.permutations(range(3), 2):
        order = f"of gates in the order update {keep + 1}, candidate {new + 1}"
        values = (1.0 - bent[:, keep]) * curved[:, new]
        yield Member({"activation": "a state", "permutation": order}, values)
        values = bent[:, keep] * curved[:, new]
        yield Member(
            {"activation": "a state with its update reversed", "permutation": order}, values
        )
