"""An activation that is another function by less than noise: its error follows the difference.

GELU and its tanh form differ by less than the rounding of 16 bits, but the same way at the same
input every time, and a fused kernel gives exactly the other's rounded results. Asked only of
modules that are a known function of their input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.artefacts import Replay
from driftline.diagnosis.causes.activation import FUNCTIONS, GRID, grid_share
from driftline.diagnosis.reading import F64, chosen_rows, is_readable, read_rows
from driftline.numerics.dtypes import DTYPES
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

_ACTIVATION = re.compile(r"(?i)gelu|silu|swish|activation|mish|tanh|sigmoid|softplus")
FINEST, COARSEST = 2.0**-20, 2.0**-11
"""Unit roundoff of the formats in which the slope is asked: the rounding of bfloat16 has a bias
that follows such a difference by itself (a fused GELU does, and is right)."""
_TRUSTED, _FULL, _SURE = 0.3, 0.15, 16.0


class Follows(NamedTuple):
    """The other function that a module computes.

    Attributes:
        other: Its name.
        excess: How sure that is, in units of what is asked.
        halves: The same on either half of the rows.
    """

    other: str
    excess: float
    halves: tuple[float, float]


def another_function(
    candidate: Run,
    replay: Replay,
    records: Sequence[Record],
    exact: Mapping[TensorKey, Record],
    native: Mapping[TensorKey, Record],
) -> Follows | None:
    """Of a module's first of these calls: whether it is another function than the reference's."""
    if not records:
        return None
    record = records[0]
    ours, trusted = exact.get(record.key), native.get(record.key)
    if not _ACTIVATION.search(record.class_name) or ours is None or trusted is None:
        return None
    key = record.key
    given = [
        other
        for other in candidate.records
        if other.key.port == "input" and other.key[0] == key[0] and other.key[3:7] == key[3:7]
    ]
    if replay.native is None or len(given) != 1:
        return None
    there = ((candidate, given[0]), (replay.exact, ours), (candidate, record))
    tensors: list[F64] = []
    for run, each in (*there, (replay.native, trusted)):
        if each.shape != record.shape or not is_readable(run, each):
            return None
        values = read_rows(run, each, chosen_rows(record.shape))
        if values is None or not np.isfinite(values).all():
            return None
        tensors.append(values)
    x, right, made, native_made = tensors
    found = on_the_grid(x, right, made, native_made, record.dtype)
    if found is None and DTYPES[record.dtype].unit_roundoff <= COARSEST:
        found = follows(x, right, made, native_made)
    return found


def on_the_grid(x: F64, right: F64, candidate: F64, trusted: F64, dtype: str) -> Follows | None:
    """The other function whose results, rounded once, are the candidate's; None for none.

    Args:
        x: What it was given, [rows, channels].
        right: Its exact result.
        candidate: The candidate's result.
        trusted: That of a trusted module in the candidate's format.
        dtype: That format.
    """
    best: Follows | None = None
    for name, values in _others(x, right):
        if grid_share(right, values, trusted, dtype) > _TRUSTED:
            continue  # a trusted module gives as much of it
        shares = [grid_share(right[at::2], values[at::2], candidate[at::2], dtype) for at in (0, 1)]
        if min(shares) > GRID and not any(map(math.isnan, shares)):
            over = shares[0] / GRID, shares[1] / GRID
            if best is None or min(over) > best.excess:
                best = Follows(name, min(over), over)
    return best


def _others(x: F64, right: F64) -> list[tuple[str, F64]]:
    """Known functions that differ from the reference's by too little to show in an error's size."""
    if x.shape != right.shape or len(x) < 8:
        return []
    made = {name: function(x) for name, function in FUNCTIONS.items()}
    size = float(np.sum(right * right))
    is_one = min(made, key=lambda name: float(np.sum((made[name] - right) ** 2)))
    if not size > 0.0 or float(np.sum((made[is_one] - right) ** 2)) > 1e-8 * size:
        return []
    return [
        (name, values)
        for name, values in made.items()
        if name != is_one and float(np.sum((values - right) ** 2)) <= 1e-4 * size
    ]


def follows(x: F64, right: F64, candidate: F64, trusted: F64) -> Follows | None:
    """The other function that the candidate computes, on both halves of the rows; None for none.

    Args:
        x: What it was given, [rows, channels].
        right: Its exact result.
        candidate: The candidate's result.
        trusted: That of a trusted module in the candidate's format.
    """
    best: Follows | None = None
    for name, values in _others(x, right):
        p = values - right
        if abs(_times(trusted - right, p)[0]) > _TRUSTED:
            continue
        halves = [_times((candidate - right)[at::2], p[at::2]) for at in (0, 1)]
        if all(abs(times - 1.0) < _FULL and z > _SURE for times, z in halves):
            _, z = _times(candidate - right, p)
            if best is None or z / _SURE > best.excess:
                best = Follows(name, z / _SURE, (halves[0][1] / _SURE, halves[1][1] / _SURE))
    return best


def _times(e: F64, p: F64) -> tuple[float, float]:
    """Slope of an error on a difference, and that over its standard error, clustered by row."""
    power = float(np.sum(p * p))
    if not power > 0.0:
        return 0.0, 0.0
    slope = float(np.sum(e * p)) / power
    rest = np.einsum("ij,ij->i", e - slope * p, p)
    error = math.sqrt(float(rest @ rest)) / power
    return slope, slope / error if error > 0.0 else math.inf
