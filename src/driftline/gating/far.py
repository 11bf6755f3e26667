"""Rows so far off that more is asked than their numbers, and the columns of what is found then.

What looks it up reads tensors and graphs, and is loaded only where a row is far off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from driftline.comparison.row import Column, Row
from driftline.numerics.dtypes import DType
from driftline.tolerance.defaults import LIMITS, METRIC, coarsest
from driftline.tolerance.scales import BEYOND, BEYOND_ROUNDING

GRADIENTS = ("optimizer_grad", "param_grad")
"""Ports of parameters' gradients."""
SUMMED = "summed_l2"
CANCELLED = "cancelled_l2"
BEYOND_COLUMN = Column(BEYOND, "lower", "relative L2 without what a bias of no gradient adds")
SUMMED_COLUMN = Column(SUMMED, "none", "norm of what was added up to get the reference")
CANCELLED_COLUMN = Column(CANCELLED, "none", "what rounding explains of gradients that cancel")
BEYOND_ROUNDING_COLUMN = Column(
    BEYOND_ROUNDING, "lower", "relative L2 without elements whose gradient is rounding"
)
_FEW = 16
"""So many roundings are nobody's fault."""


def is_asked(row: Row) -> bool:
    """Whether any evidence is looked for."""
    return is_far_output(row) or is_far_moved(row) or is_far_cancelled(row)


def any_asked(largest: Mapping[tuple[str, str], float], *, after_the_first_step: bool) -> bool:
    """Whether `is_asked` can be true of any row, by the largest error of each two types."""
    for types, error in largest.items():
        dtype = coarsest(types)
        if dtype is None:
            continue
        if error > (_few(dtype) if after_the_first_step else LIMITS[dtype.name]):
            return True
    return False


def is_far_output(row: Row) -> bool:
    """An output of a later step that differs by more than a few roundings."""
    if row.key.port != "output" or row.key.phase == "backward":
        return False
    if row.key.step == 0 or row.basis != "values":
        return False
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None:
        return False
    return _few(dtype) < row.metrics.get(METRIC, 0.0) < math.inf


def is_far_moved(row: Row) -> bool:
    """A row that no limit of its format holds, of an operator or a node."""
    if row.key.port not in ("input", "output", "param") or "/" not in row.key.site:
        return False
    return _is_far(row)


def is_far_sum(row: Row) -> bool:
    """As `is_far_moved`, of a result."""
    return row.key.port == "output" and is_far_moved(row)


def is_far_cancelled(row: Row) -> bool:
    """A gradient that a norm or a softmax sends back, and that no limit of its format holds."""
    if row.key.port != "grad_input":
        return False
    return ("Norm" in row.class_name or row.class_name.endswith("Softmax")) and _is_far(row)


def is_bias(slot: str) -> bool:
    """Whether a parameter is a layer's bias; `b_0` is Paddle's name of it."""
    return slot in ("bias", "b_0")


def _few(dtype: DType) -> float:
    return min(_FEW * dtype.unit_roundoff, LIMITS[dtype.name])


def _is_far(row: Row) -> bool:
    if row.basis != "values":
        return False
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    return dtype is not None and LIMITS[dtype.name] < row.metrics.get(METRIC, 0.0) < math.inf
