"""What a row's error is a share of, where its own norm would say nothing.

A gradient that is zero by construction is nothing but rounding, and rounding is a share of what was
added up, not of what is left. Gating says in a row's `limit_from` that it was judged on such a
scale; whoever weighs errors afterwards asks here.
"""

from __future__ import annotations

import math

from driftline.comparison.row import Row
from driftline.tolerance.defaults import LIMITS, METRIC, coarsest

BEYOND = "beyond_bias"
"""Metric: what is left of an output's error without a bias that has no gradient."""
BEYOND_ROUNDING = "beyond_rounding"
"""Metric: what is left of an error without elements whose gradient is nothing but rounding."""
SUMMED_GRADIENTS = "of the gradients it sums"
SUMMED_ELEMENTS = "of the elements it sums"
BESIDE_WEIGHT = "beside the weight's gradient"
WHAT_CANCELS = "of the gradients that cancel"
AS_CANCELLED = "as a gradient that cancels"
AS_GIVEN = "as what it is given"

_OTHERS = (SUMMED_GRADIENTS, SUMMED_ELEMENTS, BESIDE_WEIGHT, AS_GIVEN, WHAT_CANCELS, AS_CANCELLED)


def is_on_another_scale(row: Row) -> bool:
    """Whether a row has passed on another scale than its own norm."""
    other = row.decided_by in (BEYOND, BEYOND_ROUNDING) or row.limit_from.endswith(_OTHERS)
    return other and row.status == "pass"


def error_on_scale(row: Row) -> float:
    """Relative L2 of a row, on the scale on which it has passed; NaN when it is not known.

    A share of the limit is a share of what the format allows, whatever the limit was made of.
    """
    if is_on_another_scale(row):
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        if dtype is not None:
            return row.severity * LIMITS[dtype.name]
    return float(row.metrics.get(METRIC, math.nan))
