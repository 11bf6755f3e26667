"""An activation that is another function by less than noise: its error follows the difference.

GELU and its tanh form differ by less than the rounding of 16 bits, but the same way at the same
input every time. Asked only of modules that are a known function of their input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.artefacts import Replay
from driftline.diagnosis.causes.activation import FUNCTIONS
from driftline.diagnosis.reading import F64, chosen_rows, is_readable, read_rows
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

_ACTIVATION = re.compile(r"(?i)gelu|silu|swish|activation|mish|tanh|sigmoid|softplus")
COARSEST = 2.0**-11
"""Unit roundoff of float16, the coarsest format asked: the rounding of bfloat16 has a bias that
follows such a difference by itself (a fused GELU does, and is right)."""
_TRUSTED, _FULL, _SURE = 0.3, 0.15, 16.0


class Follows(NamedTuple):
    """How an error follows the difference of two functions: 1 is all of it, 0 none.

    Attributes:
        other: The function that it follows.
        times: How much of the difference.
        z: That over its standard error.
        halves: z on either half of the rows, in units of what is asked.
    """

    other: str
    times: float
    z: float
    halves: tuple[float, float]

    @property
    def excess(self) -> float:
        return self.z / _SURE


def another_function(
    candidate: Run,
    replay: Replay,
    records: Sequence[Record],
    exact: Mapping[TensorKey, Record],
    native: Mapping[TensorKey, Record],
) -> Follows | None:
    """Of a module's first call: whether it is another function than the reference's."""
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
    return follows(*tensors)


def follows(x: F64, right: F64, candidate: F64, trusted: F64) -> Follows | None:
    """The other function that the candidate computes, on both halves of the rows; None for none.

    Args:
        x: What it was given, [rows, channels].
        right: Its exact result.
        candidate: The candidate's result.
        trusted: That of a trusted module in the candidate's format.
    """
    if x.shape != right.shape or len(x) < 8:
        return None
    made = {name: function(x) for name, function in FUNCTIONS.items()}
    size = float(np.sum(right * right))
    is_one = min(made, key=lambda name: float(np.sum((made[name] - right) ** 2)))
    if not size > 0.0 or float(np.sum((made[is_one] - right) ** 2)) > 1e-8 * size:
        return None
    best: Follows | None = None
    for name, values in made.items():
        p = values - right
        if name == is_one or float(np.sum(p * p)) > 1e-4 * size:
            continue  # so far apart that the size of the error shows it
        if abs(_times(trusted - right, p)[0]) > _TRUSTED:
            continue
        halves = [_times((candidate - right)[at::2], p[at::2]) for at in (0, 1)]
        if all(abs(times - 1.0) < _FULL and z > _SURE for times, z in halves):
            times, z = _times(candidate - right, p)
            if best is None or z > best.z:
                best = Follows(name, times, z, (halves[0][1] / _SURE, halves[1][1] / _SURE))
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
