"""Sliding windows of convolutions and pools, and resizes: borders, steps, distances, grids.

The reference's output is expressed as a function of windows of an input: their mean, their maximum,
or a product with a kernel, which is taken from the captured weights or solved for. Then the border,
its filling, the distance of the taps, the direction of the kernel and the elements that a mean
counts are changed one at a time. The change that gives the candidate's output is the mistake.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.linear_solve import solve

_WIDEST, _MOST_TAPS, _MOST_ROWS = 8, 512, 1024
_MOST_ELEMENTS, _MOST_SAMPLES = 1 << 17, 4
_MOST_FITTED, _NEARLY = 3, 0.3
_KERNEL = "kernel"
_FILLINGS = ("zeros", "mirrored values", "the last values", "values of the other end")


class _Window(NamedTuple):
    """The places of an input from which each output is computed.

    Attributes:
        kind: `kernel`, or how the values of a window are combined.
        width: Number of places along each axis.
        step: Step from one output to the next (the stride).
        before: Width of the border before the first place (the padding).
        distance: Distance from one place of a window to the next (the dilation).
        filling: Values of the border.
        backwards: Whether the kernel is applied in reverse order.
    """

    kind: str
    width: int
    step: int
    before: int
    distance: int = 1
    filling: str = _FILLINGS[0]
    backwards: bool = False

    def places(self, x: F64, shape: tuple[int, ...]) -> F64:
        """The windows of an input, [samples, channels, outputs, places]; border zeros are NaN."""
        axes = x.ndim - 2
        for axis in range(axes):
            length = x.shape[2 + 2 * axis]
            index = np.arange(shape[2 + axis])[:, None] * self.step - self.before
            index = index + np.arange(self.width) * self.distance
            inside, filled = (index >= 0) & (index < length), _filled(index, length, self.filling)
            x = np.take(x, filled.reshape(-1), axis=2 + 2 * axis)
            x = x.reshape(*x.shape[: 2 + 2 * axis], *index.shape, *x.shape[3 + 2 * axis :])
            if self.filling == _FILLINGS[0]:
                behind = (1,) * (x.ndim - 4 - 2 * axis)
                x = np.where(inside.reshape(*index.shape, *behind), x, np.nan)
        order = (0, 1, *range(2, x.ndim, 2), *range(3, x.ndim, 2))
        return x.transpose(order).reshape(*x.shape[:2], math.prod(shape[2:]), -1)

    def made(self, x: F64, shape: tuple[int, ...], kernel: F64 | None) -> F64:
        """The output, [samples, channels, ...]; that of a kernel lacks the bias."""
        places = self.places(x, shape)
        border = np.isnan(places)
        zeros = np.where(border, 0.0, places)
        if kernel is not None:
            turned = kernel[..., ::-1] if self.backwards else kernel
            if turned.ndim == 2:  # a depthwise convolution
                return np.einsum("bcnk,ck->bcn", zeros, turned).reshape(shape)
            return np.einsum("bcnk,ock->bon", zeros, turned, optimize=True).reshape(shape)
        if self.kind == "largest":
            return np.where(border, -np.inf, places).max(axis=-1).reshape(shape)
        count = float(places.shape[-1])
        if self.kind == "mean without the border":
            count = np.maximum(np.count_nonzero(~border, axis=-1), 1)
        return (zeros.sum(axis=-1) / count).reshape(shape)


def _filled(index: npt.NDArray[np.intp], length: int, filling: str) -> npt.NDArray[np.intp]:
    if filling == _FILLINGS[1] and length > 1:
        turns = np.abs(index) % (2 * length - 2)
        return np.where(turns < length, turns, 2 * length - 2 - turns)
    if filling == _FILLINGS[3]:
        return index % length
    return np.clip(index, 0, length - 1)


def window(case: Case) -> Clue | None:
    """The border, distance, direction or count of sliding windows that differs."""
    if case.ratio < 4.0 or case.r.ndim not in (3, 4) or not case.finite.all():
        return None
    samples = len(case.r)
    case = replace(case, r=case.r[:_MOST_SAMPLES], c=case.c[:_MOST_SAMPLES])
    r = case.r
    for x in case.inputs.values():
        if x.ndim != r.ndim or len(x) != samples:
            continue
        x = x[:_MOST_SAMPLES]
        if not np.isfinite(x).all() or min(x.shape[2:]) < 3 or min(r.shape[2:]) < 2:
            continue
        if max(x.size, r.size) > _MOST_ELEMENTS:
            continue
        read = next(_readings(case, x), None)
        if read is not None:
            right, kernel = read
            clues = _mistakes(case, x, right, kernel)
            return max(clues, key=lambda clue: clue.score, default=None)
    return None


def _readings(case: Case, x: F64) -> Iterator[tuple[_Window, F64 | None]]:
    """Yield windows that give the reference's output, with their kernels; narrow ones first."""
    r = case.r
    enough = (1e-8 + (3.0 * case.noise) ** 2) * case.size
    rated: list[tuple[float, _Window]] = []
    for shape in _shapes(x, r):
        for left, read, kernel in _read(case, x, shape):
            if left <= enough:
                yield read, kernel
            rated.append((left, shape))
    # Windows that fit except at the border are tried with other fillings.
    rated.sort(key=lambda entry: entry[0])
    for left, shape in rated[:_MOST_FITTED]:
        for filling in _FILLINGS[1:]:
            if shape.before and left < _NEARLY * case.size:
                for rest, read, kernel in _read(case, x, shape._replace(filling=filling)):
                    if rest <= enough:
                        yield read, kernel


