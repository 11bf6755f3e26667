"""NaN or Inf where the reference has numbers, and none went in."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def nan_birth(case: Case) -> Clue | None:
    """Non-finite values that are born here."""
    born = ~np.isfinite(case.c) & np.isfinite(case.r)
    count = int(np.count_nonzero(born))
    if count == 0:
        return None
    if any(not np.isfinite(x).all() for x in case.inputs.values()):
        return None
    kinds = "NaN" if np.isnan(case.c[born]).any() else "Inf"
    share = count / case.c.size
    many = f"{count} of {case.c.size} elements are" if count > 1 else "one element is"
    return Clue("nan", 0.9, f"{many} {kinds} while all inputs are finite ({share:.2g})", kinds)
