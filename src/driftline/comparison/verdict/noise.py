"""The noise floor: how far trusted executions in the candidate's format are from the reference.

One interval per tensor, from all trusted runs together; how much wider it must be is learnt from
them too, each compared with the others (leave one out). A noise run that is itself broken is
detected, left out and named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from driftline.alignment.plan import Plan
from driftline.comparison.table.row import JSON, Row, number_from_json, number_to_json
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.comparison.verdict.sites import FINE, error_of, is_floating, same_kind, unit_of
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

# Bounds of the learnt margin: a single run has no spread to learn from, and an odd run must not
# widen it without end.
_WIDEST = 4.0
_ONE_RUN = 2.0
_LEAST = 1.4
_UNTRIED = 4.0
"""Units of a fine format that are allowed if all trusted runs agree to the bit."""
_BROKEN = 4.0
"""At a quarter of all tensors this many times the others' error: no trusted run does that."""


class Variant(NamedTuple):
    """One trusted run, measured against the reference.

    Attributes:
        name: What it is called.
        table: What was measured.
        run: Its tensors, where they are at hand.
        plan: Which of them belongs to which of the reference.
    """

    name: str
    table: Table
    run: Run | None = None
    plan: Plan | None = None


class NoiseFloor(NamedTuple):
    """What trusted runs do at every tensor.

    Attributes:
        errors: Largest relative error of any trusted run, by the reference's key.
        leans: Least and largest projection, by key.
        margin: How many times the interval's end is still inside.
        used: Names of the runs it rests on.
        excluded: Runs that were left out, with the reason.
        measured: Relative errors of each used run, by its name and the reference's key.
    """

    errors: Mapping[TensorKey, float]
    leans: Mapping[TensorKey, tuple[float, float]]
    margin: float
    used: tuple[str, ...]
    excluded: tuple[tuple[str, str], ...]
    measured: Mapping[str, Mapping[TensorKey, float]]

    def as_json(self) -> dict[str, JSON]:
        """What judging needs of it; what single runs measured is not kept."""
        return {
            "errors": [
                [*key, number_to_json(error), *map(number_to_json, self.leans.get(key, ()))]
                for key, error in self.errors.items()
            ],
            "margin": self.margin,
            "used": list(self.used),
            "excluded": [list(entry) for entry in self.excluded],
        }

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> NoiseFloor:
        """The inverse of `as_json`.

        Raises:
            KeyError: A value is missing.
            TypeError: A value is of another kind than `as_json` writes.
            ValueError: The same.
        """
        errors: dict[TensorKey, float] = {}
        leans: dict[TensorKey, tuple[float, float]] = {}
        size = len(TensorKey._fields)
        for entry in shown["errors"]:
            key = TensorKey(*entry[:size])
            error, *span = (float(number_from_json(number)) for number in entry[size:])
            errors[key] = error
            if span:
                low, high = span
                leans[key] = low, high
        return cls(
            errors,
            leans,
            float(shown["margin"]),
            tuple(map(str, shown["used"])),
            tuple((str(name), str(reason)) for name, reason in shown["excluded"]),
            {},
        )

    def excess(self, row: Row, least: float = 0.0) -> float | None:
        """Error of a row over what is allowed; None if no trusted run has the tensor.

        Args:
            row: Of the candidate against the reference.
            least: Error that is allowed whatever trusted runs do.
        """
        error = self.errors.get(row.key)
        if error is None:
            return None
        unit = unit_of(row)
        # In fine formats right orders of a sum differ, also where no trusted run has tried another.
        allowed = self.margin * error + (0.25 if error or unit > FINE else _UNTRIED) * unit
        allowed = max(allowed, least)
        # A value that is not finite on one side only is outside of every interval.
        if row.metrics.get("one_sided", 0):
            return math.inf
        return error_of(row) / allowed if allowed > 0.0 else (math.inf if error_of(row) else 0.0)

    def lean(self, row: Row) -> float:
        """How far a row's projection is outside the trusted span, in units of roundoff."""
        span = self.leans.get(row.key)
        value = float(row.metrics.get("projection", math.nan))
        unit = unit_of(row)
        if span is None or math.isnan(value) or not unit > 0.0:
            return 0.0
        # Nearer to the reference than trusted runs are is no fault, and one run spans nothing.
        low, high = min(span[0], 0.0), max(span[1], 0.0)
        if len(self.used) < 2:
            return 0.0
        beyond = max(value - high, low - value, 0.0)
        # Sums in fine formats have a bias of many units by themselves.
        fine = 32.0 if unit <= FINE else 1.0
        # As far beyond the span as the span is wide is still allowed: few runs know their tails
        # badly.
        return max(beyond - (high - low), 0.0) / (fine * unit)


