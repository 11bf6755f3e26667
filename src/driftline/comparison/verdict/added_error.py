"""What a leaf that was computed again shows: whether it adds an error, and of which kind.

The figures are metrics of the row of its output (`evidence/recomputed.py`), so that shards, merged
parts and stored tables have them; this file reads them. Reads no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from driftline.comparison.evidence.rules import ADDED_BY_OWN_WEIGHTS, ADDED_PROJECTION
from driftline.comparison.table.row import Row
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.comparison.tolerance.tolerance import ADDED, ADDED_ALLOWED

Fault: TypeAlias = Literal["", "function", "weights", "format"]
"""Of a leaf: it computes something else; the same with other weights; its format is too coarse."""

_NEARLY_ALL = 0.5
"""Share of the error that must go with the candidate's own weights for these to be the fault."""


class AddedError(NamedTuple):
    """What a leaf adds by itself, on what the candidate gave it.

    Attributes:
        error: Relative to what the reference's function gives there.
        allowed: What right arithmetic in the candidate's formats may differ by.
        ratio: The one over the other; above 1 is outside.
        projection: The share of the result that is added: 0.05 for a result times 1.05.
        fault: What is wrong with it; empty if nothing is.
        format: The coarsest number format of its output.
    """

    error: float
    allowed: float
    ratio: float
    projection: float
    fault: Fault
    format: str

    @property
    def reason(self) -> str:
        """Why it is wrong, in words; empty for one that is right."""
        if self.fault == "weights":
            return "it computes the reference's function with other weights"
        if self.fault == "format":
            return too_coarse(self.format, self.error)
        if self.fault == "function":
            return "the reference's function gives something else on the same input"
        return ""


def too_coarse(format_name: str, error: float) -> str:
    """What is said of a format in which right arithmetic is off by so much."""
    return (
        f"{format_name} is too coarse here: rounding alone adds {error:.2g}; "
        "keep it in float32 here"
    )


def added_error(row: Row) -> AddedError | None:
    """What the leaf adds whose output this is; None if it was not computed again."""
    error, allowed = row.metrics.get(ADDED), row.metrics.get(ADDED_ALLOWED)
    if error is None or allowed is None:
        return None
    error, allowed = float(error), float(allowed)
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    fault: Fault = ""
    ratio = error / allowed if allowed > 0.0 else (math.inf if error > 0.0 else 0.0)
    if not ratio <= 1.0:
        by_own = float(row.metrics.get(ADDED_BY_OWN_WEIGHTS, math.inf))
        fault = "weights" if by_own <= max(allowed, _NEARLY_ALL * error) else "function"
    # Rounding explains it, and it is more than any site of this format may be off by.
    elif dtype is not None and error > LIMITS[dtype.name]:
        fault, ratio = "format", max(ratio, error / LIMITS[dtype.name])
    projection = float(row.metrics.get(ADDED_PROJECTION, math.nan))
    return AddedError(error, allowed, ratio, projection, fault, dtype.name if dtype else "")


def worst_added(rows: Iterable[Row]) -> AddedError | None:
    """The same of several outputs: the one that is furthest outside."""
    errors = [added for row in rows if (added := added_error(row)) is not None]
    return max(errors, key=lambda added: added.ratio, default=None)
