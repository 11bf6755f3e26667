"""Sums of parts: a term that is missing, doubled or has another factor; sums of inputs.

What a container returns is often a combination of what its parts gave and of what it was given:
residuals, adapters, gates that are open. If the reference's output is one, its factors and the
candidate's are compared. A linear map of the wrong zero points errs by sums of groups of its
inputs; one of weights that were never loaded has another map altogether.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue, Flags
from driftline.diagnosis.causes.linear_solve import solve, solved_inputs

_MOST_TERMS = 8
_GROUPS = (16, 32, 64, 128)
_MOST_OF_IT = 0.9
_ALIKE = 0.02
"""Relative distance of two factors that count as the same."""


def combination(case: Case) -> Clue | None:
    """Terms of a sum whose factors differ."""
    if case.ratio < 2.0 or case.r.ndim < 2:
        return None
    terms = {
        name: values
        for name, values in _with_halves({**case.inputs, **case.parts}, case.r.shape).items()
        if values.shape == case.r.shape and np.isfinite(values).all()
    }
    names = _without_repeats(terms)[-_MOST_TERMS:]
    if not names:
        return None
    best = max(
        (_added(case, name, terms[name]) for name in names),
        key=lambda clue: clue.score,
        default=None,
    )
    if best is None or best.score < _MOST_OF_IT:
        some = {name: terms[name] for name in names}
        best = _added_by_channel(case, some) or _added_by_token(case, some)
    # The sum itself says more; fewer terms are the better explanation, because more of them fit
    # anything a little better.
    for count in (1, 2, 3):
        sums = (
            _changed(case, chosen, [terms[name] for name in chosen])
            for chosen in itertools.combinations(names, count)
        )
        likely = [clue for clue in sums if clue is not None and clue.score >= _MOST_OF_IT]
        if likely:
            return max(likely, key=lambda clue: clue.score)
    return best or _other_terms(case, {name: terms[name] for name in names})


def _without_repeats(terms: Mapping[str, F64]) -> list[str]:
    """Names of terms, each only once: a part's result may also be that of its last part."""
    names = list(terms)
    return [
        name
        for number, name in enumerate(names)
        if not any(np.array_equal(terms[name], terms[later]) for later in names[number + 1 :])
    ]


def _with_halves(tensors: Mapping[str, F64], shape: tuple[int, ...]) -> dict[str, F64]:
    """Tensors, and the halves of those that hold two batches: with and without a condition."""
    parts = dict(tensors)
    for name, values in tensors.items():
        if values.ndim == len(shape) and values.shape == (2 * shape[0], *shape[1:]):
            parts[f"{name} (first half)"] = values[: shape[0]]
            parts[f"{name} (second half)"] = values[shape[0] :]
    return parts


def _other_terms(case: Case, terms: dict[str, F64]) -> Clue | None:
    """Both sides are sums of a few terms, and other ones: a residual taken at another place."""
    right = wrong = None
    rights = terms
    for sources, _ in case.sources:
        halved = _with_halves(sources, case.r.shape)
        rights = {name: halved.get(name, values) for name, values in terms.items()}
        right = _sum_of(case, case.r, rights)
        if right is not None:
            wrong = _sum_of(case, case.c, terms)
            break
    if right is None or wrong is None:
        return None
    if set(right) == set(wrong) and _same_factors(right, wrong):
        return None
    made = sum(factor * rights[name] for name, factor in wrong.items())
    had = sum(factor * rights[name] for name, factor in right.items())
    what = f"it is the sum of {_listed(wrong)}, where the reference adds {_listed(right)}"
    # One thing in place of another is another module's result, unless it is the same but for a
    # factor of each token, as what a norm was given.
    cause = "permutation" if len(right) == len(wrong) == 1 and not _alike(case) else "scale"
    if set(right) == set(wrong) and sorted(_rounded(right)) == sorted(_rounded(wrong)):
        cause = "permutation"  # the same factors, each of another term
    return Clue(cause, case.explained(case.r + made - had), what, "term")