def noise_floor(variants: Sequence[Variant]) -> NoiseFloor:
    """The noise floor of all trusted runs that are not broken."""
    measured = {variant.name: _errors(variant.table) for variant in variants}
    excluded: list[tuple[str, str]] = []
    for variant in variants:
        others = [measured[name] for name in measured if name != variant.name]
        reason = _broken(variant, measured[variant.name], others)
        if reason:
            excluded.append((variant.name, reason))
    for name, _ in excluded:
        measured.pop(name, None)
    tables = [variant.table for variant in variants if variant.name in measured]
    errors: dict[TensorKey, float] = {}
    leans: dict[TensorKey, tuple[float, float]] = {}
    for table in tables:
        for row in _rows(table):
            errors[row.key] = max(errors.get(row.key, 0.0), error_of(row))
            value = float(row.metrics.get("projection", math.nan))
            if not math.isnan(value):
                low, high = leans.get(row.key, (value, value))
                leans[row.key] = min(low, value), max(high, value)
    margin = margin_of(list(measured.values()))
    return NoiseFloor(errors, leans, margin, tuple(measured), tuple(excluded), measured)


def _rows(table: Table) -> list[Row]:
    return [
        row
        for row in table.rows
        if row.compared and is_floating(row) and same_kind(row) and row.key.port != "param"
    ]


def _errors(table: Table) -> dict[TensorKey, float]:
    return {row.key: error_of(row) for row in _rows(table)}


def _broken(
    variant: Variant, own: Mapping[TensorKey, float], others: Sequence[Mapping[TensorKey, float]]
) -> str:
    """Why a noise run cannot be trusted; empty if it can."""
    rows = _rows(variant.table)
    if not rows:
        return "it shares no tensor with the reference"
    born = next((row for row in rows if row.metrics.get("one_sided", 0)), None)
    if born is not None:
        return f"it has NaN or Inf that the reference has not, first at '{born.key.site}'"
    # Equal to the last bit: it was run in the reference's format and shows no noise at all.
    if not any(own.values()):
        return (
            "it is bitwise the reference: no noise of the candidate's number format; "
            "was it run in another format?"
        )
    worst = 0.0
    for row in rows:
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        if dtype is not None and dtype.name in LIMITS:
            worst = max(worst, error_of(row) / LIMITS[dtype.name])
    ratios = _ratios(own, others)
    if ratios:
        # The upper quartile: a broken run is off at many tensors, an honest one at a few at most.
        far = sorted(ratios)[3 * len(ratios) // 4]
        if far > _BROKEN and len(others) > 1:
            return (
                f"at a quarter of all tensors its error is {far:.0f} times that of the other "
                "trusted runs"
            )
        # With one other run either may be the broken one; the limits of the format decide.
        if len(others) == 1 and far > _BROKEN and worst > 1.0:
            return (
                f"its error is {far:.0f} times that of the other trusted run, and beyond what "
                "its number format explains"
            )
    elif worst > 4.0:
        return f"its error is {worst:.0f} times what its number format explains"
    return ""


def _ratios(
    own: Mapping[TensorKey, float], others: Sequence[Mapping[TensorKey, float]]
) -> list[float]:
    """Own error over the median error of the others, at tensors that both have."""
    ratios: list[float] = []
    for key, error in own.items():
        other_errors = [other[key] for other in others if key in other]
        if other_errors and max(other_errors) > 0.0:
            # The middle one: another broken run must not excuse this one.
            ratios.append(error / median(other_errors) if median(other_errors) > 0.0 else math.inf)
    return ratios


def margin_of(runs: Sequence[Mapping[TensorKey, float]]) -> float:
    """How much wider the interval of trusted runs must be, learnt from each against the others."""
    if len(runs) < 2:
        return _ONE_RUN
    ratios: list[float] = []
    for number, own in enumerate(runs):
        others = [run for other, run in enumerate(runs) if other != number]
        for key, error in own.items():
            other_errors = [other[key] for other in others if key in other]
            if other_errors and max(other_errors) > 0.0:
                ratios.append(error / max(other_errors))
    if not ratios:
        return _ONE_RUN
    ratios.sort()
    # Nearly the largest ratio, without the one in a thousand that is an accident.
    high = ratios[min(len(ratios) - 1, math.ceil(0.999 * len(ratios)) - 1)]
    # Two or three runs know little of the tail; each further one tells more.
    return min(max(_LEAST, 1.15 * high, 1.0 + 1.0 / (len(runs) - 1)), _WIDEST)