def _read(case: Case, x: F64, shape: _Window) -> Iterator[tuple[float, _Window, F64 | None]]:
    """Yield the squared error of each way to combine a window, with the window and its kernel."""
    r = case.r
    if shape.width > 1 and x.shape[1] == r.shape[1]:
        for kind in ("mean", "mean without the border", "largest"):
            pool = shape._replace(kind=kind)
            left = pool.made(x, r.shape, None) - r
            if np.isfinite(left).all():
                yield float(np.sum(left * left)), pool, None
    for kernel in _kernels(case, x, shape):
        left = shape.made(x, r.shape, kernel) - r
        left = left - left.mean(axis=(0, *range(2, r.ndim)), keepdims=True)
        yield float(np.sum(left * left)), shape, kernel


def _shapes(x: F64, r: F64) -> Iterator[_Window]:
    first, made = x.shape[2], r.shape[2]
    steps = sorted({max(1, first // made), max(1, -(-first // made))})
    for width, step in itertools.product(range(1, _WIDEST + 1), steps):
        for distance in (1, 2) if width > 1 else (1,):
            reach = (width - 1) * distance
            middle = (width - 1) // 2 * distance
            # A causal window may look ahead by any number of places, whatever their distance;
            # windows of pictures are not causal.
            edges = range(0, reach + 1, 1 if x.ndim == 3 else distance)
            for edge in sorted(edges, key=lambda number, own=middle: abs(number - own)):
                # All windows must be inside the input, except for the border.
                last = (made - 1) * step - edge + reach
                if last - first < width * distance and last >= first - step - width:
                    yield _Window(_KERNEL, width, step, edge, distance)


def _kernels(case: Case, x: F64, shape: _Window) -> Iterator[F64]:
    """Yield the captured kernel, or kernels that are solved for on some rows."""
    axes, taps = case.r.ndim - 2, shape.width ** (case.r.ndim - 2)
    channels, made = x.shape[1], case.r.shape[1]
    weight = case.params.get("weight")
    if weight is not None and weight.ndim == case.r.ndim:
        if weight.shape[2:] != (shape.width,) * axes or weight.shape[0] != made:
            return
        flat = weight.reshape(made, weight.shape[1], taps)
        if weight.shape[1] == channels:
            yield flat
        elif weight.shape[1] == 1 and channels == made:
            yield flat[:, 0]
        return
    places = np.nan_to_num(shape.places(x, case.r.shape))
    count = places.shape[0] * places.shape[2]
    by_output = case.r.reshape(case.r.shape[0], made, -1)
    ones = np.ones((count, 1))
    every = max(1, count // _MOST_ROWS)
    if channels * taps <= _MOST_TAPS and count >= 2 * channels * taps:
        rows = places.transpose(0, 2, 1, 3).reshape(count, -1)
        values = by_output.transpose(0, 2, 1).reshape(count, made)
        rows, values = np.hstack([rows, ones])[::every], values[::every]
        if _is_nearly_linear(rows, values):
            yield solve(rows, values)[:-1].T.reshape(made, channels, taps)
    if channels == made > 1 and count >= 2 * taps:
        # The kernel of a depthwise convolution; all channels are solved for at once.
        rows = places.transpose(1, 0, 2, 3).reshape(channels, count, -1)
        rows = rows - rows.mean(axis=1, keepdims=True)
        values = by_output.transpose(1, 0, 2).reshape(channels, count, 1)
        squares = rows.transpose(0, 2, 1) @ rows
        squares = squares + 1e-12 * np.trace(squares, axis1=1, axis2=2)[:, None, None] * np.eye(
            taps
        )
        if squares.any(axis=(1, 2)).all():
            yield np.linalg.solve(squares, rows.transpose(0, 2, 1) @ values)[..., 0]


def _is_nearly_linear(rows: F64, values: F64) -> bool:
    """Whether a linear map of the rows leaves little enough of the values.

    The normal equations are less exact than a least-squares solution, and take a fifth of its time.
    """
    squares: F64 = rows.T @ rows
    squares = squares + 1e-12 * float(np.trace(squares)) * np.eye(len(squares))
    kernel = np.asarray(np.linalg.solve(squares, rows.T @ values), dtype=np.float64)
    left = values - rows @ kernel
    return float(np.sum(left * left)) < _NEARLY * float(np.sum(values * values))


def _mistakes(case: Case, x: F64, right: _Window, kernel: F64 | None) -> Iterator[Clue]:
    exact = right.made(x, case.r.shape, kernel)

    def clue(cause: str, wrong: _Window, what: str) -> Clue:
        predicted = case.r + wrong.made(x, case.r.shape, kernel) - exact
        if not np.isfinite(predicted).all():
            return Clue(cause, 0.0, what)
        return Clue(cause, case.explained(predicted), what, "window")

    reach = (right.width - 1) * right.distance
    for before in range(reach + 1):
        if before != right.before:
            what = (
                f"its windows begin {before} places before their first in place of {right.before}"
            )
            yield clue("shift", right._replace(before=before), what)
    for filling in _FILLINGS:
        if filling == right.filling:
            continue
        what = f"its border holds {filling} in place of {right.filling}"
        yield clue("shift", right._replace(filling=filling), what)
    for distance in (1, 2, 3, 4):
        if distance != right.distance and right.width > 1:
            before = right.before // right.distance * distance
            what = f"places of its windows lie {distance} apart in place of {right.distance}"
            yield clue("positions", right._replace(distance=distance, before=before), what)
    if kernel is not None:
        what = "its kernel is applied from its end"
        yield clue("permutation", right._replace(backwards=True), what)
        return
    for kind in ("mean", "mean without the border"):
        if kind != right.kind != "largest":
            what = f"of its windows it takes the {kind} in place of the {right.kind}"
            yield clue("scale", right._replace(kind=kind), what)


# Resizes of pictures and of position tables. A resize is a product with one matrix per axis. Only a
# few grids and weights are in use, and each side is matched with one of them.


_MOST_RESIZED = 1 << 18


class _Resize(NamedTuple):
    """One way to resize.

    Attributes:
        grid: How the places of the output are aligned with those of the input.
        weights: How places of the input are weighted.
        smooth: Whether the weights are widened to the step when the size is reduced (antialiasing).
    """

    grid: str
    weights: str
    smooth: bool

    def of(self, x: F64, shape: tuple[int, ...]) -> F64:
        for axis, (length, made) in enumerate(zip(x.shape, shape, strict=True)):
            if length != made:
                x = np.moveaxis(np.moveaxis(x, axis, -1) @ self.matrix(length, made).T, -1, axis)
        return x

    def matrix(self, length: int, made: int) -> F64:
        pace = length / made
        if self.grid == "of ends that meet":
            pace = (length - 1) / max(made - 1, 1)
        positions = np.arange(made) * pace
        if self.grid == "of middles that meet":
            positions = (np.arange(made) + 0.5) * pace - 0.5
        wide = max(pace, 1.0) if self.smooth else 1.0
        if self.weights == "the place before":
            return np.eye(length)[
                np.clip(np.floor(positions + 1e-9), 0, length - 1).astype(np.intp)
            ]
        if self.weights == "the nearest place":
            return np.eye(length)[np.clip(np.rint(positions), 0, length - 1).astype(np.intp)]
        taps = np.arange(-math.ceil(2 * wide) - 1, length + math.ceil(2 * wide) + 1)
        shares = _WEIGHTS[self.weights]((taps[None] - positions[:, None]) / wide)
        inside = (taps >= 0) & (taps < length)
        if self.smooth:
            shares = np.where(inside, shares, 0.0)
        shares = shares / shares.sum(axis=1, keepdims=True)
        matrix = np.zeros((made, length))
        for tap, share in zip(np.clip(taps, 0, length - 1), shares.T, strict=True):
            matrix[:, tap] += share
        return matrix

    def __str__(self) -> str:
        smooth = ", smoothed" if self.smooth else ""
        return f"with {self.weights} on a grid {self.grid}{smooth}"


def _cubic(a: float) -> Callable[[F64], F64]:
    def weights(far: F64) -> F64:
        x = np.abs(far)
        near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        return np.where(
            x < 1.0, near, np.where(x < 2.0, a * (((x - 5.0) * x + 8.0) * x - 4.0), 0.0)
        )

    return weights


_WEIGHTS: dict[str, Callable[[F64], F64]] = {
    "linear weights": lambda far: np.maximum(1.0 - np.abs(far), 0.0),
    "cubic weights of -0.75": _cubic(-0.75),
    "cubic weights of -0.5": _cubic(-0.5),
    "cubic weights of -1": _cubic(-1.0),
}
_WAYS = tuple(
    _Resize(grid, weights, smooth)
    for grid, weights, smooth in itertools.product(
        ("of middles that meet", "of ends that meet", "of first places that meet"),
        ("the place before", "the nearest place", *_WEIGHTS),
        (False, True),
    )
    if not smooth or (weights in _WEIGHTS and grid == "of middles that meet")
)


def resize(case: Case) -> Clue | None:
    """The grid or the weights of a resize that differ."""
    if case.ratio < 4.0 or case.r.ndim < 2 or case.r.size > _MOST_RESIZED:
        return None
    for x in {**case.inputs, **case.parts, **case.params}.values():
        for source in _turned(x, case.r.shape):
            made = [(way, way.of(source, case.r.shape)) for way in _WAYS]
            right, wrong = (_nearest(case, side, made) for side in (case.r, case.c))
            if right is None or wrong is None or right[0] == wrong[0]:
                continue
            what = f"it is resized {wrong[0]}, where the reference is {right[0]}"
            return Clue("positions", case.explained(case.r + wrong[1] - right[1]), what, "resize")
    return None


def _turned(x: F64, shape: tuple[int, ...]) -> Iterator[F64]:
    """Yield the tensor if it can be resized to a shape: one or two of its axes differ."""
    if x.ndim != len(shape) or x.size > _MOST_RESIZED or not np.isfinite(x).all():
        return
    differing = [axis for axis in range(x.ndim) if x.shape[axis] != shape[axis]]
    if 1 <= len(differing) <= 2 and all(min(x.shape[axis], shape[axis]) > 1 for axis in differing):
        yield x


def _nearest(case: Case, side: F64, made: list[tuple[_Resize, F64]]) -> tuple[_Resize, F64] | None:
    best = min(made, key=lambda entry: float(np.sum((entry[1] - side) ** 2)))
    left = float(np.sum((best[1] - side) ** 2))
    return best if left <= (1e-8 + (3.0 * case.noise) ** 2) * case.size else None
