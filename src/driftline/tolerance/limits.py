"""What somebody allows instead of the defaults: limits on metrics, or element-wise rtol and atol.

Only says how much is allowed. Whether a row keeps it is gating's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from driftline.comparison.row import Column
from driftline.errors import BadInput, did_you_mean


class Limit(NamedTuple):
    """The worst value of a metric that still passes; its direction says on which side that is."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Everything that was allowed for one comparison.

    Attributes:
        limits: Limits that take the place of the per-dtype defaults; none means the defaults.
        rtol: With `atol`, the element-wise test `|c - r| <= atol + rtol |r|`; any element outside
            fails its row. None when the test was not asked for.
        atol: See `rtol`.
        min_coverage: The share of all tensors that must have been compared, 0 to 1.
    """

    limits: tuple[Limit, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    min_coverage: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not value >= 0.0:
                raise BadInput(f"{name} is {value}; it must be 0 or more")
        if not 0.0 <= self.min_coverage <= 1.0:
            raise BadInput(
                f"the minimal coverage is {self.min_coverage}; it must lie between 0 and 1",
                hint="0.95 asks for 95 % of all tensors",
            )

    @property
    def elementwise(self) -> bool:
        return self.rtol is not None or self.atol is not None

    @property
    def explicit(self) -> bool:
        """Whether anything takes the place of the per-dtype defaults."""
        return bool(self.limits) or self.elementwise

    def all_limits(self) -> tuple[Limit, ...]:
        """The limits to hold, the element-wise test among them."""
        test = (Limit("outside_share", 0.0),) if self.elementwise else ()
        return (*test, *self.limits)

    def as_json(self) -> dict[str, Any]:
        return {
            "from": "user" if self.explicit else "dtype",
            "metrics": {limit.metric: limit.value for limit in self.all_limits()},
            "rtol": self.rtol,
            "atol": self.atol,
            "min_coverage": self.min_coverage,
        }

    def __str__(self) -> str:
        if not self.explicit:
            return "limits of the coarser dtype of the two sides"
        parts = [f"{limit.metric} {limit.value:g}" for limit in self.limits]
        if self.elementwise:
            parts.insert(0, f"|c - r| <= {self.atol or 0:g} + {self.rtol or 0:g} |r|")
        return "limits: " + ", ".join(parts)


def limits_from(
    given: Mapping[str, float] | None,
    columns: Iterable[Column],
    *,
    at_most: Sequence[str] = (),
    at_least: Sequence[str] = (),
) -> tuple[Limit, ...]:
    """Limits from a mapping, and from `--max METRIC=VALUE` and `--min METRIC=VALUE`.

    Raises:
        BadInput: An unknown metric, one that no limit can be put on, a value that is no number, or
            `--max` for a metric that passes from above.
    """
    known = {column.name: column for column in columns}
    limits = [_limit(name, value, known) for name, value in (given or {}).items()]
    for option, words in (("--max", at_most), ("--min", at_least)):
        for word in words:
            name, sign, number = word.partition("=")
            if not sign:
                raise BadInput(
                    f"'{word}' is no limit", hint=f"write it as {option} relative_l2=0.01"
                )
            limit = _limit(name.strip(), number, known)
            direction = known[limit.metric].direction
            right = "--min" if direction == "higher" else "--max"
            if option != right:
                raise BadInput(
                    f"{limit.metric} passes from {'above' if right == '--min' else 'below'}",
                    hint=f"write {right} {word}",
                )
            limits.append(limit)
    return tuple(limits)


def _limit(name: str, value: float | str, known: Mapping[str, Column]) -> Limit:
    column = known.get(name)
    if column is None:
        raise BadInput(
            f"there is no metric '{name}' to put a limit on", hint=did_you_mean(name, known)
        )
    if column.direction == "none":
        usable = [each.name for each in known.values() if each.direction != "none"]
        raise BadInput(
            f"{name} describes; no limit can be put on it", hint=did_you_mean("", usable)
        )
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise BadInput(f"the limit of {name} is {value!r}, which is no number")
    return Limit(name, number)
