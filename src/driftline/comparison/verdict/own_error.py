"""What a replay says of one site by itself: the form in which judging reads it and tables keep it.

How it is measured, `diagnosis.evidence.replay` knows. Reads no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from driftline.comparison.evidence.error_stats import Effect
from driftline.comparison.table.row import JSON, number_from_json, number_to_json

CHOICES = "choices inside it (of experts) may fall either way by rounding; its parts are judged"
"""The trouble of a site that chooses."""


class ReplayResult(NamedTuple):
    """What replay says about one site.

    Attributes:
        introduced: Whether it errs by itself more than trusted executions do.
        statistic: What is furthest outside: error, projection, offset, worst_row or nonfinite.
        excess: That, in units of its limit; above 1 is outside.
        halves: The same on either half of the rows.
        effect: The candidate's effect.
        low: The least that trusted executions have of that statistic (error: of noise).
        high: The most they have.
        noise: Relative error of the trusted execution that errs most, also where that is so much
            that nothing else can be said.
        unit: Unit roundoff of the candidate's format.
        slot: Which output.
        own_code_only: Whether its output alone was looked at while its own code was repeated: what
            it hands to its parts is then not known from here.
        after_parts: Whether what it hands to its parts was looked at, too: an error of its output
            is then made after that.
        trouble: Why nothing can be said; empty otherwise.
        failed: Whether that is because it does not give its own output on its own inputs.
        reason: What it does, where that is no number: another shape, other integers, buffers in a
            format that is too coarse for them.
        steps: Steps of which all of its calls were replayed, where there are others; None where
            there are none: it is known of every call.
        end: Of the model itself: the error of its output, and the error that a trusted execution of
            the whole model explains; None where that was not measured.
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
        """Whether nothing is known from replay, and other evidence may convict the site.

        Silence acquits nobody: a site that draws or chooses stands as two runs let it stand. A
        module that does not reproduce itself is not guilty by any evidence: its right output is
        not known.
        """
        return bool(self.trouble) and not self.failed

    def as_json(self) -> dict[str, JSON]:
        """The figures as JSON values."""
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
