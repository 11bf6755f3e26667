"""What a comparison allows: limits on metrics, rtol and atol, thresholds of layers.

The norm of some tensors says nothing: a gradient that is zero by construction consists of rounding
alone. Such a row is judged on another scale, which its `limit_from` names. `error_on_scale` gives
the error on the scale that was used. The default limits are in `defaults`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from driftline.comparison.table.row import Column, Row
from driftline.comparison.tolerance.defaults import LIMITS, METRIC, coarsest
from driftline.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from driftline.comparison.tolerance.thresholds import Threshold, Thresholds


BEYOND = "beyond_bias"
"""Metric: error of an output without the part due to a bias that has no gradient."""
BEYOND_ROUNDING = "beyond_rounding"
"""Metric: error without the elements whose gradient consists of rounding alone."""
INTEGER_STEP = "integer_step"
"""Metric: root mean square of the scales of the integers that a row converted to numbers."""
WORST_SCALE = "worst_scale"
"""Metric of a weight with many scales: the error of the elements of one scale, channel or input, in
units of the rounding error there, and relative to the weight's other scales, channels or inputs."""
WORST_PLACE = ("worst_output", "worst_output_last", "worst_input", "worst_input_last")
"""Metrics stored with `worst_scale`: first and last output, and first and last input, of those
elements."""
ADDED = "added_error"
"""Metric of an output: its relative error from the reference's function, computed in float64 on the
candidate's own input. Errors that arrive at the site do not count."""
ADDED_ALLOWED = "added_allowed"
"""Metric of an output that has `added_error`: how much of it the site's number format explains."""
HALF = "half_error"
"""Metric of a suspect: its relative error on the half of the tokens where it is smaller. Tokens
that a router sent to other experts at a near tie are left out."""
REST = "rest_error"
"""Metric of a suspect: its relative error without tokens that a router sent to other experts."""
GIVEN = "given_error"
"""Metric of the input of a norm: its relative error with every group scaled by its own size, as in
the norm's result."""
TURNED = "turned_signs"
"""Metric of a gradient that an optimizer received: relative error of the step computed from it if
every element is divided by its size, as Adam does in its first step."""
MOVED_APART = "moved_apart"
"""Metric of a parameter after updates: relative error explained by gradient signs that rounding
turns."""
SUMMED_GRADIENTS = "of the gradients it sums"
SUMMED_ELEMENTS = "of the elements it sums"
BESIDE_WEIGHT = "beside the weight's gradient"
WHAT_CANCELS = "of the gradients that cancel"
AS_CANCELLED = "as a gradient that cancels"
AS_GIVEN = "as what it is given"
EXPLAINED = "as its inputs bring"
"""Suffix of `limit_from` for a row that passes because of the inputs of its site."""
NEAR_SMALLEST_STEP = "near its smallest step"
AS_ITS_GRADIENT = "as the gradient it is made of"

_OTHERS = (
    *(SUMMED_GRADIENTS, SUMMED_ELEMENTS, BESIDE_WEIGHT, AS_GIVEN, WHAT_CANCELS, AS_CANCELLED),
    *(NEAR_SMALLEST_STEP, AS_ITS_GRADIENT),
)


def is_on_another_scale(row: Row) -> bool:
    """Whether a row passed on a scale other than its own norm."""
    other = row.decided_by in (BEYOND, BEYOND_ROUNDING) or row.limit_from.endswith(_OTHERS)
    return other and row.status == "pass"


def error_on_scale(row: Row) -> float:
    """Relative L2 of a row, on the scale on which it passed; NaN if it is unknown.

    On another scale, the row's fraction of its limit is multiplied by the limit of its format.
    """
    # This makes it comparable with rows on the ordinary scale.
    if is_on_another_scale(row):
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        if dtype is not None:
            return row.severity * LIMITS[dtype.name]
    return float(row.metrics.get(METRIC, math.nan))


# Limits that replace the defaults: limits on metrics, or element-wise rtol and atol.


