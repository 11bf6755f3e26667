"""All causes that can be named, with their detectors, and the choice between several that fit.

A new cause is one detector in a file of this folder and one row in `_TABLE`. The order of the rows
decides between detectors with equal scores, so it is part of the behaviour.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from driftline.diagnosis.causes.attention_model import RECOMPUTED
from driftline.diagnosis.causes.case import Case, Clue, Rule
from driftline.registry import Address


class Cause(NamedTuple):
    """A kind of bug, and how it is treated among others.

    Attributes:
        name: As results and files have it.
        detectors: Where what recognises it is; empty for answers that need none.
        summary: What is wrong, in a sentence.
        noun: How a finding calls it, with its article.
        decisive: Rank among causes that are proven by something no other detector examines; these
            need no margin over the others. 0 for all others.
        freedom: How freely its prediction can be fitted, from 1; of two causes that explain
            equally, the one with less freedom is named. 0 if it cannot be compared so.
        exact: Whether its prediction has no fitted number at all.
        on_inputs: Whether it also applies to an input that was solved for, which has no zeros,
            grids or constants.
    """

    name: str
    detectors: tuple[Address, ...]
    summary: str
    noun: str = ""
    decisive: int = 0
    freedom: int = 0
    exact: bool = False
    on_inputs: bool = False


def _in(*places: str) -> tuple[Address, ...]:
    """Addresses of detectors in files of this folder: `file:function`."""
    return tuple(Address(f"driftline.diagnosis.causes.{place}") for place in places)


# fmt: off
_TABLE = (
    Cause("nan", _in("execution:nan_birth"),
          "NaN or Inf are born here", "a birth of NaN", decisive=2),
    Cause("saturation", _in("values:saturation"),
          "values stop at a largest one, or overflow", "saturation",
          decisive=1, freedom=5, exact=True),
    Cause("nondeterminism", _in("execution:nondeterminism"),
          "the candidate does not agree with itself",
          "non-determinism", decisive=3),
    Cause("missing-reduction", _in("execution:missing_reduction"),
          "a sum or mean over ranks was not taken, or taken wrongly",
          "a missing reduction over ranks", decisive=4),
    Cause("dropout", _in("regions:dropout"),
          "dropout is left on", "dropout left on", freedom=2, exact=True),
    Cause("zeroed", _in("regions:zeroed", "regions:lost_expert"),
          "a tile, channel, token or expert is zero",
          "a zeroed region", freedom=3, exact=True),
    Cause("stale", _in("regions:stale", "families.recurrences:state"),
          "a region holds what stood there before, or what belongs to other tokens",
          "stale values", freedom=4, exact=True, on_inputs=True),
    Cause("shift",
          _in("layout:shift", "windows:window", "families.grids:two_steps",
              "families.grids:points"),
          "tokens or positions have what belongs to their neighbours: a cache off by one, a "
          "padding on the wrong side or of another filling",
          "a shift", freedom=6, exact=True, on_inputs=True),
    Cause("transpose", _in("layout:transpose"),
          "two axes have changed places, in the output or in the weight",
          "a transpose", freedom=7, exact=True, on_inputs=True),
    Cause("permutation",
          _in("layout:permutation", "moves:rearranged", "moves:moved", "moves:picked"),
          "the right numbers in the wrong order: channels, heads, sequences, modules",
          "a permutation", freedom=8, exact=True, on_inputs=True),
    # The detector of attentions answers with the cause it recognised: mask, scale or another.
    Cause("attention", _in("attention:attention"),
          "a mistake inside an attention, named by its own cause"),
    Cause("activation",
          _in("values:activation", "gates:gate", "gates:along_an_axis", "gates:recurrence",
              "families.cells:cell",
              "families.elements:function"),
          "another activation function", "a wrong activation",
          freedom=1, exact=True),
    Cause("mask",
          _in("regions:mask", "moves:pooled", "families.grids:border", "families.grids:boxes",
              "families.sums_and_means:reduction", "families.sums_and_means:uneven",
              "families.elements:hidden"),
          "only tokens that a mask tells apart are off: pads, late tokens, future seen",
          "a wrong mask", freedom=9),
    Cause("soft-cap", _in("values:soft_cap"),
          "scores, or what a head gives, are capped differently, or not at all",
          "a wrong soft cap", freedom=1, exact=True),
    Cause("positions",
          _in("positions:angles", "positions:frequencies", "positions:by_place", "windows:resize"),
          "angles or distances of positions are others: base, pace, slopes, direction",
          "wrong positions", freedom=1, exact=True),
    Cause("scale",
          _in("values:scale", "values:by_slice", "normalisation:normalisation",
              "normalisation:neighbours",
              "combinations:combination", "combinations:shares", "families.elements:some",
              "families.elements:related", "families.elements:temperature",
              "families.linear_maps:weight", "families.linear_maps:neighbours",
              "families.recurrences:running", "families.sums_and_means:divided",
              "families.sums_and_means:adding_up", "families.updates:passes"),
          "everything, or one term of a sum, is too large or too small by a factor, or a norm's "
          "constant is wrong",
          "a wrong scale", freedom=10),
    Cause("offset", _in("values:offset", "combinations:zero_point"),
          "a constant is added to every token: a bias missing, doubled or wrong; or a zero point",
          "a wrong offset or bias", freedom=11),
    Cause("norm-precision", _in("precision:norm_precision"),
          "a norm computed in a coarser format than declared", "a norm in low precision",
          freedom=12),
    Cause("low-precision", _in("precision:low_precision"),
          "arithmetic in a coarser format than declared",
          "lower precision than declared", freedom=13),
    Cause("setting", (), "the models differ in a setting of the module: an attribute, a mode",
          "another setting"),
    Cause("weights", _in("combinations:unrelated_weights"),
          "the models differ in the weights of the module",
          "other weights", freedom=14),
    Cause("input", (), "the two programs were given different inputs", "another input"),
    Cause("loss", (), "the loss, or what is computed behind the model, is another one",
          "another loss"),
    Cause("code", (), "the models differ in the code of the module", "other code"),
    Cause("noise", (), "nothing but rounding"),
    Cause("unknown", (), "none of the known kinds fits clearly"),
)
# fmt: on

CAUSES = {cause.name: cause for cause in _TABLE if cause.name != "attention"}
"""The causes that can be named, by name."""

# A cause is named only if it explains most of the error, and no rival does. What is typical of a
# bug without having been measured is asked for less, and gives way to what was measured.
_CLEAR = 0.9
_TYPICAL = 0.8
_MARGIN = 0.08
_FIRST = [cause.name for cause in sorted(_TABLE, key=lambda c: c.decisive) if cause.decisive]


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Every detector, in the order of the table."""
    return tuple(address.load() for cause in _TABLE for address in cause.detectors)


