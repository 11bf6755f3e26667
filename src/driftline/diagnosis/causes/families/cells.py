"""Cells of recurrences, computed again from what their linear maps gave at every step.

A cell of four gates keeps a part of its state, takes in a part of a new one, and shows a part of
what it holds. Which quarter of the channels is which gate, the function that a gate goes through
and a constant before or behind it are read off the reference; then one of them is changed at a
time. A cell of three gates mixes its state with a new one, and is read in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue

_MOST_STEPS, _MOST_ELEMENTS, _MOST_STREAMS = 64, 1 << 17, 6
_LIKELY = 4
"""Orders of gates that are tried with constants: those that come nearest without."""
_CONSTANTS = (-4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0)
_ROUNDS = 24
_LEAST = 0.01
"""A smaller constant is none."""

_BENDS: Mapping[str, Callable[[F64], F64]] = {
    "a sigmoid": lambda x: 1.0 / (1.0 + np.exp(-np.clip(x, -500.0, 500.0))),
    "a line of slope 0.2 between zero and one": lambda x: np.clip(0.2 * x + 0.5, 0.0, 1.0),
    "a line of slope 1/6 between zero and one": lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0),
}
_GATES = ("keeps the state", "takes in the new", "shows the state")


class _Cell(NamedTuple):
    """How four gates make a state.

    Attributes:
        order: Which quarter keeps, takes in, shows, and is the new state.
        bend: The function that gates go through.
        shown: Whether the output is what is shown of the state, or the state itself.
        gate: The gate that has a constant.
        behind: Whether it is added behind the function.
        constant: The constant.
    """

    order: tuple[int, ...]
    bend: str = "a sigmoid"
    shown: bool = True
    gate: int = 0
    behind: bool = False
    constant: float = 0.0

    def of(self, parts: F64) -> F64:
        """What the cell gives at every step, [steps, samples, states], from a state of zeros.

        Args:
            parts: What the linear maps gave, [steps, samples, 4, states].
        """
        bend = _BENDS[self.bend]
        gates: list[F64] = []
        for number, quarter in enumerate(self.order[:3]):
            before = parts[:, :, quarter]
            own = self.constant if number == self.gate else 0.0
            gates.append(bend(before) + own if self.behind else bend(before + own))
        keeps, takes, shows = gates
        new = takes * np.tanh(parts[:, :, self.order[3]])
        states = np.empty_like(new)
        state = np.zeros(new.shape[1:])
        for step in range(len(new)):
            state = keeps[step] * state + new[step]
            states[step] = state
        return shows * np.tanh(states) if self.shown else states

    @property
    def told(self) -> str:
        """The constant in words."""
        if abs(self.constant) < _LEAST:
            return "no constant"
        side = "behind" if self.behind else "before"
        return f"{self.constant:.4g} added {side} the function of the gate that {_GATES[self.gate]}"


def cell(case: Case) -> Clue | None:
    """A constant of a gate, its function, or an order of gates that is another."""
    if case.ratio < 4.0 or case.r.ndim not in (2, 3) or not 16 <= case.r.size <= _MOST_ELEMENTS:
        return None
    if not case.finite.all():
        return None
    for right_parts, wrong_parts, is_last in _gates(case):
        r, c = (_by_step(side, is_last) for side in (case.r, case.r + case.e))
        if len(right_parts) < len(r) or right_parts.shape[1::2] != r.shape[1:]:
            continue
        enough = (1e-9 + (3.0 * case.noise) ** 2) * float(np.sum(r * r))
        right = _read(right_parts, r, enough)
        if right is None:
            continue
        exact, energy = right.of(right_parts)[-len(r) :], float(np.sum((c - r) ** 2))
        best: tuple[float, str, _Cell] | None = None
        for cause, wrong in _mistakes(right, wrong_parts, c):
            made = r + wrong.of(wrong_parts)[-len(r) :] - exact
            left = float(np.sum((c - made) ** 2))
            if best is None or left < best[0]:
                best = left, cause, wrong
        # Nothing but noise may be left: a constant is fitted.
        if best is None or best[0] > 0.1 * energy or best[0] > 4.0 * enough + 1e-4 * energy:
            return None
        left, cause, wrong = best
        return Clue(cause, min(1.0 - left / energy, 0.99), _words(cause, right, wrong), "cell")
    return _mixed(case)


def _words(cause: str, right: _Cell, wrong: _Cell) -> str:
    if cause == "offset":
        return f"its cell has {wrong.told}, where the reference's has {right.told}"
    if cause == "activation":
        return (
            f"gates of its cell go through {wrong.bend}, those of the reference's through "
            f"{right.bend}"
        )
    order = ", ".join(str(number + 1) for number in wrong.order)
    had = ", ".join(str(number + 1) for number in right.order)
    return (
        f"its cell keeps, takes in, shows and makes anew by quarters {order} of its channels, the "
        f"reference's by {had}"
    )


def _by_step(side: F64, is_last: bool) -> F64:
    return side[None] if is_last else side.transpose(1, 0, 2)


def _gates(case: Case) -> Iterator[tuple[F64, F64, bool]]:
    """What linear maps gave to four gates at every step, of both sides.

    They are laid out as [steps, samples, 4, states], with whether the case is the last step alone.
    Maps of the input give all steps at once, those of the state are called for each; what both give
    is added up.
    """
    for chosen in _streams(case, 4):
        right, wrong = (np.sum([side[number] for side in chosen], axis=0) for number in (0, 1))
        yield right, wrong, case.r.ndim == 2


def _streams(case: Case, gates: int) -> Iterator[tuple[tuple[F64, F64], ...]]:
    """Both sides of one or two linear maps, each as [steps, samples, gates, states]."""
    states, samples = case.r.shape[-1], len(case.r)
    streams: list[tuple[F64, F64]] = []
    called = 0
    for r, c in case.calls.values():
        if r.ndim == 3 and r.shape[1:] == (samples, gates * states):
            streams.append((r, c))
            called = len(r)
    for name, c in case.parts.items():
        r = case.right_parts.get(name, c)
        if c.ndim == 3 and c.shape[::2] == (samples, gates * states) and r.shape == c.shape:
            streams.append((r.transpose(1, 0, 2), c.transpose(1, 0, 2)))
    streams = streams[:_MOST_STREAMS]
    for chosen in [*itertools.combinations(streams, 2), *((stream,) for stream in streams)]:
        steps = min(len(r) for r, _ in chosen)
        # Steps that are not reached yet do not count.
        if (called and steps > called) or not 2 <= steps <= _MOST_STEPS:
            continue
        if case.r.ndim == 2 or case.r.shape[1] == steps:
            shape = (steps, samples, gates, states)
            yield tuple((r[:steps].reshape(shape), c[:steps].reshape(shape)) for r, c in chosen)


def _read(parts: F64, made: F64, enough: float) -> _Cell | None:
    """The cell that gives some values; None if none does."""

    def left(cell: _Cell) -> float:
        return float(np.sum((cell.of(parts)[-len(made) :] - made) ** 2))

    cells = [
        _Cell(order, shown=shown)
        for order in itertools.permutations(range(4))
        for shown in (True, False)
    ]
    rated = sorted((left(cell), number) for number, cell in enumerate(cells))
    if rated[0][0] <= enough:
        return cells[rated[0][1]]
    likely = [cells[number] for _, number in rated[:_LIKELY]]
    for bend in list(_BENDS)[1:]:
        for cell in cells:
            if left(other := cell._replace(bend=bend)) <= enough:
                return other
    for cell in likely:
        for other in _with_constants(cell, left):
            if left(other) <= enough:
                return other
    return None


def _with_constants(cell: _Cell, left: Callable[[_Cell], float]) -> Iterator[_Cell]:
    """The cell with the best constant at every place where one may be."""
    for gate, behind in itertools.product(range(3), (False, True)):
        placed = cell._replace(gate=gate, behind=behind)
        start = min(_CONSTANTS, key=lambda x, own=placed: left(own._replace(constant=x)))
        low, high = sorted((start / 2.0, start * 2.0))
        for _ in range(_ROUNDS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            if left(placed._replace(constant=a)) > left(placed._replace(constant=b)):
                low = a
            else:
                high = b
        yield placed._replace(constant=(low + high) / 2)


def _mistakes(right: _Cell, parts: F64, made: F64) -> Iterator[tuple[str, _Cell]]:
    def left(cell: _Cell) -> float:
        return float(np.sum((cell.of(parts)[-len(made) :] - made) ** 2))

    for order in itertools.permutations(range(4)):
        if order != right.order:
            yield "permutation", right._replace(order=order)
    for bend in _BENDS:
        if bend != right.bend:
            yield "activation", right._replace(bend=bend)
    if abs(right.constant) >= _LEAST:
        yield "offset", right._replace(constant=0.0)
    for wrong in _with_constants(right, left):
        yield "offset", wrong


# Cells of three gates.


class _Mixer(NamedTuple):
    """How three gates make a state.

    Attributes:
        order: Which third resets, mixes, and is the new state.
        backwards: Whether what the mixing gate keeps of the state it takes of the new one.
    """

    order: tuple[int, ...]
    backwards: bool

    def of(self, inputs: F64, back: F64) -> F64:
        """What the cell gives at every step, from what input and state gave to the gates."""
        reset, mix, new = self.order
        bend = _BENDS["a sigmoid"]
        state, states = np.zeros(inputs[0, :, 0].shape), np.empty(inputs[:, :, 0].shape)
        for step, (x, h) in enumerate(zip(inputs, back, strict=True)):
            made = np.tanh(x[:, new] + bend(x[:, reset] + h[:, reset]) * h[:, new])
            kept = bend(x[:, mix] + h[:, mix])
            kept = 1.0 - kept if self.backwards else kept
            state = kept * state + (1.0 - kept) * made
            states[step] = state
        return states


def _mixed(case: Case) -> Clue | None:
    cells = [
        _Mixer(order, backwards)
        for order in itertools.permutations(range(3))
        for backwards in (False, True)
    ]
    r, c = (_by_step(side, case.r.ndim == 2) for side in (case.r, case.r + case.e))
    enough = (1e-9 + (3.0 * case.noise) ** 2) * float(np.sum(r * r))
    for streams in _streams(case, 3):
        for first, second in itertools.permutations(streams) if len(streams) == 2 else ():
            made = [
                [cell.of(first[side], second[side])[-len(r) :] for cell in cells] for side in (0, 1)
            ]
            left = [
                [float(np.sum((state - values) ** 2)) for state in some]
                for some, values in zip(made, (r, c), strict=True)
            ]
            right, wrong = (int(np.argmin(some)) for some in left)
            if max(left[0][right], left[1][wrong]) > enough or right == wrong:
                continue
            if cells[right].backwards != cells[wrong].backwards:
                what = "its mixing gate keeps of the state what it should take of the new one"
                return Clue("activation", 0.98, what, "cell")
            orders = [", ".join(str(n + 1) for n in cells[n].order) for n in (wrong, right)]
            what = (
                f"its cell resets, mixes and makes anew by thirds {orders[0]} of its channels, "
                f"the reference's by {orders[1]}"
            )
            return Clue("permutation", 0.98, what, "cell")
    return None