def _rounded(factors: Mapping[str, float]) -> list[float]:
    return [float(f"{factor:.2g}") for factor in factors.values()]


def _same_factors(right: Mapping[str, float], wrong: Mapping[str, float]) -> bool:
    return all(
        abs(right[name] - wrong[name]) <= _ALIKE * max(abs(right[name]), abs(wrong[name]))
        for name in right
    )


def _alike(case: Case) -> bool:
    """Whether the candidate is, token by token, about a line in what is right."""
    r, c = (
        rows - rows.mean(axis=1, keepdims=True)
        for rows in (case.rows(values) for values in (case.r, case.r + case.e))
    )
    sizes = np.maximum(np.einsum("ij,ij->i", r, r), 1e-300)
    left = c - (np.einsum("ij,ij->i", r, c) / sizes)[:, None] * r
    return float(np.sum(left * left)) < _MOSTLY * float(np.sum(c * c))


_MOSTLY = 0.3


def _listed(factors: dict[str, float]) -> str:
    words = [
        f"'{name}'" if abs(factor - 1.0) < _ALIKE else f"{factor:.4g} times '{name}'"
        for name, factor in factors.items()
    ]
    return " and ".join(words)


def _sum_of(case: Case, made: F64, terms: dict[str, F64]) -> dict[str, float] | None:
    """The fewest terms that add up to something, with their factors; None if none do."""
    names = list(terms)
    matrix = np.stack([np.where(case.finite, terms[name], 0.0).reshape(-1) for name in names], 1)
    values = np.where(case.finite, made, 0.0).reshape(-1)
    size = float(values @ values)
    products, onto = matrix.T @ matrix, matrix.T @ values
    for count in range(1, min(_MOST_IN_A_SUM, len(names)) + 1):
        best: tuple[float, tuple[int, ...], F64] | None = None
        for chosen in itertools.combinations(range(len(names)), count):
            some = list(chosen)
            factors = solve(products[np.ix_(some, some)], onto[some])
            left = size - 2.0 * float(factors @ onto[some])
            left += float(factors @ products[np.ix_(some, some)] @ factors)
            if best is None or left < best[0]:
                best = left, chosen, factors
        if best is not None and best[0] <= (1e-9 + (3.0 * case.noise) ** 2) * size:
            return {names[number]: float(x) for number, x in zip(best[1], best[2], strict=True)}
    return None


_MOST_IN_A_SUM = 4


def _added(case: Case, name: str, term: F64) -> Clue:
    """A multiple of one term, whatever the reference's output is made of."""
    values = np.where(case.finite, term, 0.0)
    size = float(np.sum(values * values))
    factor = float(np.sum(values * case.e)) / size if size > 0.0 else 0.0
    what = f"{factor:+.4g} times what '{name}' gave is added to what is right"
    return Clue("scale", case.fitted(case.r + factor * values), what, "term")


def _added_by_channel(case: Case, terms: dict[str, F64]) -> Clue | None:
    """A multiple of one term, another one in every channel: a scale of a layer.

    The factors are fitted on every other token and judged on the rest.
    """
    e = case.rows(case.e)
    if len(e) < 8:
        return None
    best: Clue | None = None
    for name, term in terms.items():
        values = case.rows(np.where(case.finite, term, 0.0))
        sizes = np.maximum(np.einsum("ij,ij->j", values[::2], values[::2]), 1e-300)
        factors = np.einsum("ij,ij->j", values[::2], e[::2]) / sizes
        r = case.rows(case.r)[1::2]
        rest = replace(case, r=r, c=r + e[1::2], inputs={}, parts={}, right_parts={}, spread={})
        score = min(rest.fitted(r + factors * values[1::2]), 0.98)
        if score >= _MOST_OF_IT and (best is None or score > best.score):
            low, high = float(factors.min()), float(factors.max())
            what = (
                f"what '{name}' gave is added to what is right once more, times a factor of each "
                f"channel ({low:+.4g} to {high:+.4g})"
            )
            best = Clue("scale", score, what, "term")
    return best


