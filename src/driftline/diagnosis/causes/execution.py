"""Causes in the execution: NaN or Inf born here, non-determinism, missing sums, other updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.error_stats import index, read_whole
from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.case_builder import NamedCause, Runs
from driftline.diagnosis.causes.linear_solve import solve, solved_inputs
from driftline.runs.records import Record, TensorKey


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
        # The margin keeps the first explanation if a later one is no better.
        if best is None or score > best.score + 0.01:
            best = Clue("missing-reduction", score, what)
    return best


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
                if best is None or score > best.score:
                    what = f"it is the product with part {rank + 1} of {ranks} of its input alone"
                    best = Clue("missing-reduction", score, f"{what}: the others were not added")
    return best


# The update of an optimizer whose gradients agree: another factor, or a term more or less. What the
# candidate's weights moved by is put together from what the reference's moved by, from the weights
# and from the gradients; numbers are fitted on one half of the elements and judged on the other.


_MOST_ELEMENTS = 1 << 22
_LEAST_ELEMENTS = 64
_FOLLOWS = 0.99
_THE_SAME = 1e-3


class _Update(NamedTuple):
    """One parameter over one step, as rows of numbers.

    Attributes:
        right: What the reference's moved by.
        wrong: What the candidate's moved by.
        weight: What it was before.
        gradient: What the optimizer was given; zeros where that was not kept.
    """

    right: F64
    wrong: F64
    weight: F64
    gradient: F64


def name_update(runs: Runs, step: int) -> NamedCause:
    """The kind of mistake in the update of a step."""
    updates = list(_updates(runs, step))
    if sum(update.right.size for update in updates) < _LEAST_ELEMENTS:
        return NamedCause("unknown")
    whole = _Update(*(np.concatenate(parts) for parts in zip(*updates, strict=True)))
    for names, terms in (
        (("the right update",), (whole.right,)),
        (("the right update", "the weights"), (whole.right, whole.weight)),
        (("the right update", "the gradients"), (whole.right, whole.gradient)),
    ):
        factors = _fitted(terms, whole)
        if factors is not None:
            words = [f"{x:.4g} times {name}" for x, name in zip(factors, names, strict=True)]
            return NamedCause("scale", f"weights move by {' and '.join(words)}", 1.0, "update")
    each = [_fitted((update.right,), update) for update in updates if update.right.size >= 16]
    found = [float(factors[0]) for factors in each if factors is not None]
    if found and len(found) == len(each):
        what = f"each parameter moves by a factor of its own ({min(found):.4g} to {max(found):.4g})"
        return NamedCause("scale", what, 1.0, "update")
    return NamedCause("unknown", "nothing known fits")


def _updates(runs: Runs, step: int) -> Iterator[_Update]:
    records = index(runs.reference), index(runs.candidate)
    count = 0
    for pair in runs.plan.pairs:
        after = pair.reference.key, pair.candidate.key
        if after[0].port != "param" or after[0].moment != "after" or after[0].step != step:
            continue
        if pair.reference_recipe is not None or pair.candidate_recipe is not None:
            continue
        sides: list[tuple[F64, F64]] = []
        for run, of, key in zip((runs.reference, runs.candidate), records, after, strict=True):
            then = read_whole(run, of.get(key))
            before = read_whole(run, _before(of, key))
            if then is not None and before is not None and then.shape == before.shape:
                sides.append((before.reshape(-1), then.reshape(-1)))
        if len(sides) < 2 or sides[0][0].size != sides[1][0].size:
            continue
        weight = sides[0][0]
        gradient = read_whole(
            runs.reference, records[0].get(after[0]._replace(port="optimizer_grad"))
        )
        if gradient is None or gradient.size != weight.size:
            gradient = np.zeros_like(weight)
        right, wrong = (then - before for before, then in sides)
        parts = right, wrong, weight, gradient.reshape(-1)
        if all(np.isfinite(values).all() for values in parts):
            yield _Update(*parts)
        count += weight.size
        if count > _MOST_ELEMENTS:
            return


def _before(records: Mapping[TensorKey, Record], key: TensorKey) -> Record | None:
    """The same weight before the step; steps behind the first one have what the last one left."""
    earlier = records.get(key._replace(step=key.step - 1))
    return records.get(key._replace(moment="before"), earlier)


def _fitted(terms: tuple[F64, ...], update: _Update) -> list[float] | None:
    """Factors of some terms that add up to the candidate's update; None if they do not."""
    matrix = np.stack(terms, axis=1)
    factors = solve(matrix[::2], update.wrong[::2])
    left = update.wrong[1::2] - matrix[1::2] @ factors
    apart = update.wrong[1::2] - update.right[1::2]
    energy = float(apart @ apart)
    # The right update alone must not be what explains it.
    if not energy > 0.0 or (len(terms) == 1 and abs(factors[0] - 1.0) < _THE_SAME):
        return None
    return factors.tolist() if float(left @ left) <= (1.0 - _FOLLOWS) * energy else None
