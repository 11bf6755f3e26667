"""What an optimizer was given and what it made of it: sums of gradients, and updates.

A gradient that reaches an optimizer is a sum of those of the backward passes of its step. What the
candidate's weights moved by is put together from what the reference's moved by, from the weights
and from the gradients of this step and of those before; numbers are fitted on one half of the
elements and judged on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.error_stats import index, read_whole
from driftline.diagnosis.causes.case import F64, Case, Clue, Flags
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.causes.linear_solve import solve
from driftline.diagnosis.causes.named_cause import NamedCause
from driftline.runs.records import Record, TensorKey

_MOST_ELEMENTS = 1 << 22
_LEAST_ELEMENTS = 64
_FOLLOWS = 0.99
_THE_SAME = 1e-3
_STEADY = 0.02
"""Share of their variance by which factors of neighbouring gradients may differ."""
_MOST_STEPS = 5
_SAMPLE, _ROUNDS = 1 << 12, 12
_ALIKE, _MOST_PASSES = 0.01, 16


# Sums of gradients.


def passes(case: Case) -> Clue | None:
    """A gradient that is another sum of those of the backward passes, or holds an old one."""
    if case.port != "optimizer_grad" or case.ratio < 4.0 or not case.finite.all():
        return None
    terms: list[tuple[str, tuple[F64, F64]]] = [
        (f"that of {name} {number + 1}", (r, c))
        for name, (rights, wrongs) in case.calls.items()
        for number, (r, c) in enumerate(zip(rights, wrongs, strict=True))
        if r.shape == case.r.shape
    ][:_MOST_PASSES]
    if len(terms) < 2 or case.r.size < 4 * len(terms):
        return None
    sides: list[F64] = []
    for number, side in enumerate((case.r, case.r + case.e)):
        matrix = np.stack([term[number].reshape(-1) for _, term in terms], axis=1)
        factors, values = solve(matrix, side.reshape(-1)), side.reshape(-1)
        left = values - matrix @ factors
        if float(left @ left) > (1e-8 + (3.0 * case.noise) ** 2) * float(values @ values):
            return None
        sides.append(factors)
    right, wrong = sides
    off = [
        number
        for number, (a, b) in enumerate(zip(right, wrong, strict=True))
        if abs(a - b) > _ALIKE * max(abs(a), abs(b), 0.1)
    ]
    if not off:
        return None
    words = ", ".join(
        f"{terms[number][0]} counts {_shown(wrong[number])} times, not {_shown(right[number])}"
        for number in off[:4]
    )
    return Clue("scale", 0.99, f"it is another sum of gradients: {words}", "passes")


def _shown(factor: float) -> str:
    return f"{round(factor, 4) + 0.0:.4g}"


# The update of an optimizer whose gradients agree: another factor, or a term more or less.


class _Update(NamedTuple):
    """One parameter over one step, as rows of numbers.

    Attributes:
        right: What the reference's moved by.
        wrong: What the candidate's moved by.
        weight: What it was before.
        gradients: What the optimizer was given in this step and in those before, the last first,
            [elements, steps]; zeros where that was not kept.
    """

    right: F64
    wrong: F64
    weight: F64
    gradients: F64

    @property
    def gradient(self) -> F64:
        return self.gradients[:, 0]


def name_update(runs: Runs, step: int) -> NamedCause:
    """The kind of mistake in the update of a step."""
    updates = list(_updates(runs, step))
    if sum(update.right.size for update in updates) < _LEAST_ELEMENTS:
        return NamedCause("unknown")
    total = _Update(*(np.concatenate(parts) for parts in zip(*updates, strict=True)))
    for names, terms in _TERMS:
        factors = _fitted(terms(total), total)
        if factors is not None:
            words = [f"{x:.4g} times {name}" for x, name in zip(factors, names, strict=True)]
            return NamedCause("scale", f"weights move by {' and '.join(words)}", 1.0, "update")
    off = [update for update in updates if update.right.size >= _LEAST_OF_ONE and _is_off(update)]
    for names, terms in _TERMS:
        fitted = [_fitted(terms(update), update) for update in off]
        solved = [factors for factors in fitted if factors is not None]
        if solved and len(solved) == len(fitted):
            words = [
                f"{min(x):.4g} to {max(x):.4g} times {name}"
                for x, name in zip(zip(*solved, strict=True), names, strict=True)
            ]
            what = f"{len(solved)} of {len(updates)} parameters move by {' and '.join(words)}"
            return NamedCause("scale", what, 1.0, "update")
    return (
        _by_size_of_gradient(total)
        or _by_earlier_steps(total)
        or _by_decay(total)
        or NamedCause("unknown", "nothing known fits")
    )


_LEAST_OF_ONE = 16
_TERMS: tuple[tuple[tuple[str, ...], Callable[[_Update], tuple[F64, ...]]], ...] = (
    (("the right update",), lambda of: (of.right,)),
    (("the right update", "the weights"), lambda of: (of.right, of.weight)),
    (("the right update", "the gradients"), lambda of: (of.right, of.gradient)),
)


def _is_off(update: _Update) -> bool:
    apart, size = update.wrong - update.right, float(update.right @ update.right)
    return float(apart @ apart) > (_THE_SAME**2) * size


def _by_size_of_gradient(total: _Update) -> NamedCause | None:
    """Factors that follow from the size of a gradient alone: a constant beside a root, a power."""
    moved = (total.gradient != 0.0) & (total.right != 0.0)
    if np.count_nonzero(moved) < _LEAST_ELEMENTS:
        return None
    sizes = np.abs(total.gradient[moved])
    factors = (total.wrong[moved] / total.right[moved])[np.argsort(sizes)]
    middle = float(np.median(factors))
    # Where a weight hardly moves, its factor is one of rounding.
    inner = np.abs(factors - middle) <= 100.0 * max(
        float(np.median(np.abs(factors - middle))), 1e-9
    )
    spread = float(np.var(factors[inner]))
    steps = float(np.mean(np.diff(factors[inner]) ** 2))
    if inner.mean() < _FOLLOWS or spread <= (_THE_SAME * middle) ** 2 or steps > _STEADY * spread:
        return None
    low, high = (float(np.quantile(factors[inner], share)) for share in (0.01, 0.99))
    what = (
        f"each weight moves by a factor ({low:.4g} to {high:.4g}) that follows from the size of "
        "its gradient alone, as with another constant or power of the optimizer"
    )
    return NamedCause("scale", what, _FOLLOWS, "gradient")


# Updates that follow from the gradients of several steps: momentum, and moments that are divided by
# the root of another one.


class _Moments(NamedTuple):
    """How an update follows from the gradients of this step and of those before.

    It is a sum of them, over the root of a sum of their squares and a constant.

    Attributes:
        sums: What each gradient counts, the last first.
        squares: What the square of each counts below; all zero where nothing is divided.
        constant: Beside the root.
    """

    sums: F64
    squares: F64
    constant: float

    def of(self, gradients: F64) -> F64:
        above = gradients @ self.sums
        if not self.squares.any():
            return above
        return above / (np.sqrt(np.maximum(gradients**2 @ self.squares, 1e-300)) + self.constant)

    def shares(self) -> F64:
        """What gradients and squares count beside each other, whatever their sizes are."""
        return np.concatenate([_of_one(self.sums), _of_one(self.squares)])

    def __str__(self) -> str:
        words = " and ".join(f"{share:.3g}" for share in _of_one(self.sums))
        squares = " and ".join(f"{share:.3g}" for share in _of_one(self.squares))
        return f"{words} of the gradients" + (f", {squares} of their squares" if squares else "")


def _of_one(shares: F64) -> F64:
    total = float(np.abs(shares).sum())
    return shares / total if total > 0.0 else shares[:0]


def _by_earlier_steps(total: _Update) -> NamedCause | None:
    """Gradients of several steps that count otherwise: momentum, its correction, its state."""
    steps = total.gradients.shape[1]
    used: F64 = np.abs(total.gradients).min(axis=1)
    use = used > 0.0
    if steps < 2 or np.count_nonzero(use) < 8 * _LEAST_ELEMENTS:
        return None
    gradients, right, wrong = total.gradients[use], total.right[use], total.wrong[use]
    energy = float(np.sum((wrong - right) ** 2))
    for read in (_linear, _divided):
        sides = [read(gradients, moved) for moved in (right, wrong)]
        if any(side is None for side in sides):
            continue
        first, second = (side for side in sides if side is not None)
        made = second.of(gradients) - first.of(gradients)
        left = float(np.sum((wrong - right - made) ** 2))
        if energy <= 0.0 or left > (1.0 - _FOLLOWS) * energy:
            continue
        what = (
            f"weights move by {second} of this step and those before, in this order, where the "
            f"reference's move by {first}"
        )
        return NamedCause("scale", what, 1.0 - left / energy, "moments")
    return None


def _linear(gradients: F64, moved: F64) -> _Moments | None:
    factors = solve(gradients[::2], moved[::2])
    left = moved[1::2] - gradients[1::2] @ factors
    if float(left @ left) > 1e-6 * float(moved[1::2] @ moved[1::2]):
        return None
    return _Moments(factors, np.zeros(len(factors)), 0.0)


def _divided(gradients: F64, moved: F64, most: float = 1e-6) -> _Moments | None:
    """The sums whose quotient is an update; None if none is.

    The square of the update times the one sum is the square of the other, which is linear in what
    squares and products of gradients count. From there on it is a matter of least squares.
    """
    every = max(1, len(gradients) // _SAMPLE)
    g, u = gradients[::every], moved[::every]
    steps = g.shape[1]
    pairs = np.triu_indices(steps)
    rows = np.concatenate([u[:, None] ** 2 * g**2, -g[:, pairs[0]] * g[:, pairs[1]]], axis=1)
    rows /= np.maximum(np.sum(g**2, axis=1, keepdims=True), 1e-300)
    sizes = np.maximum(np.sqrt(np.mean(rows**2, axis=0)), 1e-300)
    numbers = np.linalg.svd(rows / sizes, full_matrices=False)[2][-1] / sizes
    squares, products = numbers[:steps], np.zeros((steps, steps))
    products[pairs] = numbers[steps:]
    products = (products + products.T) / 2.0
    if squares.sum() < 0.0:
        squares, products = -squares, -products
    if not np.isfinite(products).all() or squares.max() <= 0.0:
        return None
    strengths, ways = np.linalg.eigh(products)
    sums = ways[:, -1] * np.sqrt(max(float(strengths[-1]), 0.0))
    scale = float(squares.max())
    squares, sums = np.maximum(squares / scale, 0.0), sums / np.sqrt(scale)
    if float(u @ (g @ sums)) < 0.0:
        sums = -sums
    made = _refined(_Moments(sums, squares, 0.0), g[::2], u[::2])
    left = u[1::2] - made.of(g[1::2])
    return made if float(left @ left) <= most * float(u[1::2] @ u[1::2]) else None


def _by_decay(total: _Update) -> NamedCause | None:
    """A share of the weights that is added to the gradients before their size is divided away.

    In a first step all that is left of a gradient is then its sign, and where that turns tells the
    share.
    """
    use = (np.abs(total.gradients[:, 1:]).sum(axis=1) == 0.0) & (total.gradient != 0.0)
    use &= (total.weight != 0.0) & (total.right != 0.0) & (total.wrong != 0.0)
    if np.count_nonzero(use) < 8 * _LEAST_ELEMENTS:
        return None
    g, w = total.gradient[use], total.weight[use]
    sides = total.right[use], total.wrong[use]
    energy, shares = float(np.sum((sides[1] - sides[0]) ** 2)), list[float]()
    left = 0.0
    for moved in sides:
        share = _share_of_weights(-np.sign(moved), g, w)
        read = _divided((g + share * w)[:, None], moved, 1e-3)
        if read is None or not energy > 0.0:
            return None
        left = float(np.sum((moved - read.of((g + share * w)[:, None])) ** 2))
        shares.append(share)
    if left > 0.05 * energy or abs(shares[1] - shares[0]) < 1e-3 * max(map(abs, shares)):
        return None
    what = (
        f"{shares[1]:.3g} times the weights are added to the gradients before their size is "
        f"divided away, in place of {shares[0]:.3g} times"
    )
    return NamedCause("scale", what, 1.0 - left / energy, "decay")


def _share_of_weights(signs: F64, g: F64, w: F64) -> float:
    """The share of weights that gives gradients some signs; none if that does as well."""
    # A sign turns where the sum is nothing: from there on it is right, or up to there.
    turns = -g / w
    order = np.argsort(turns)
    begins: Flags = (signs * w > 0.0)[order]
    # Violations of a share between two turns: what has yet to begin, and what has ended.
    wrong = np.count_nonzero(begins) - np.cumsum(begins) + np.cumsum(~begins)
    wrong = np.concatenate([[np.count_nonzero(begins)], wrong])
    none = int(np.searchsorted(turns[order], 0.0))
    best = int(np.argmin(wrong))
    if wrong[none] <= wrong[best] + 1e-3 * len(g) or not 0 < best < len(g):
        return 0.0
    return float(turns[order][best - 1] + turns[order][best]) / 2.0


def _refined(made: _Moments, g: F64, u: F64) -> _Moments:
    """Moments brought nearer to an update by steps of Gauss and Newton."""
    steps = g.shape[1]
    for _ in range(_ROUNDS):
        root = np.sqrt(np.maximum(g**2 @ made.squares, 1e-300))
        below = root + made.constant
        above = g @ made.sums
        slope = -above / below**2
        by_square = (slope / (2.0 * root))[:, None] * g**2
        matrix = np.concatenate([g / below[:, None], by_square, slope[:, None]], axis=1)
        sizes = np.maximum(np.sqrt(np.sum(matrix**2, axis=0)), 1e-300)
        # Both sums may be scaled alike: the least change is taken, which does not.
        change = solve(matrix / sizes, u - above / below) / sizes
        squares = np.maximum(made.squares + change[steps : 2 * steps], 0.0)
        constant = max(made.constant + float(change[-1]), 0.0)
        better = _Moments(made.sums + change[:steps], squares, constant)
        apart = [float(np.sum((u - x.of(g)) ** 2)) for x in (made, better)]
        if not apart[1] < apart[0]:
            break
        made = better
    return made


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
        right, wrong = (then - before for before, then in sides)
        parts = right, wrong, weight, _gradients(runs, records[0], after[0], weight.size)
        if all(np.isfinite(values).all() for values in parts):
            yield _Update(*parts)
        count += weight.size
        if count > _MOST_ELEMENTS:
            return


def _gradients(runs: Runs, records: Mapping[TensorKey, Record], key: TensorKey, size: int) -> F64:
    """The reference's gradients of a weight, in this step and those before, the last first."""
    gradients: list[F64] = []
    for step in range(key.step, max(key.step - _MOST_STEPS, -1), -1):
        own = key._replace(port="optimizer_grad", step=step)
        values = read_whole(runs.reference, records.get(own))
        if values is None or values.size != size:
            values = np.zeros(size)
        gradients.append(values.reshape(-1))
    return np.stack(gradients, axis=1)


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
