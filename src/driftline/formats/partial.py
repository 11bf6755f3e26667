"""A summary of which only a few numbers are known, as statistics-only dumps leave it."""

from __future__ import annotations

import math
from typing import cast

from driftline.numerics.fields import Summary


def partial_summary(
    count: int,
    *,
    low: float = math.nan,
    high: float = math.nan,
    mean: float = math.nan,
    std: float = math.nan,
    l2: float = math.nan,
) -> Summary:
    """What is not known is NaN, counts of zeros and non-finite elements too; there is no sketch."""
    unknown = cast("int", math.nan)
    return Summary(count, low, high, mean, std, l2, unknown, unknown, unknown, unknown)
