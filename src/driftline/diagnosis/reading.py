"""Tensors of a run as rows of channels, with a bound on how much of one is ever held.

A row is a token (all axes but the last one are tokens, heads, sequences); a large tensor gives an
even sample of its rows. Knows nothing of what the numbers are for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

F64 = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

ELEMENTS = 1 << 18
"""Elements of one tensor that are decoded at most."""


def index(run: Run) -> Mapping[TensorKey, Record]:
    """Every record of a run by its key."""
    return {record.key: record for record in run.records}


def is_readable(run: Run, record: Record | None) -> bool:
    """Whether all values of a floating tensor are there."""
    if record is None or record.kept != "full" or run.lost(record):
        return False
    dtype = DTYPES.get(record.dtype)
    return dtype is not None and dtype.kind == "float" and dtype.bits >= 8 and 0 not in record.shape


def rows_and_channels(shape: tuple[int, ...]) -> tuple[int, int]:
    """How a tensor is looked at: its last axis are the channels, everything before it rows.

    >>> rows_and_channels((2, 16, 64))
    (32, 64)
    """
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def chosen_rows(shape: tuple[int, ...], elements: int = ELEMENTS) -> Places:
    """Which rows are read: all of a small tensor, an even sample of a large one."""
    rows, channels = rows_and_channels(shape)
    most = max(8, elements // max(channels, 1))
    if rows <= most:
        return np.arange(rows, dtype=np.intp)
    # An odd stride would still meet every parity of every axis; a plain linspace does too.
    return np.unique(np.linspace(0, rows - 1, most).astype(np.intp))


def read_rows(run: Run, record: Record, places: Places) -> F64 | None:
    """Some rows of a tensor as float64, [rows, channels]; None when its bytes cannot be read."""
    rows, channels = rows_and_channels(record.shape)
    try:
        raw: npt.NDArray[Any] = run.raw(record)
    except (DriftlineError, OSError, ValueError):
        return None
    if raw.size != rows * channels:
        return None
    part = raw.reshape(rows, channels)
    if len(places) != rows:
        part = part[places]
    return np.asarray(to_float64(part, DTYPES[record.dtype]), dtype=np.float64)


def read_whole(run: Run, record: Record | None, elements: int = 16 * ELEMENTS) -> F64 | None:
    """A tensor in its own shape as float64; None when it is too large or not there."""
    if record is None or not is_readable(run, record) or math.prod(record.shape) > elements:
        return None
    try:
        raw = run.raw(record)
    except (DriftlineError, OSError, ValueError):
        return None
    decoded = np.asarray(to_float64(raw, DTYPES[record.dtype]), dtype=np.float64)
    return decoded.reshape(record.shape)


def rounded(values: F64, name: str) -> F64:
    """Values rounded to a float format, to nearest even, as float64 again.

    >>> float(rounded(np.array([1.0 + 2.0**-8]), "bfloat16")[0])
    1.0
    """
    if name == "float64":
        return values
    if name == "float32":
        return values.astype(np.float32).astype(np.float64)
    if name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float64)
    mantissa, least = _GRIDS[name]
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(values)
        step = np.ldexp(1.0, np.maximum(exponent - 1, least) - mantissa)
        return np.rint(values / step) * step


_GRIDS = {
    "bfloat16": (7, -126),
    "tf32": (10, -126),
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "float8_e4m3fnuz": (3, -7),
    "float8_e5m2fnuz": (2, -15),
}
"""Stored mantissa bits and least exponent of formats numpy has no type for."""

GRIDS = ("float32", "float16", "tf32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Formats a value may have been rounded to, finest first."""