def _added_by_token(case: Case, terms: dict[str, F64]) -> Clue | None:
    """A multiple of one term, another one for every token: a gate that lets through other shares.

    The factors are fitted on every other channel and judged on the rest.
    """
    e = case.rows(case.e)
    if len(e) < 8 or e.shape[1] < 16:
        return None
    own = case.rows(np.where(case.finite, case.r, 0.0))
    best: Clue | None = None
    for name, term in terms.items():
        values = case.rows(np.where(case.finite, term, 0.0))
        # What is right, token by token, is a factor of its own and no term of it.
        if _parallel(values, own) > _MOST_OF_IT:
            continue
        sizes = np.maximum(np.einsum("ij,ij->i", values[:, ::2], values[:, ::2]), 1e-300)
        factors = np.einsum("ij,ij->i", values[:, ::2], e[:, ::2]) / sizes
        r = own[:, 1::2]
        rest = replace(case, r=r, c=r + e[:, 1::2], inputs={}, parts={}, right_parts={}, spread={})
        score = min(rest.fitted(r + factors[:, None] * values[:, 1::2]), 0.98)
        if score >= _MOST_OF_IT and (best is None or score > best.score):
            low, high = float(factors.min()), float(factors.max())
            what = (
                f"what '{name}' gave is added to what is right once more, times a factor of each "
                f"token ({low:+.4g} to {high:+.4g}): a gate lets through another share of it"
            )
            best = Clue("scale", score, what, "term")
    return best


def _parallel(a: F64, b: F64) -> float:
    """Share of the energy of rows that lies along the rows of another tensor."""
    sizes = np.einsum("ij,ij->i", b, b)
    along = np.einsum("ij,ij->i", a, b) ** 2 / np.maximum(sizes, 1e-300)
    return float(along.sum()) / max(float(np.sum(a * a)), 1e-300)


def _changed(case: Case, names: tuple[str, ...], terms: list[F64]) -> Clue | None:
    matrix = np.stack([np.where(case.finite, term, 0.0).reshape(-1) for term in terms], axis=1)
    r = np.where(case.finite, case.r, 0.0).reshape(-1)
    right = solve(matrix, r)
    left = r - matrix @ right
    # The reference must be that very sum: its inputs may be off by noise, and no more.
    if float(left @ left) > (1e-6 + (3.0 * case.noise) ** 2) * case.size:
        return None
    c = r + case.e.reshape(-1)
    wrong = solve(matrix, c)
    moved = [
        number
        for number, (a, b) in enumerate(zip(right, wrong, strict=True))
        if abs(a - b) > _ALIKE * max(abs(a), abs(b))
    ]
    if not moved or len(moved) == len(names) > 1:
        return None
    # Several terms count as one change if they have the same factor, as those of one setting have.
    factors = {tuple(round(float(x[number]), 2) for x in (right, wrong)) for number in moved}
    if len(factors) != 1:
        return None
    predicted = case.r + (matrix[:, moved] @ (wrong - right)[moved]).reshape(case.r.shape)
    factor, wanted = float(wrong[moved[0]]), float(right[moved[0]])
    gave = "what " + " and ".join(f"'{names[number]}'" for number in moved) + " gave is"
    if abs(factor) < 0.01:
        what = f"{gave} not added"
    elif abs(wanted) < 0.01:
        what = f"{gave} added, and should not be"
    else:
        what = f"{gave} taken {factor:.4g} times in place of {wanted:.4g}"
    return Clue("scale", case.fitted(predicted), what, "term")


_MOST_TOKENS = 512