@functools.cache
def rules_for_inputs() -> tuple[Rule, ...]:
    """The detectors that also apply to an input that was solved for."""
    return tuple(
        address.load() for cause in _TABLE if cause.on_inputs for address in cause.detectors
    )


def clues(case: Case, rules: Sequence[Rule] | None = None) -> list[Clue]:
    """The clues of all detectors, best first."""
    asked = (rule(case) for rule in (all_rules() if rules is None else rules))
    positive = [clue for clue in asked if clue is not None and clue.score > 0.0]
    # An attention that was computed again tells its mask; where errors begin only hints at it.
    if any(clue.detail == RECOMPUTED for clue in positive):
        positive = [clue for clue in positive if clue.cause != "mask" or clue.measured]
    return sorted(positive, key=lambda clue: -clue.score)


def best_clue(case: Case, rules: Sequence[Rule] | None = None) -> tuple[Clue | None, list[Clue]]:
    """The clue that fits clearly better than every other, None if none does; and all clues."""
    ranked = clues(case, rules)
    for cause in _FIRST:
        for clue in ranked:
            if clue.cause == cause and clue.score >= _CLEAR:
                return clue, ranked
    recomputed = next((c for c in ranked if c.detail == RECOMPUTED and c.score > _CLEAR), None)
    if recomputed is not None:
        return recomputed, ranked  # as a whole, with hardly anything fitted
    measured = [clue for clue in ranked if clue.measured and clue.score >= _CLEAR]
    typical = [clue for clue in ranked if not clue.measured and clue.score >= _TYPICAL]
    eligible = measured or typical
    if not eligible:
        return None, ranked
    best = eligible[0]
    for clue in eligible[1:]:
        if clue.cause != best.cause and clue.score > best.score - _MARGIN:
            preferred = _preferred(best, clue)
            if preferred is None:
                return None, ranked
            best = preferred
    return best, ranked


def _preferred(a: Clue, b: Clue) -> Clue | None:
    """The better of two equally good clues; None if neither has less freedom than the other."""
    first, second = CAUSES[a.cause], CAUSES[b.cause]
    if not first.freedom or not second.freedom:
        return None
    # Two exact predictions that both fit imperfectly exclude each other: better no answer than a
    # wrong one.
    if first.exact and second.exact and a.score < 0.97 and b.score < 0.97:
        return None
    return a if first.freedom < second.freedom else b
