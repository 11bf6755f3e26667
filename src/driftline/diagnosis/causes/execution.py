"""Causes in the execution: NaN or Inf born here, non-determinism, a missing sum over ranks."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue
from driftline.diagnosis.causes.linear_solve import solved_inputs


def nan_birth(case: Case) -> Clue | None:
    """Non-finite values that appear here although all inputs are finite."""
    born = ~np.isfinite(case.c) & np.isfinite(case.r)
    count = int(np.count_nonzero(born))
    if count == 0:
        return None
    # NaN that came in is the fault of an earlier site.
    if any(not np.isfinite(x).all() for x in case.inputs.values()):
        return None
    kinds = "NaN" if np.isnan(case.c[born]).any() else "Inf"
    share = count / case.c.size
    many = f"{count} of {case.c.size} elements are" if count > 1 else "one element is"
    return Clue("nan", 0.9, f"{many} {kinds} while all inputs are finite ({share:.2g})", kinds)


# Non-determinism: other executions of the candidate give other numbers.


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
        # A quarter of the error suffices: two random errors differ from each other by about their
        # own size.
        max(score, 0.9 if apart > 0.25 * case.energy else score),
        f"the same program run again differs here by {share:.2g} of the output",
    )


# Missing reductions: ranks hold parts of a sum, or a sum where the mean belongs.


def missing_reduction(case: Case) -> Clue | None:
    """The sum or mean of all ranks is right, each rank by itself is not."""
    if not case.ranks:
        return _partial_sum(case)
    parts = [case.c, *(other for other in case.ranks if other.shape == case.c.shape)]
    if len(parts) < 2:
        return None
    total = np.sum(parts, axis=0)
    count = len(parts)
    # Ranks that hold the same value hold no parts of a sum.
    apart = max(float(np.sum((other - case.c) ** 2)) for other in parts[1:])
    summed = f"the sum over {count} ranks is right, each rank holds only its part of it"
    ways = [
        (total, summed),
        (total / count, f"the mean over {count} ranks is right, each rank holds its own value"),
        (case.c / count, f"it is {count} times too large: the sum over ranks for their mean"),
        (case.c * count, f"it is {count} times too small: divided by ranks but never summed"),
    ]
    best: Clue | None = None
    if apart <= 4.0 * case.noise_energy:
        # All hold the same value, so it was reduced. A sum that was divided has another factor.
        ways = ways[2:3]
        what = f"it is {count} times too small: the mean over ranks for their sum"
        best = Clue("scale", case.explained(case.r / count), what, "ranks")
    for made, what in ways:
        left = np.where(case.finite, made - case.r, 0.0)
        rest = float(np.sum(left * left))
        beyond = case.energy - case.noise_energy
        if beyond <= 0.1 * case.energy:
            continue
        score = min(max((case.energy - rest) / beyond, 0.0), 1.0)
        # The margin keeps the first explanation if a later one is no better.
        if best is None or score > best.score + 0.01:
            best = Clue("missing-reduction", score, what)
    return best


_MOST_LEFT = 0.1


def _partial_sum(case: Case) -> Clue | None:
    """A product over some of the input channels only: one rank's part of a sum."""
    if case.r.ndim < 2 or case.ratio < 4.0:
        return None
    best: Clue | None = None
    for inputs, weight, bias in solved_inputs(case):
        for ranks in (2, 4, 8):
            width = inputs.shape[1] // ranks
            for rank in range(ranks if width else 0):
                own = slice(rank * width, (rank + 1) * width)
                made = (inputs[:, own] @ weight[own] + bias).reshape(case.r.shape)
                score = case.explained(made)
                # A result that is far too small is near any small product: it must be this one.
                left = float(np.sum((case.c - made) ** 2))
                if left > _MOST_LEFT * float(np.sum(made * made)):
                    continue
                if best is None or score > best.score:
                    what = f"it is the product with part {rank + 1} of {ranks} of its input alone"
                    best = Clue("missing-reduction", score, f"{what}: the others were not added")
    return best