def shares(case: Case) -> Clue | None:
    """Tokens are sums of what a few parts gave them, as of experts, with other shares.

    The shares of every token are fitted on one half of its channels and judged on the other. Parts
    may be given some tokens each, or all of them. Where the shares are those of the reference but
    for tokens that take of other parts, the parts that may be chosen are others.
    """
    parts = _terms_of_tokens(case)
    if case.ratio < 4.0 or case.r.ndim < 2 or case.r.shape[-1] < 16 or len(parts) < 2:
        return None
    r, c = (case.rows(values)[:_MOST_TOKENS] for values in (case.r, case.r + case.e))
    few = replace(case, r=r, c=c)
    terms = np.stack([case.rows(part)[:_MOST_TOKENS] for part in parts], axis=-1)
    fractions, left = np.zeros((2, len(r), len(parts))), np.zeros(2)
    for row, row_terms in enumerate(terms):
        active: Flags = np.any(row_terms != 0.0, axis=0)
        if not 0 < np.count_nonzero(active) <= r.shape[1] // 4:
            continue
        for side, values in enumerate((r, c)):
            factors = solve(row_terms[::2, active], values[row, ::2])
            rest = values[row, 1::2] - row_terms[1::2, active] @ factors
            left[side] += float(rest @ rest)
            fractions[side, row, active] = factors
    # Both sides must be such sums.
    if float(left.max()) > 0.5 * (1e-8 + (3.0 * case.noise) ** 2) * few.size:
        return None
    level = 3.0 * max(case.noise, case.unit)
    # A container that returns what one part gave to every token has no shares.
    largest = np.abs(fractions[0]).max(axis=0)
    if np.count_nonzero(largest > max(_TAKEN, 4.0 * level) * largest.max()) < 2:
        return None
    apart = fractions[1] - fractions[0]
    made = np.einsum("tcn,tn->tc", terms, apart)
    moved: Flags = np.abs(apart).max(axis=1) > level
    score = few.explained(r + made)
    others = _others_chosen(case, fractions, level)
    if others is not None:
        what = (
            f"{others} of {len(r)} tokens take of other parts than the reference's, with shares "
            "that are made as the reference's are: which parts may be chosen is another"
        )
        return Clue("mask", score, what, "choice")
    what = (
        f"{np.count_nonzero(moved)} of {len(r)} tokens take other shares of what the same parts "
        f"gave, by up to {float(np.abs(apart).max()):.3g}"
    )
    return Clue("scale", score, what, "shares")


def _terms_of_tokens(case: Case) -> list[F64]:
    """What parts gave to tokens: to some each, or all parts to all tokens."""
    if len(case.spread) > 1:
        return list(case.spread.values())
    terms: list[F64] = []
    for name, values in case.parts.items():
        if name in case.inputs or values.shape != case.r.shape or not np.isfinite(values).all():
            continue
        if not any(np.array_equal(values, other) for other in terms):
            terms.append(values)
    return terms[-_MOST_PARTS:]


def _others_chosen(case: Case, fractions: F64, level: float) -> int | None:
    """Number of tokens that take of other parts, if nothing else about the shares differs."""
    sizes = np.abs(fractions)
    largest = np.maximum(sizes.max(axis=-1, keepdims=True), 1e-300)
    least = max(_TAKEN, 4.0 * level) * largest
    chosen: Flags = sizes > least
    clearly: Flags = sizes.max(axis=0) > 3.0 * least.max(axis=0)
    other: Flags = np.any((chosen[0] != chosen[1]) & clearly, axis=-1)
    # Some part must be left out of every token, or there is no choice.
    if chosen.all(axis=-1).any() or not other.any():
        return None
    errors = np.sum((fractions[1] - fractions[0]) ** 2, axis=-1)
    if float(errors[other].sum()) < _MOST_OF_IT * float(errors.sum()):
        return None
    if _same_weights(case, fractions, chosen, level):
        return int(np.count_nonzero(other))
    same = ~other
    apart = np.abs(fractions[1] - fractions[0]).max(axis=-1)
    near: Flags = apart <= 4.0 * level * largest.max(axis=0)[:, 0] + 1e-5
    some = np.count_nonzero(same) >= _SOME * len(same)
    agree = np.count_nonzero(near & same) >= _NEARLY_ALL * np.count_nonzero(same)
    return int(np.count_nonzero(other)) if some and agree else None


