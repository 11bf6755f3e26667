"""The update of an optimizer whose gradients agree: another factor, or a term more or less.

What the candidate's weights moved by is put together from what the reference's moved by, from the
weights and from the gradients; numbers are fitted on one half of the elements and judged on the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.error_stats import index, read_whole
from driftline.diagnosis.causes.case import F64
from driftline.diagnosis.causes.case_builder import NamedCause, Runs
from driftline.diagnosis.causes.linear_solve import solve
from driftline.runs.records import Record, TensorKey

_MOST_ELEMENTS = 1 << 22
_LEAST_ELEMENTS = 64
_CLEAR = 0.99
_ALIKE = 1e-3


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
    if not energy > 0.0 or (len(terms) == 1 and abs(factors[0] - 1.0) < _ALIKE):
        return None
    return factors.tolist() if float(left @ left) <= (1.0 - _CLEAR) * energy else None
