"""All causes that can be named, with their detectors, and the choice between several that fit.

A new cause is one detector in a file of this folder, one line in `CAUSES` and one in `RULES`. The
order of `RULES` decides ties, so it is part of the behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.diagnosis.causes.attention import attention
from driftline.diagnosis.causes.case import Case, Clue, Rule
from driftline.diagnosis.causes.execution import missing_reduction, nan_birth, nondeterminism
from driftline.diagnosis.causes.layout import permutation, shift, transpose
from driftline.diagnosis.causes.precision import low_precision, norm_precision
from driftline.diagnosis.causes.regions import dropout, lost_expert, mask, stale, zeroed
from driftline.diagnosis.causes.values import activation, offset, saturation, scale

CAUSES: dict[str, str] = {
    "scale": "everything is too large or too small by a factor, or a norm's epsilon is wrong",
    "offset": "a constant is added to every token: a bias missing, doubled or wrong",
    "permutation": "the right numbers in the wrong order: channels, heads, sequences, modules",
    "transpose": "two axes have changed places, in the output or in the weight",
    "shift": "tokens have what belongs to their neighbours: positions or cache off by one",
    "mask": "only tokens that a mask tells apart are off: pads, late tokens, future seen",
    "zeroed": "a tile, channel, token or expert is zero",
    "stale": "a region holds what stood there before, or what belongs to other tokens",
    "saturation": "values stop at a largest one, or overflow",
    "low-precision": "arithmetic in a coarser format than declared",
    "activation": "another activation function",
    "norm-precision": "a norm computed in a coarser format than declared",
    "dropout": "dropout is left on",
    "nondeterminism": "the candidate does not agree with itself",
    "nan": "NaN or Inf are born here",
    "missing-reduction": "a sum or mean over ranks was not taken, or taken wrongly",
    "noise": "nothing but rounding",
    "unknown": "none of the known kinds fits clearly",
}

RULES: tuple[Rule, ...] = (
    *(nan_birth, saturation, nondeterminism, missing_reduction),
    *(dropout, zeroed, lost_expert, stale, shift, transpose, permutation),
    *(attention, activation, mask, scale, offset, norm_precision, low_precision),
)

RULES_FOR_INPUTS: tuple[Rule, ...] = (stale, shift, transpose, permutation)
"""Detectors that also apply to an input that was solved for: no zeros, grids or constants."""

# A cause is named only if it explains most of the error, and clearly more than any other cause.
_CLEAR = 0.8
_MARGIN = 0.08
_FIRST = ("saturation", "nan", "nondeterminism", "missing-reduction")
"""Proven by something no other detector examines; these need no margin over the others."""


def clues(case: Case, rules: Sequence[Rule] = RULES) -> list[Clue]:
    """The clues of all detectors, best first."""
    positive = [clue for rule in rules if (clue := rule(case)) is not None and clue.score > 0.0]
    return sorted(positive, key=lambda clue: -clue.score)


def best_clue(case: Case, rules: Sequence[Rule] = RULES) -> tuple[Clue | None, list[Clue]]:
    """The clue that fits clearly better than every other, None if none does; and all clues."""
    ranked = clues(case, rules)
    for cause in _FIRST:
        for clue in ranked:
            if clue.cause == cause and clue.score >= 0.9:
                return clue, ranked
    if not ranked or ranked[0].score < _CLEAR:
        return None, ranked
    best = ranked[0]
    if (
        inner := next((c for c in ranked if c.detail == "attention" and c.score > 0.9), None)
    ) is not None:
        return inner, ranked  # recomputed as a whole, with nothing fitted but a factor
    for clue in ranked[1:]:
        if clue.cause != best.cause and clue.score > best.score - _MARGIN:
            preferred = _preferred(best, clue)
            if preferred is None:
                return None, ranked
            best = preferred
    return best, ranked


_SPECIAL = (
    *("activation", "dropout", "zeroed", "stale", "saturation", "shift", "transpose"),
    *("permutation", "mask", "scale", "offset", "norm-precision", "low-precision"),
)
"""Exact predictions before fitted ones: of two that explain equally, the one with less freedom."""
_EXACT = _SPECIAL[:8]


def _preferred(a: Clue, b: Clue) -> Clue | None:
    """The better of two equally good clues; None if neither has less freedom than the other."""
    if a.cause not in _SPECIAL or b.cause not in _SPECIAL:
        return None
    # Two exact predictions that both fit imperfectly exclude each other: better no answer than a
    # wrong one.
    if a.cause in _EXACT and b.cause in _EXACT and a.score < 0.97 and b.score < 0.97:
        return None
    return a if _SPECIAL.index(a.cause) < _SPECIAL.index(b.cause) else b
