"""The noise floor: how far trusted executions in the candidate's format are from the reference.

There is one interval per tensor, from all trusted runs together. The margin around it is learnt
from the runs as well: each run is compared with the others (leave one out). A noise run that is
itself broken is detected, left out and named.
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

# Bounds of the learnt margin: a single run shows no spread, and an unusual run must not widen the
# margin without limit.
_WIDEST = 4.0
_ONE_RUN = 2.0
_LEAST = 1.4
_UNTRIED = 4.0
"""Units of roundoff of a fine format that are allowed if all trusted runs agree bitwise."""
_BROKEN = 4.0
"""A run is broken if its error is this many times the others' at a quarter of all tensors."""


class Variant(NamedTuple):
    """One trusted run, measured against the reference.

    Attributes:
        name: Name of the run.
        table: Its comparison with the reference.
        run: Its tensors, if available.
        plan: The pairing of its tensors with those of the reference.
    """

    name: str
    table: Table
    run: Run | None = None
    plan: Plan | None = None


class NoiseFloor(NamedTuple):
    """Errors of trusted runs at every tensor.

    Attributes:
        errors: Largest relative error of any trusted run, by the reference's key.
        leans: Smallest and largest projection, by key.
        margin: Factor by which the allowed error exceeds the largest error.
        used: Names of the runs that were used.
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
        """Return what judging needs as JSON; the errors of single runs are left out."""
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
        """Return a row's error over the allowed error; None if no trusted run has the tensor.

        Args:
            row: A row that compares the candidate with the reference.
            least: Error that is allowed whatever the trusted runs show.
        """
        error = self.errors.get(row.key)
        if error is None:
            return None
        unit = unit_of(row)
        # In fine formats correct orders of a sum differ, even if no trusted run tried another one.
        allowed = self.margin * error + (0.25 if error or unit > FINE else _UNTRIED) * unit
        allowed = max(allowed, least)
        # A value that is not finite on one side only is outside any interval.
        if row.metrics.get("one_sided", 0):
            return math.inf
        return error_of(row) / allowed if allowed > 0.0 else (math.inf if error_of(row) else 0.0)

    def lean(self, row: Row) -> float:
        """Return how far a row's projection is outside the trusted range, in units of roundoff."""
        span = self.leans.get(row.key)
        value = float(row.metrics.get("projection", math.nan))
        unit = unit_of(row)
        if span is None or math.isnan(value) or not unit > 0.0:
            return 0.0
        # A projection nearer to 0 than those of trusted runs is no fault; one run has no range.
        low, high = min(span[0], 0.0), max(span[1], 0.0)
        if len(self.used) < 2:
            return 0.0
        beyond = max(value - high, low - value, 0.0)
        # Sums in fine formats have a bias of many units anyway.
        fine = 32.0 if unit <= FINE else 1.0
        # The range is widened by its own width on either side, because few runs show little of the
        # tails.
        return max(beyond - (high - low), 0.0) / (fine * unit)


def noise_floor(variants: Sequence[Variant]) -> NoiseFloor:
    """Return the noise floor of all trusted runs that are not broken."""
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
    """Return why a noise run cannot be trusted; empty if it can."""
    rows = _rows(variant.table)
    if not rows:
        return "it shares no tensor with the reference"
    born = next((row for row in rows if row.metrics.get("one_sided", 0)), None)
    if born is not None:
        return f"it has NaN or Inf that the reference has not, first at '{born.key.site}'"
    # Bitwise equality means that it was run in the reference's format, so it shows no noise.
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
        # The upper quartile: a broken run is off at many tensors, a good one at a few at most.
        far = sorted(ratios)[3 * len(ratios) // 4]
        if far > _BROKEN and len(others) > 1:
            return (
                f"at a quarter of all tensors its error is {far:.0f} times that of the other "
                "trusted runs"
            )
        # With one other run, either may be the broken one; the limits of the format decide.
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
    """Return own error over the median error of the others, at tensors that both have."""
    ratios: list[float] = []
    for key, error in own.items():
        other_errors = [other[key] for other in others if key in other]
        if other_errors and max(other_errors) > 0.0:
            # The median is used, because another broken run must not excuse this one.
            ratios.append(error / median(other_errors) if median(other_errors) > 0.0 else math.inf)
    return ratios


def margin_of(runs: Sequence[Mapping[TensorKey, float]]) -> float:
    """Return the margin of the trusted interval, learnt by comparing each run with the others."""
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
    # Nearly the largest ratio; the largest thousandth is ignored as accidental.
    high = ratios[min(len(ratios) - 1, math.ceil(0.999 * len(ratios)) - 1)]
    # Two or three runs show little of the tail; each further run allows a smaller margin.
    return min(max(_LEAST, 1.15 * high, 1.0 + 1.0 / (len(runs) - 1)), _WIDEST)
