"""Activations that compute another function, although the difference is smaller than the noise.

They are found because the error follows the difference between the two functions. This file reads
a module's input, its exact result, the candidate's result and that of a trusted module, on some
rows of its first call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.error_stats import F64, chosen_rows, is_readable, read_rows
from driftline.comparison.evidence.leaf_functions import ACTIVATIONS
from driftline.diagnosis.causes.values import GRID, grid_share
from driftline.diagnosis.evidence.files import Replay
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_ACTIVATION = re.compile(r"(?i)gelu|silu|swish|activation|mish|tanh|sigmoid|softplus")
FINEST, COARSEST = 2.0**-20, 2.0**-11
"""Unit roundoffs of the formats in which a slope of the error is evidence.

In bfloat16 it is not: its rounding has a bias that follows such a difference even in correct code,
such as a fused GELU.
"""
# Largest slope of a trusted module on the other function's difference; how near to 1 the
# candidate's slope must be; and how many standard errors the candidate's slope must have.
_TRUSTED, _FULL, _SURE = 0.3, 0.15, 16.0


class OtherFunction(NamedTuple):
    """The other function that a module computes.

    Attributes:
        other: Name of the function.
        excess: Strength of the evidence, in units of the required strength.
        halves: Strength of the evidence on each half of the rows.
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
) -> OtherFunction | None:
    """The function that a module computes instead of the reference's; None if there is none.

    Only the first readable call is examined.
    """
    readable = (r for r in records if is_readable(replay.exact, exact.get(r.key)))
    record = next(readable, None)
    if record is None:
        return None
    exact_record, trusted = exact.get(record.key), native.get(record.key)
    if not _ACTIVATION.search(record.class_name) or exact_record is None or trusted is None:
        return None
    key = record.key
    inputs = [
        other
        for other in candidate.records
        if other.key.port == "input" and other.key.same_call(key)
    ]
    if replay.native is None or len(inputs) != 1:
        return None
    sources = ((candidate, inputs[0]), (replay.exact, exact_record), (candidate, record))
    tensors: list[F64] = []
    for run, tensor_record in (*sources, (replay.native, trusted)):
        if tensor_record.shape != record.shape or not is_readable(run, tensor_record):
            return None
        values = read_rows(run, tensor_record, chosen_rows(record.shape))
        if values is None or not np.isfinite(values).all():
            return None
        tensors.append(values)
    # A complex result of a real input has two numbers per element.
    if len({values.shape for values in tensors}) != 1:
        return None
    x, right, made, native_made = tensors
    following = on_the_grid(x, right, made, native_made, record.dtype)
    if following is None and DTYPES[record.dtype].unit_roundoff <= COARSEST:
        following = follows(x, right, made, native_made)
    return following


def on_the_grid(
    x: F64, right: F64, candidate: F64, trusted: F64, dtype: str
) -> OtherFunction | None:
    """The other function whose results, rounded once, are the candidate's; None if there is none.

    Args:
        x: The module's input, [rows, channels].
        right: The module's exact result.
        candidate: The candidate's result.
        trusted: The result of a trusted module in the candidate's format.
        dtype: The candidate's format.
    """
    best: OtherFunction | None = None
    for name, values in _others(x, right):
        if grid_share(right, values, trusted, dtype) > _TRUSTED:
            continue  # the results of a trusted module would fit this function too
        shares = [
            grid_share(right[start::2], values[start::2], candidate[start::2], dtype)
            for start in (0, 1)
        ]
        if min(shares) > GRID and not any(map(math.isnan, shares)):
            over = shares[0] / GRID, shares[1] / GRID
            if best is None or min(over) > best.excess:
                best = OtherFunction(name, min(over), over)
    return best


def _others(x: F64, right: F64) -> list[tuple[str, F64]]:
    """Known functions that differ from the reference's too little for the error's size to show."""
    if x.shape != right.shape or len(x) < 8:
        return []
    made = {name: function(x) for name, function in ACTIVATIONS.items()}
    size = float(np.sum(right * right))
    is_one = min(made, key=lambda name: float(np.sum((made[name] - right) ** 2)))
    # The reference must be a known function itself; otherwise its difference from others means
    # nothing.
    if not size > 0.0 or float(np.sum((made[is_one] - right) ** 2)) > 1e-8 * size:
        return []
    return [
        (name, values)
        for name, values in made.items()
        if name != is_one and float(np.sum((values - right) ** 2)) <= 1e-4 * size
    ]


def follows(x: F64, right: F64, candidate: F64, trusted: F64) -> OtherFunction | None:
    """The other function that the candidate follows on both halves of the rows; None if none.

    Args:
        x: The module's input, [rows, channels].
        right: The module's exact result.
        candidate: The candidate's result.
        trusted: The result of a trusted module in the candidate's format.
    """
    best: OtherFunction | None = None
    for name, values in _others(x, right):
        p = values - right
        if abs(_times(trusted - right, p)[0]) > _TRUSTED:
            continue
        halves = [_times((candidate - right)[start::2], p[start::2]) for start in (0, 1)]
        if all(abs(times - 1.0) < _FULL and z > _SURE for times, z in halves):
            _, z = _times(candidate - right, p)
            if best is None or z / _SURE > best.excess:
                best = OtherFunction(name, z / _SURE, (halves[0][1] / _SURE, halves[1][1] / _SURE))
    return best


def _times(e: F64, p: F64) -> tuple[float, float]:
    """Slope of an error on a difference, and that slope in standard errors clustered by row."""
    power = float(np.sum(p * p))
    if not power > 0.0:
        return 0.0, 0.0
    slope = float(np.sum(e * p)) / power
    rest = np.einsum("ij,ij->i", e - slope * p, p)
    error = math.sqrt(float(rest @ rest)) / power
    return slope, slope / error if error > 0.0 else math.inf
