"""The error that one site adds by itself, as measured by replay or by recomputation.

`diagnosis.evidence.replay` measures a `ReplayResult`, and `comparison.evidence.recomputed` the
metrics from which an `AddedError` is read. This file reads no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from driftline.comparison.evidence.error_stats import Effect
from driftline.comparison.evidence.rules import ADDED_BY_OWN_WEIGHTS, ADDED_PROJECTION
from driftline.comparison.table.row import JSON, Row, number_from_json, number_to_json
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.comparison.tolerance.tolerance import ADDED, ADDED_ALLOWED

CHOICES = "choices inside it (of experts) may fall either way by rounding; its parts are judged"
"""Value of `trouble` for a site that makes discrete choices."""


class ReplayResult(NamedTuple):
    """Result of the replay of one site.

    Attributes:
        introduced: Whether the site adds more error by itself than trusted executions do.
        statistic: The statistic that exceeds its limit most: error, projection, offset, worst_row
            or nonfinite.
        excess: That statistic divided by its limit; above 1 is outside.
        halves: The same ratio for either half of the rows.
        effect: The candidate's effect.
        low: Smallest value of that statistic in trusted executions (for error: of the noise).
        high: Largest value of that statistic in trusted executions.
        noise: Largest relative error of a trusted execution. It is set even where it is so large
            that nothing else can be concluded.
        unit: Unit roundoff of the candidate's format.
        slot: Slot of the output.
        own_code_only: Whether the container's own code was repeated and only its output was
            checked. Then nothing is known about the inputs that it passes to its parts.
        after_parts: Whether the inputs that it passes to its parts were checked too. Then an error
            of its output is made after them.
        trouble: Why nothing can be concluded; empty otherwise.
        failed: Whether the trouble is that the site does not reproduce its own output from its own
            inputs.
        reason: What is wrong, if it is not a number: another shape, other integers, or buffers in a
            format that is too coarse for them.
        steps: Steps in which all calls of the site were replayed, if there are others; None if all
            calls of all steps were replayed.
        end: For the model itself, the error of its output and the error that a trusted execution of
            the whole model explains; None if that was not measured.
    """

    introduced: bool
    statistic: str = ""
    excess: float = 0.0
    halves: tuple[float, float] = (0.0, 0.0)
    effect: Effect | None = None
    low: float = math.nan
    high: float = math.nan
    noise: float = math.nan
    unit: float = 0.0
    slot: str = "0"
    own_code_only: bool = False
    after_parts: bool = False
    trouble: str = ""
    failed: bool = False
    reason: str = ""
    steps: tuple[int, ...] | None = None
    end: tuple[float, float] | None = None

    @property
    def is_open(self) -> bool:
        """Whether replay gave no result, so that other evidence may convict the site.

        A missing result acquits no site: a site that draws random numbers or makes choices keeps
        the status that the comparison of the two runs gives it. A module that does not reproduce
        its own output is not convicted by any evidence, because its correct output is unknown.
        """
        return bool(self.trouble) and not self.failed

    def as_json(self) -> dict[str, JSON]:
        """Return the figures as JSON values."""
        return {
            name: None if value is None else _shown(value)
            for name, value in zip(self._fields, self, strict=True)
        }

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> ReplayResult:
        """The inverse of `as_json`.

        Raises:
            KeyError: A value is missing.
            TypeError: A value is of another kind than `as_json` writes.
            ValueError: The same.
        """

        def number(name: str) -> float:
            return float(number_from_json(shown[name]))

        first, second = (float(number_from_json(half)) for half in shown["halves"])
        effect, end = shown["effect"], shown.get("end")
        return cls(
            bool(shown["introduced"]),
            str(shown["statistic"]),
            number("excess"),
            (first, second),
            None if effect is None else Effect(*map(_number, effect)),
            number("low"),
            number("high"),
            number("noise"),
            number("unit"),
            str(shown["slot"]),
            bool(shown["own_code_only"]),
            bool(shown["after_parts"]),
            str(shown["trouble"]),
            bool(shown["failed"]),
            str(shown.get("reason", "")),
            None if (steps := shown.get("steps")) is None else tuple(map(int, steps)),
            None if end is None else (_number(end[0]), _number(end[1])),
        )


def _shown(value: JSON) -> JSON:
    if isinstance(value, tuple):
        return [number_to_json(number) for number in cast("tuple[float, ...]", value)]
    return number_to_json(value) if isinstance(value, float) else value


def _number(shown: JSON) -> Any:
    return number_from_json(shown)


# The error that a leaf adds, by recomputing its output. The figures are metrics of the row of that
# output, so that shards, merged parts and stored tables have them.


Fault: TypeAlias = Literal["", "function", "weights", "format"]
"""Fault of a leaf: it computes another function, or the same function with other weights, or its
number format is too coarse."""
_NEARLY_ALL = 0.5
"""Fraction of the error that the candidate's own weights must explain to be called the fault."""


class AddedError(NamedTuple):
    """The error that a leaf adds by itself, measured on the candidate's input.

    Attributes:
        error: Error relative to the result of the reference's function on that input.
        allowed: Error that correct arithmetic in the candidate's formats may have.
        ratio: `error / allowed`; above 1 is outside.
        projection: Error along the result: 0.05 for a result times 1.05.
        fault: What is wrong with the leaf; empty if nothing is.
        format: The coarsest number format of its output.
    """

    error: float
    allowed: float
    ratio: float
    projection: float
    fault: Fault
    format: str

    @property
    def reason(self) -> str:
        """Why the leaf is wrong, in words; empty if it is right."""
        if self.fault == "weights":
            return "it computes the reference's function with other weights"
        if self.fault == "format":
            return too_coarse(self.format, self.error)
        if self.fault == "function":
            return "the reference's function gives something else on the same input"
        return ""


def too_coarse(format_name: str, error: float) -> str:
    """Return the sentence for a format in which even correct arithmetic has this error."""
    return (
        f"{format_name} is too coarse here: rounding alone adds {error:.2g}; "
        "keep it in float32 here"
    )


def added_error(row: Row) -> AddedError | None:
    """Return the error that the leaf of this output adds; None if it was not recomputed."""
    error, allowed = row.metrics.get(ADDED), row.metrics.get(ADDED_ALLOWED)
    if error is None or allowed is None:
        return None
    error, allowed = float(error), float(allowed)
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    fault: Fault = ""
    ratio = error / allowed if allowed > 0.0 else (math.inf if error > 0.0 else 0.0)
    if not ratio <= 1.0:
        by_own = float(row.metrics.get(ADDED_BY_OWN_WEIGHTS, math.inf))
        fault = "weights" if by_own <= max(allowed, _NEARLY_ALL * error) else "function"
    # Rounding explains the error, but it exceeds the limit for any site of this format.
    elif dtype is not None and error > LIMITS[dtype.name]:
        fault, ratio = "format", max(ratio, error / LIMITS[dtype.name])
    projection = float(row.metrics.get(ADDED_PROJECTION, math.nan))
    return AddedError(error, allowed, ratio, projection, fault, dtype.name if dtype else "")