def _same_weights(case: Case, fractions: F64, chosen: Flags, level: float) -> bool:
    """Whether the shares of both sides follow from the same scores by the same function.

    Shares of one token are proportional to a function of the scores of the parts that it takes of.
    """
    for scores in case.parts.values():
        count = scores.shape[-1]
        if scores.shape[:-1] != case.r.shape[:-1] or not 2 <= count <= fractions.shape[-1]:
            continue
        rows = case.rows(scores)[:_MOST_TOKENS]
        for first in range(fractions.shape[-1] - count + 1):
            own = slice(first, first + count)
            for of in _WEIGHTS:
                with np.errstate(all="ignore"):
                    weights = np.where(chosen[..., own], of(rows), 0.0)
                    sums = weights.sum(axis=-1, keepdims=True)
                    shown = np.where(chosen[..., own], fractions[..., own], 0.0)
                    totals = shown.sum(axis=-1, keepdims=True)
                    apart = np.abs(weights / sums * totals - fractions[..., own]).max(axis=-1)
                if float(np.quantile(apart, _NEARLY_ALL)) <= 8.0 * level + 1e-4:
                    return True
    return False


_WEIGHTS: tuple[Callable[[F64], F64], ...] = (
    lambda x: np.exp(x - x.max(axis=-1, keepdims=True)),
    lambda x: 1.0 / (1.0 + np.exp(-x)),
    lambda x: x,
)
_MOST_PARTS = 12
_TAKEN, _SOME, _NEARLY_ALL = 0.01, 0.1, 0.95


def zero_point(case: Case) -> Clue | None:
    """A linear map whose error is one of sums over groups of its inputs.

    A matrix of codes, each group of inputs with a zero point of its own, gives with other zero
    points the same product plus these sums, each times a number of its own for every output.
    """
    if case.ratio < 4.0 or case.r.ndim < 2:
        return None
    best: Clue | None = None
    for sums, size in _group_sums(case):
        e = case.rows(case.e)
        factors = solve(sums, e)
        made = (sums @ factors).reshape(case.r.shape)
        # As many numbers are fitted as there are groups, of as many rows.
        score = max(0.0, case.fitted(case.r + made) - 2.0 * sums.shape[1] / len(sums))
        if best is None or score > best.score:
            what = f"it is off by the sum of every {size} inputs times a constant: a zero point"
            best = Clue("offset", score, what, "zero point")
    return best


def _group_sums(case: Case) -> Iterator[tuple[F64, int]]:
    for x in case.inputs.values():
        if x.shape[:-1] != case.r.shape[:-1] or not np.isfinite(x).all():
            continue
        rows = case.rows(x)
        for size in (*_GROUPS, rows.shape[1]):
            if rows.shape[1] % size == 0 and len(rows) >= 8 * (rows.shape[1] // size):
                yield rows.reshape(len(rows), -1, size).sum(axis=-1), size


def unrelated_weights(case: Case) -> Clue | None:
    """A linear map, or a weight itself, that has nothing in common with the right one."""
    if case.ratio < 8.0 or case.r.ndim < 2:
        return None
    if case.port == "param":
        return _unrelated(case.r, case.c, "the weight")
    for inputs, weight, _ in solved_inputs(case):
        wide = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
        c = case.rows(case.r + case.e)
        other = solve(wide, c)
        left = c - wide @ other
        if float(np.sum(left * left)) <= 1e-3 * float(np.sum(c * c)):
            return _unrelated(weight, other[:-1], "it is a product with a")
    return None


def _unrelated(right: F64, wrong: F64, what: str) -> Clue | None:
    sizes = float(np.linalg.norm(right)), float(np.linalg.norm(wrong))
    if min(sizes) <= 0.0 or right.size < 256:
        return None
    alike = abs(float(np.sum(right * wrong))) / (sizes[0] * sizes[1])
    # Chance alone makes two matrices this much alike, ten times over.
    if alike > 10.0 / np.sqrt(right.size):
        return None
    says = "has" if what == "the weight" else "weight that has"
    sentence = (
        f"{what} {says} nothing in common with the right one (they are {alike:.1%} alike): it was "
        "not loaded, or is another's"
    )
    return Clue("weights", 0.95, sentence, "unrelated")