class Limit(NamedTuple):
    """The worst value of a metric that still passes; the metric's direction gives the side."""

    metric: str
    value: float


BY_USER = "user"
BY_THRESHOLDS = "thresholds"

_LAYER_METRICS = {"abs_diff": "mean_abs_error", "cos_sim": "cosine"}
"""Column names of a comparison table for the averages in layer files."""


class Tolerance:
    """All limits of one comparison.

    Attributes:
        limits: Limits that replace the per-dtype defaults; empty means the defaults.
        rtol: With `atol`, the element-wise test `|c - r| <= atol + rtol |r|`; any element outside
            fails its row. None if the test was not requested.
        atol: See `rtol`.
        min_coverage: Fraction of all tensors that must have been compared, 0 to 1. If None, nine
            tenths of the calls of leaf modules must be covered instead.
        thresholds: Limits of each layer, from clean runs, which replace the per-dtype defaults. A
            tensor without a threshold is not judged by them.
        slack: Factor by which a tensor may exceed its threshold.
    """

    __slots__ = ("atol", "limits", "min_coverage", "rtol", "slack", "thresholds")

    def __init__(
        self,
        limits: tuple[Limit, ...] = (),
        rtol: float | None = None,
        atol: float | None = None,
        min_coverage: float | None = None,
        thresholds: Thresholds | None = None,
        slack: float = 1.0,
    ) -> None:
        self.limits: Final = limits
        self.rtol: Final = rtol
        self.atol: Final = atol
        self.min_coverage: Final = min_coverage
        self.thresholds: Final = thresholds
        self.slack: Final = slack
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not value >= 0.0:
                raise BadInput(f"{name} is {value}; it must be 0 or more")
        if self.min_coverage is not None and not 0.0 <= self.min_coverage <= 1.0:
            raise BadInput(
                f"the minimal coverage is {self.min_coverage}; it must lie between 0 and 1",
                hint="0.95 asks for 95 % of all tensors",
            )
        if not 0.0 < self.slack < math.inf:
            raise BadInput(f"the slack is {self.slack}; it must be a number above 0")

    @property
    def elementwise(self) -> bool:
        return self.rtol is not None or self.atol is not None

    @property
    def explicit(self) -> bool:
        """Whether something replaces the per-dtype defaults."""
        return bool(self.limits) or self.elementwise or self.thresholds is not None

    def all_limits(self) -> tuple[Limit, ...]:
        """Return the limits on metrics, including the element-wise test."""
        # No element may be outside, so the limit of the share is zero.
        test = (Limit("outside_share", 0.0),) if self.elementwise else ()
        return (*test, *self.limits)

    def limits_of(self, row: Row) -> list[tuple[Limit, str]]:
        """Return the limits of a row, each with its origin.

        A threshold that is not a number becomes a limit of NaN, which no value satisfies.
        """
        limits = [(limit, BY_USER) for limit in self.all_limits()]
        if self.thresholds is not None:
            for metric in self.thresholds.metrics:
                entry = self.thresholds.find(metric, row.key.site, port=row.key.port)
                if entry is not None:
                    limits.append((_limit_of(entry, row, self.slack), BY_THRESHOLDS))
        return limits

    def as_json(self) -> dict[str, Any]:
        whose = BY_USER if self.thresholds is None else BY_THRESHOLDS
        return {
            "from": whose if self.explicit else "dtype",
            "metrics": {limit.metric: limit.value for limit in self.all_limits()},
            "rtol": self.rtol,
            "atol": self.atol,
            "min_coverage": self.min_coverage,
            **({} if self.thresholds is None else _about(self.thresholds, self.slack)),
        }

    def __str__(self) -> str:
        if not self.explicit:
            return "limits for the lower precision of the two dtypes"
        parts = [f"{limit.metric} {limit.value:g}" for limit in self.limits]
        if self.elementwise:
            parts.insert(0, f"|c - r| <= {self.atol or 0:g} + {self.rtol or 0:g} |r|")
        if self.thresholds is not None:
            times = "" if self.slack == 1.0 else f"{self.slack:g} times "
            parts.append(f"{times}the thresholds of {self.thresholds.path or 'clean runs'}")
        return "limits: " + ", ".join(parts)


