"""Ranks hold parts of a sum that was never taken, or the sum where the mean belongs."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def missing_reduction(case: Case) -> Clue | None:
    """All ranks together (their sum or mean) are right; each by itself is not."""
    if not case.ranks:
        return None
    parts = [case.c, *(other for other in case.ranks if other.shape == case.c.shape)]
    if len(parts) < 2:
        return None
    total = np.sum(parts, axis=0)
    count = len(parts)
    best: Clue | None = None
    for made, what in (
        (total, f"the sum over {count} ranks is right, each rank holds only its part of it"),
        (total / count, f"the mean over {count} ranks is right, each rank holds its own value"),
        (case.c / count, f"it is {count} times too large: the sum over ranks for their mean"),
        (case.c * count, f"it is {count} times too small: divided by ranks but never summed"),
    ):
        left = np.where(case.finite, made - case.r, 0.0)
        rest = float(np.sum(left * left))
        beyond = case.energy - case.noise_energy
        if beyond <= 0.1 * case.energy:
            continue
        score = min(max((case.energy - rest) / beyond, 0.0), 1.0)
        if best is None or score > best.score + 0.01:
            best = Clue("missing-reduction", score, what)
    return best
