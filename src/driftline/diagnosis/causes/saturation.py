"""Values stop at a largest one, or run over it into infinity."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue
from driftline.numerics.dtypes import DTYPES

_LARGEST = (448.0, 240.0, 57344.0, 65504.0, 127.0, 128.0)


def saturation(case: Case) -> Clue | None:
    """`c = clip(r)` at values that occur several times, or Inf where r is too large to be told."""
    over = np.isinf(case.c) & np.isfinite(case.r)
    if over.any():
        largest = min(abs(DTYPES[case.dtype].lowest) or np.inf, 3.4e38)
        limit = 65504.0 if largest > 65504.0 else largest
        beyond = float(np.abs(case.r[over]).min())
        if beyond >= 0.98 * limit:
            return Clue(
                "saturation",
                0.95,
                f"values of {beyond:.4g} and more became infinite: beyond {limit:g}",
                "overflow",
            )
        return None
    if case.ratio < 2.0 or case.c.size < 16:
        return None
    high, low = float(np.max(case.c)), float(np.min(case.c))
    at_high = int(np.count_nonzero(case.c == high))
    at_low = int(np.count_nonzero(case.c == low))
    top = high if at_high >= 3 and float(np.max(case.r)) > 1.01 * abs(high) else np.inf
    bottom = low if at_low >= 3 and float(np.min(case.r)) < -1.01 * abs(low) else -np.inf
    if high == low or (not np.isfinite(top) and not np.isfinite(bottom)):
        return None
    share = case.explained(np.clip(case.r, bottom, top))
    bounds = " and ".join(f"{value:.5g}" for value in (bottom, top) if np.isfinite(value))
    known = next((value for value in _LARGEST if abs(high) == value or abs(low) == value), None)
    of = f", the largest of its kind ({known:g})" if known else ""
    many = (at_high if np.isfinite(top) else 0) + (at_low if np.isfinite(bottom) else 0)
    return Clue("saturation", share, f"{many} values stop at {bounds}{of}", "clipped")
