"""What single elements have to do with the right ones.

A factor or a constant of some of them, a function of them, a factor or a term that another tensor
gives, a softmax of another temperature.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from driftline.comparison.evidence.leaf_functions import ACTIVATIONS
from driftline.diagnosis.causes.case import F64, Case, Clue, Flags, by_chance

_LEAST, _FEWEST, _MOST_OF_THEM = 32, 12, 0.9
_SAMPLE = 1 << 16
_CLEAR = 0.9
_ALIKE = 0.02
"""Relative distance from one of a factor that counts as none."""
_HIDDEN, _FEW, _MOST = -1e4, 0.2, 0.6


def some(case: Case) -> Clue | None:
    """Some elements have one factor, or one constant added; the others are right."""
    if case.ratio < 2.0 or case.r.size < _LEAST or not case.finite.all():
        return None
    mean = math.sqrt(case.size / case.r.size)
    level = 6.0 * max(case.noise, case.unit)
    touched: Flags = np.abs(case.e) > level * np.maximum(np.abs(case.r), mean)
    if not _FEWEST <= np.count_nonzero(touched) <= _MOST_OF_THEM * touched.size:
        return None
    r, e = case.r[touched], case.e[touched]
    if len(np.unique(np.abs(r))) < _FEWEST // 2:
        return None  # a few numbers, again and again: any relation fits them
    factor = 1.0 + float(e @ r) / max(float(r @ r), 1e-300)
    constant = float(e.mean())
    if abs(factor) > _ALIKE and abs(factor - 1.0) > _ALIKE:
        clue = _changed(case, factor * case.r, f"are {factor:.4g} times what they should be")
        if clue is not None:
            return clue
    clue = _changed(case, case.r + constant, f"have {constant:.4g} added")
    return clue and replace(clue, cause="mask" if constant < _HIDDEN else "offset")


def _changed(case: Case, made: F64, how: str) -> Clue | None:
    """Elements that are nearer to something else than to what is right, if they are it."""
    touched: Flags = np.abs(case.r + case.e - made) < np.abs(case.e)
    if np.count_nonzero(touched) > _MOST_OF_THEM * touched.size:
        return None
    share = case.rows(touched.astype(np.float64)).mean(axis=1)
    many, few = share > _MOST, share < _FEW
    if case.r.shape[-1] > 1 and many.any() and few.any() and bool((many | few).all()):
        return None  # whole tokens: a matter of which, and not of a factor
    score = case.fitted(np.where(touched, made, case.r))
    what = f"{_which(case, touched)} {how}, and no others are off"
    return Clue("scale", score, what, "some") if score >= _CLEAR else None


def _which(case: Case, touched: Flags) -> str:
    """Which elements are touched, in words: their share, and what sign they have."""
    share = f"{float(touched.mean()):.2g} of all elements"
    negative: Flags = case.r[touched] < 0.0
    if negative.all() or not negative.any():
        share += f", all of them {'below' if negative.any() else 'above'} zero,"
    return share


# Functions of the right number.


_FUNCTIONS: Mapping[str, Callable[[F64], F64]] = {
    "the exponential": np.exp,
    "the exponential less one": np.expm1,
    "the power of two": np.exp2,
    "the logarithm": lambda x: np.log(np.where(x > 0.0, x, np.nan)),
    "the logarithm of one more": lambda x: np.log1p(np.where(x > -1.0, x, np.nan)),
    "the square": np.square,
    "the root": lambda x: np.sqrt(np.where(x >= 0.0, x, np.nan)),
    "the size": np.abs,
    "the tangent": np.tanh,
    "the sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "the inverse": lambda x: 1.0 / np.where(x == 0.0, np.nan, x),
    "one less": lambda x: 1.0 - x,
    "the nearest whole number": np.rint,
    "the next lower whole number": np.floor,
    "the sign": np.sign,
}


def function(case: Case) -> Clue | None:
    """One side is a known function of the other: an exponential, a root or a square too many."""
    if case.ratio < 8.0 or case.r.size < _LEAST or not case.finite.all():
        return None
    every = max(1, case.r.size // _SAMPLE)
    r, c = (x.reshape(-1)[::every] for x in (case.r, case.r + case.e))
    energy = float(np.sum((c - r) ** 2))
    for side, other, words in (
        (c, r, "{} of what is right"),
        (r, c, "what the reference makes {} of"),
    ):
        size = float(np.sum((side - side.mean()) ** 2))
        if size == 0.0:
            continue  # a constant is a value of any function
        for name, of in _FUNCTIONS.items():
            with np.errstate(all="ignore"):
                made = of(other)
                left = float(np.sum((made - side) ** 2))
                # What the function makes of the rounding of its argument, and of its own.
                step = 2.0 * max(case.noise, case.unit) * np.abs(other)
                moved = of(other + step) - made
                allowed = float(np.sum(moved * moved)) + (3.0 * case.noise) ** 2 * float(
                    np.sum(side * side)
                )
            # Rounding a number that is nearly whole changes little: it must do away with the error.
            if not math.isfinite(left) or left > 4.0 * allowed + 1e-10 * size:
                continue
            if left > min(1e-3 * min(size, energy), 0.1 * _left_by_line(other, side) * size):
                continue
            what = f"it is {words.format(name)}"
            return Clue("activation", min(1.0 - left / energy, 0.99), what, "function")
    return _power(case, r, c) or _softmax_of_it(case) or _of_one_input(case, every)


def _softmax_of_it(case: Case) -> Clue | None:
    """One side is the softmax, or its logarithm, of the other: taken twice, or left out."""
    c = case.r + case.e
    if case.r.size > _MOST_ELEMENTS:
        return None
    for side, other, words in (
        (c, case.r, "it is the {} of what is right along axis {}"),
        (case.r, c, "it lacks the {} along axis {} that the reference takes"),
    ):
        for axis, length in enumerate(case.r.shape):
            sums = side.sum(axis=axis), np.exp(np.minimum(side, 1.0)).sum(axis=axis)
            if length < 3 or not any(float(np.abs(x - 1.0).max()) < 0.05 for x in sums):
                continue
            low = other - other.max(axis=axis, keepdims=True)
            log = low - np.log(np.exp(low).sum(axis=axis, keepdims=True))
            for name, made in (("softmax", np.exp(log)), ("logarithm of the softmax", log)):
                left = float(np.sum((made - side) ** 2))
                enough = (1e-8 + (3.0 * case.noise) ** 2) * float(np.sum(side * side))
                if left <= min(enough, 0.05 * case.energy):
                    score = min(1.0 - left / case.energy, 0.99)
                    return Clue("activation", score, words.format(name, axis), "softmax")
    return None


def _power(case: Case, r: F64, c: F64) -> Clue | None:
    """A power of what is right: a curve of brightness, a root of another degree."""
    use = (np.abs(r) > 0.0) & (np.abs(c) > 0.0)
    if not use.all() or np.any(np.sign(r) != np.sign(c)):
        return None
    a, b = (np.log(np.abs(x)) for x in (r, c))
    a, b, middle = a - a.mean(), b - b.mean(), (float(a.mean()), float(b.mean()))
    size = float(a @ a)
    power = float(a @ b) / size if size > 0.0 else 1.0
    if abs(power - 1.0) < 10.0 * _ALIKE or not 0.05 < power < 20.0:
        return None
    factor = math.exp(middle[1] - power * middle[0])
    made = np.sign(r) * factor * np.abs(r) ** power
    energy, left = float(np.sum((c - r) ** 2)), float(np.sum((c - made) ** 2))
    noise = (4.0 * case.noise) ** 2 * float(np.sum(c * c))
    # A factor and a constant must not do as well.
    plainly = _left_by_line(r, c) * float(np.sum((c - c.mean()) ** 2))
    if left > min(1e-5 * energy + noise, 0.1 * energy, 0.1 * plainly):
        return None
    what = f"it is what is right to the power of {power:.4g}, times {factor:.4g}"
    return Clue("activation", min(1.0 - left / energy, 0.98), what, "power")


# Elements that one side hides.


def hidden(case: Case) -> Clue | None:
    """Some elements are hidden, as zeros or as very negative numbers, on one side alone."""
    if case.r.ndim < 2 or case.r.size < _LEAST or case.ratio < 2.0:
        return None
    c = np.where(case.finite, case.c, -np.inf)
    r = np.where(np.isfinite(case.r), case.r, -np.inf)
    blank_r, blank_c = (((x == 0.0) | (x <= _HIDDEN)) for x in (r, c))
    touched: Flags = blank_r != blank_c
    if not _FEWEST <= np.count_nonzero(touched) <= _MOST_OF_THEM * touched.size:
        return None
    rest = np.where(touched | blank_r | ~case.finite, 0.0, case.e)
    shown = np.where(touched | blank_r | ~case.finite, 0.0, case.r)
    enough = (3.0 * case.noise) ** 2 * float(np.sum(shown * shown))
    # What both show must be the same; of shares, the same but for what each row adds up to.
    if float(np.sum(rest * rest)) > enough:
        return _shares_of_others(case, np.where(blank_r, 0.0, r), np.where(blank_c, 0.0, c))
    values = np.where(blank_r, c, r)
    live = ~(blank_r & blank_c)
    # A function that gives zeros does so for one sign, or for small numbers; a mask asks neither.
    if not by_chance(values[live], touched[live]):
        return None
    more, fewer = int(np.count_nonzero(blank_r & touched)), int(np.count_nonzero(blank_c & touched))
    what = f"{more} elements are shown that the reference hides, and {fewer} are hidden it shows"
    if fewer and not more and not np.any(blank_r):
        return None  # zeros where the reference has none are a zeroed region
    return Clue("mask", 0.9, what, "hidden")


def _shares_of_others(case: Case, r: F64, c: F64) -> Clue | None:
    """Rows that add up to one on both sides, over other elements."""
    if min(float(r.min()), float(c.min())) < 0.0:
        return None
    for axis, length in enumerate(r.shape):
        sums = [x.sum(axis=axis) for x in (r, c)]
        if length < 4 or any(float(np.abs(x - 1.0).max()) > 0.02 for x in sums):
            continue
        shown: Flags = (r > 0.0) & (c > 0.0)
        common = [np.where(shown, x, 0.0) for x in (r, c)]
        totals = [np.maximum(x.sum(axis=axis, keepdims=True), 1e-300) for x in common]
        left = common[0] / totals[0] - common[1] / totals[1]
        alone = float(np.max(1.0 - np.minimum(*(x.sum(axis=axis) for x in common))))
        if alone > 0.01 and float(np.sum(left * left)) <= (4.0 * case.noise + 1e-6) ** 2 * r.size:
            what = f"its shares along axis {axis} are those of the reference, over other elements"
            near = float(np.sum(left * left)) / max(float(np.sum((c - r) ** 2)), 1e-300)
            return Clue("mask", min(1.0 - near, 0.97), what, "shares")
    return None


_STEADY = 0.01
_CURVED, _BENT = 0.005, 0.002


def _of_one_input(case: Case, every: int) -> Clue | None:
    """Both sides are functions of each number of an input alone, and other functions."""
    for name, x in case.inputs.items():
        if x.shape != case.r.shape or not np.isfinite(x).all():
            continue
        order = np.argsort(x.reshape(-1)[::every], kind="stable")
        xs, r, c = (y.reshape(-1)[::every][order] for y in (x, case.r, case.r + case.e))
        if _left_by_line(r, c) < max(_BENT, (10.0 * case.noise) ** 2):
            return None  # a factor and a constant, nearly
        if len(np.unique(xs)) < 128 or max(map(_unsteady, (r, c, c - r))) > _STEADY:
            continue
        # A factor, or a constant, is no other function.
        if min(_left_by_line(xs, c - r), _left_by_line(r, c)) < _CURVED:
            continue
        what = (
            f"it is another function of each number of '{name}' than the reference's: a slope, a "
            "bound or a bend is another"
        )
        return Clue("activation", 0.86, what, "function", measured=False)
    return None


def _unsteady(values: F64) -> float:
    """How much neighbours differ, beside numbers in any order; 1 for those."""
    spread = float(np.var(values))
    return float(np.mean(np.diff(values) ** 2)) / (2.0 * spread) if spread > 0.0 else 1.0


def _left_by_line(x: F64, y: F64) -> float:
    """Share of the variance of one that no line in the other explains."""
    a, b = x - x.mean(), y - y.mean()
    sizes = float(a @ a), float(b @ b)
    if min(sizes) <= 0.0:
        return 0.0
    return 1.0 - float(a @ b) ** 2 / (sizes[0] * sizes[1])


# Softmax of another temperature.


def temperature(case: Case) -> Clue | None:
    """Shares that are those of the right scores times a factor."""
    if case.ratio < 4.0 or case.r.ndim < 2 or not case.finite.all():
        return None
    c = case.r + case.e
    if min(float(case.r.min()), float(c.min())) < 0.0:
        return None
    for axis, length in enumerate(case.r.shape):
        sums = [x.sum(axis=axis) for x in (case.r, c)]
        if length < 3 or any(float(np.abs(x - 1.0).max()) > 0.02 for x in sums):
            continue
        shown: Flags = (case.r > 1e-12) & (c > 1e-12)
        if not shown.all():
            shown &= np.broadcast_to(shown.sum(axis=axis, keepdims=True) > 1, shown.shape)
        count = np.maximum(shown.sum(axis=axis, keepdims=True), 1)
        logs = [np.log(np.where(shown, x, 1.0)) for x in (case.r, c)]
        a, b = (
            np.where(shown, x - x.sum(axis=axis, keepdims=True) / count, 0.0) * np.sqrt(case.r)
            for x in logs
        )
        times = float(np.sum(a * b)) / max(float(np.sum(a * a)), 1e-300)
        if not 0.01 < times < 100.0 or abs(times - 1.0) < _ALIKE:
            continue
        raised = np.where(case.r > 0.0, case.r, 0.0) ** times
        made = raised / np.maximum(raised.sum(axis=axis, keepdims=True), 1e-300)
        what = f"its shares are those of scores that are taken {times:.4g} times"
        return Clue("scale", min(case.fitted(made), 0.99), what, "temperature")
    return None


# Factors and terms that another tensor gives.


_POWERS: Mapping[str, Callable[[F64], F64]] = {
    "times": lambda y: y,
    "divided by": lambda y: 1.0 / np.where(y == 0.0, np.nan, y),
    "times one and": lambda y: 1.0 + y,
    "divided by one and": lambda y: 1.0 / np.where(y == -1.0, np.nan, 1.0 + y),
    "times the root of": lambda y: np.sqrt(np.where(y >= 0.0, y, np.nan)),
    "divided by the root of": lambda y: 1.0 / np.sqrt(np.where(y > 0.0, y, np.nan)),
    "times the square of": np.square,
    "divided by the square of": lambda y: 1.0 / np.where(y == 0.0, np.nan, y * y),
    "times the exponential of": np.exp,
    "divided by the exponential of": lambda y: np.exp(-y),
    "times the root of the exponential of": lambda y: np.exp(0.5 * y),
    "divided by the root of the exponential of": lambda y: np.exp(-0.5 * y),
    "times one less": lambda y: 1.0 - y,
}
_MOST_TENSORS, _MOST_ELEMENTS = 6, 1 << 18


def related(case: Case) -> Clue | None:
    """What is right, times or plus a function of a tensor that the site was given.

    Nothing is fitted to a factor, and one number to a term. A factor may be that of what is right
    without another tensor, as of a spread beside a mean. A term is a tensor that is repeated along
    axes, its square, or its mean along an axis.
    """
    if case.ratio < 4.0 or not _LEAST <= case.r.size <= _MOST_ELEMENTS:
        return None
    others = list(_others(case))
    terms = [(name, y) for name, y in others if y.shape == case.r.shape]
    best: Clue | None = None
    for name, y in others:
        clues = [_factor(case, name, y), _term(case, name, y)]
        clues += [_factor(case, name, y, (beside, term)) for beside, term in terms if term is not y]
        for clue in clues:
            if clue is not None and (best is None or clue.score > best.score):
                best = clue
    return best or _by_two_axes(case)


def _by_two_axes(case: Case) -> Clue | None:
    """A factor, or a constant, that belongs to one axis at two: it was laid along another one."""
    if case.r.ndim < 2 or not case.finite.all():
        return None
    energy = case.energy / case.r.size
    for a, b in itertools.combinations(range(case.r.ndim), 2):
        numbers = case.r.shape[a] + case.r.shape[b]
        if min(case.r.shape[a], case.r.shape[b]) < 3 or 4 * numbers > case.r.size:
            continue
        but_a, but_b = (tuple(axis for axis in range(case.r.ndim) if axis != own) for own in (a, b))
        along_a = case.e.mean(axis=but_a, keepdims=True)
        along_b = (case.e - along_a).mean(axis=but_b, keepdims=True)
        score = case.fitted(case.r + along_a + along_b) - numbers / case.r.size
        if score >= _CLEAR and all(float(np.var(x)) > _LITTLE * energy for x in (along_a, along_b)):
            what = f"constants that belong to places of axes {a} and {b} are added"
            return Clue("offset", min(score, 0.97), what, "axes")
        c, first, second = case.r + case.e, np.ones(()), np.ones(())
        for _ in range(_ROUNDS):
            for axes in (but_a, but_b):
                scaled = case.r * (second if axes is but_a else first)
                size = np.maximum(np.sum(scaled * scaled, axis=axes, keepdims=True), 1e-300)
                factors = np.sum(c * scaled, axis=axes, keepdims=True) / size
                first, second = (factors, second) if axes is but_a else (first, factors)
        if float(np.abs(first).min() * np.abs(second).min()) < _ALIKE:
            continue  # places that are gone are another fault
        if not all(map(_vary, (first, second))):
            continue  # one axis alone has a rule of its own
        score = case.fitted(case.r * first * second) - numbers / case.r.size
        if score >= _CLEAR:
            what = f"it has factors that belong to places of axes {a} and {b}"
            return Clue("scale", min(score, 0.97), what, "axes")
    return None


def _halves(y: F64) -> tuple[tuple[str, F64], ...]:
    return ("below", np.minimum(y, 0.0)), ("above", np.maximum(y, 0.0))


def _neighbours(y: F64) -> Iterator[tuple[str, F64]]:
    """A tensor one place on, along axes of tokens or samples of a wave; zeros at the end."""
    for axis in sorted({1, y.ndim - 1} if y.ndim > 1 else ()):
        if y.shape[axis] < 8:
            continue
        for by, side in ((1, "before"), (-1, "behind")):
            moved = np.roll(y, by, axis=axis)
            end = [slice(None)] * y.ndim
            end[axis] = slice(0, 1) if by > 0 else slice(-1, None)
            moved[tuple(end)] = 0.0
            yield f"what '{{}}' has one place {side} along axis {axis}", moved


def _likely(case: Case, y: F64) -> Iterator[tuple[str, Callable[[F64], F64]]]:
    """Functions of a tensor that some elements of the error follow."""
    every = max(1, y.size // _PLACES)
    some_y, e = y.reshape(-1)[::every], case.e.reshape(-1)[::every]
    energy = float(e @ e)
    for label, of in ACTIVATIONS.items():
        values = of(some_y)
        size = float(values @ values)
        # What follows it by half may follow it wholly.
        if size > 0.0 and float(values @ e) ** 2 > 0.5 * size * energy:
            yield label, of


_ROUNDS, _LITTLE, _LARGEST = 12, 0.02, 1e100


def _vary(factors: F64) -> bool:
    return float(np.std(factors)) > _LITTLE * float(np.abs(factors).mean())


def _others(case: Case) -> Iterator[tuple[str, F64]]:
    tensors = {**case.inputs, **case.parts, **case.params}
    for name in list(tensors)[-_MOST_TENSORS:]:
        y = tensors[name]
        if y.size < 2 or not np.isfinite(y).all() or y.size > case.r.size:
            continue
        for laid in _laid(y, case.r.shape):
            yield name, laid


def _laid(y: F64, shape: tuple[int, ...]) -> Iterator[F64]:
    """A tensor as it is repeated along axes of a shape; its own come in order."""
    if y.shape == shape:
        yield y
        return
    lengths = [length for length in y.shape if length > 1]
    if y.ndim > len(shape) or not lengths:
        return
    own: list[int] = []
    axis = 0
    for length in lengths:
        while axis < len(shape) and shape[axis] != length:
            axis += 1
        if axis == len(shape):
            return
        own.append(axis)
        axis += 1
    yield y.reshape([length if axis in own else 1 for axis, length in enumerate(shape)])


def _factor(case: Case, name: str, y: F64, beside: tuple[str, F64] | None = None) -> Clue | None:
    """What is right, or the rest of it beside another tensor, times a function of a tensor."""
    best: tuple[float, str] | None = None
    r = np.where(case.finite, case.r, 0.0)
    # Some places tell whether a function is worth the rest.
    every = max(1, case.r.size // _PLACES)
    rest = (r if beside is None else r - beside[1]).reshape(-1)[::every]
    e = case.e.reshape(-1)[::every]
    energy = float(e @ e)
    for words, power in _POWERS.items():
        with np.errstate(all="ignore"):
            factors = power(y)
        # An exponential may overflow when it is squared.
        if not float(np.abs(factors).max()) < _LARGEST:
            continue
        # A factor of one number is a scale, and says nothing of the tensor.
        if not np.isfinite(factors).all() or float(np.std(factors)) < 0.05 * float(
            np.abs(factors).mean()
        ):
            continue
        some_factors = np.broadcast_to(factors, case.r.shape).reshape(-1)[::every]
        if float(np.sum((e - rest * (some_factors - 1.0)) ** 2)) > 0.3 * energy:
            continue
        moved = r if beside is None else r - beside[1]
        score = case.explained(r + moved * (factors - 1.0))
        if best is None or score > best[0]:
            best = score, words
    if best is None or best[0] < _CLEAR:
        return None
    what = "what is right" if beside is None else f"what is right beside '{beside[0]}',"
    return Clue("scale", min(best[0], 0.99), f"it has {what} {best[1]} '{name}'", "factor")


_PLACES = 4096


def _term(case: Case, name: str, y: F64) -> Clue | None:
    if sum(length > 1 for length in y.shape) < 2:
        return None  # numbers of one axis are a bias
    terms = {f"'{name}'": y} if y.shape != case.r.shape else {}
    terms[f"the square of '{name}'"] = y * y
    if y.shape == case.r.shape:
        terms |= {"what '" + name + f"' has {side} zero": part for side, part in _halves(y)}
        terms |= {f"{label} of '{name}'": of(y) for label, of in _likely(case, y)}
        terms |= {words.format(name): moved for words, moved in _neighbours(y)}
    terms |= {
        f"the mean of '{name}' along axis {axis}": y.mean(axis=axis, keepdims=True)
        for axis, length in enumerate(y.shape)
        if length > 1
    }
    best: Clue | None = None
    for words, term in terms.items():
        values = np.broadcast_to(term, case.r.shape)
        size = float(np.sum(values * values))
        if not size > 0.0 or float(np.std(term)) < 0.05 * float(np.abs(term).mean()):
            continue
        factor = float(np.sum(values * case.e)) / size
        score = case.fitted(case.r + factor * values)
        if score >= _CLEAR and (best is None or score > best.score):
            what = f"{factor:+.4g} times {words} is added to what is right"
            best = Clue("scale", min(score, 0.99), what, "term")
    return best
