"""The candidate does not agree with itself: other executions of it give other numbers."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def nondeterminism(case: Case) -> Clue | None:
    """Repeats of the candidate differ from each other as much as from the reference."""
    apart = 0.0
    for other in case.repeats:
        if other.shape == case.c.shape:
            left = np.where(np.isfinite(other) & np.isfinite(case.c), other - case.c, 0.0)
            apart = max(apart, float(np.sum(left * left)))
    if apart == 0.0 or case.energy == 0.0:
        return None
    share = math.sqrt(apart / max(case.size, 1e-300))
    score = min(1.0, apart / case.energy)
    return Clue(
        "nondeterminism",
        max(score, 0.9 if apart > 0.25 * case.energy else score),
        f"the same program run again differs here by {share:.2g} of the output",
    )
