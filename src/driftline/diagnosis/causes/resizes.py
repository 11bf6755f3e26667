"""Pictures and tables of positions that are resized: which grid, which weights.

A resize is a product with one matrix for every axis. A few grids and weights are in use; both sides
are read as one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue

_MOST_ELEMENTS = 1 << 18


class _Resize(NamedTuple):
    """One way to resize.

    Attributes:
        grid: Where the places of the output lie.
        weights: How places of the input are weighed.
        smooth: Whether weights are as wide as the steps, where these are wide.
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
        at = np.arange(made) * pace
        if self.grid == "of middles that meet":
            at = (np.arange(made) + 0.5) * pace - 0.5
        wide = max(pace, 1.0) if self.smooth else 1.0
        if self.weights == "the place before":
            return np.eye(length)[np.clip(np.floor(at + 1e-9), 0, length - 1).astype(np.intp)]
        if self.weights == "the nearest place":
            return np.eye(length)[np.clip(np.rint(at), 0, length - 1).astype(np.intp)]
        taps = np.arange(-math.ceil(2 * wide) - 1, length + math.ceil(2 * wide) + 1)
        shares = _WEIGHTS[self.weights]((taps[None] - at[:, None]) / wide)
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
    """Another grid, or other weights, of a resize."""
    if case.ratio < 4.0 or case.r.ndim < 2 or case.r.size > _MOST_ELEMENTS:
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
    """A tensor whose axes can be resized to a shape: one or two of them differ."""
    if x.ndim != len(shape) or x.size > _MOST_ELEMENTS or not np.isfinite(x).all():
        return
    differing = [axis for axis in range(x.ndim) if x.shape[axis] != shape[axis]]
    if 1 <= len(differing) <= 2 and all(min(x.shape[axis], shape[axis]) > 1 for axis in differing):
        yield x


def _nearest(case: Case, side: F64, made: list[tuple[_Resize, F64]]) -> tuple[_Resize, F64] | None:
    best = min(made, key=lambda entry: float(np.sum((entry[1] - side) ** 2)))
    left = float(np.sum((best[1] - side) ** 2))
    return best if left <= (1e-8 + (3.0 * case.noise) ** 2) * case.size else None