def widened(value: float, column: Column, times: float) -> float:
    """Return a limit that allows `times` as much, measured from 0 or from a perfect 1.

    >>> widened(0.99, Column("cosine", "higher"), 2.0), widened(0.5, Column("rmse", "lower"), 2.0)
    (0.98, 1.0)
    """
    if times == 1.0:
        return value  # exact, so that a clean run stays within its own limits
    # A cosine is widened away from 1, not away from 0.
    if column.direction != "higher":
        return value * times
    if value <= 1.0:
        return 1.0 - (1.0 - value) * times
    return value / times


def _limit_of(entry: Threshold, row: Row, slack: float) -> Limit:
    """Return a threshold as a limit of the table's own metric."""
    metric, value = entry.metric, entry.value if entry.usable else math.nan
    if metric not in row.metrics and metric in _LAYER_METRICS:
        metric = _LAYER_METRICS[metric]
        if entry.statistic == "l2":  # the l2 over all elements, which is rmse times sqrt(count)
            metric = "rmse"
            value /= math.sqrt(max(math.prod(row.reference_shape or ()), 1))
        elif metric == "cosine" and value > 1.0:
            value = 1.0  # cosines of mixed formats may come out above 1
    return Limit(metric, widened(value, Column(metric, entry.direction), slack))


def _about(thresholds: Thresholds, slack: float) -> dict[str, Any]:
    return {
        "thresholds": {
            "path": thresholds.path,
            "model_id": thresholds.model_id,
            "metrics": list(thresholds.metrics),
            "layers": len(thresholds.sites),
            "slack": slack,
        }
    }


def limits_from(
    mapping: Mapping[str, float] | None,
    columns: Iterable[Column],
    *,
    at_most: Sequence[str] = (),
    at_least: Sequence[str] = (),
) -> tuple[Limit, ...]:
    """Return the limits of a mapping, of `--max METRIC=VALUE` and of `--min METRIC=VALUE`.

    Raises:
        BadInput: An unknown metric, a metric that cannot be limited, a value that is not a number,
            or `--max` for a metric where higher is better.
    """
    by_name = {column.name: column for column in columns}
    limits = [_limit(name, value, by_name) for name, value in (mapping or {}).items()]
    for option, words in (("--max", at_most), ("--min", at_least)):
        for word in words:
            name, sign, number = word.partition("=")
            if not sign:
                raise BadInput(
                    f"'{word}' is no limit", hint=f"write it as {option} relative_l2=0.01"
                )
            limit = _limit(name.strip(), number, by_name)
            direction = by_name[limit.metric].direction
            # The wrong option would silently reverse the limit.
            right = "--min" if direction == "higher" else "--max"
            if option != right:
                raise BadInput(
                    f"{limit.metric} passes from {'above' if right == '--min' else 'below'}",
                    hint=f"write {right} {word}",
                )
            limits.append(limit)
    return tuple(limits)


def _limit(name: str, value: float | str, by_name: Mapping[str, Column]) -> Limit:
    column = by_name.get(name)
    usable = [candidate.name for candidate in by_name.values() if candidate.direction != "none"]
    if column is None:
        raise BadInput(
            f"there is no metric '{name}' to put a limit on", hint=did_you_mean(name, usable)
        )
    if column.direction == "none":
        raise BadInput(
            f"{name} describes; no limit can be put on it", hint=did_you_mean("", usable)
        )
    try:
        number = float(value)
    except ValueError:
        # Text that is no number is refused like NaN, which no value could satisfy.
        number = math.nan
    if math.isnan(number):
        raise BadInput(
            f"the limit of {name} is {value!r}, which is no number",
            hint="give a number, such as 0.01",
        )
    return Limit(name, number)
