"""One threshold: a value, where it holds, and what it rests on. With its JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from driftline.comparison.row import JSON, Direction, number_from_json, number_to_json


class PerShape(NamedTuple):
    """The value that one shape alone gives.

    Attributes:
        about: What the shape is: batch_size, seq_length, max_new_tokens, dtype, or a tensor's
            shape.
        value: The threshold of this shape.
        samples: How many values it rests on.
    """

    about: Mapping[str, Any]
    value: float
    samples: int


class Threshold(NamedTuple):
    """The worst value of a metric that is still allowed, somewhere.

    Attributes:
        metric: Its name.
        value: The threshold; NaN when it could not be had, which allows nothing.
        site: The layer; empty for the model as a whole.
        port: Which side of the layer; empty for the model as a whole.
        statistic: What it is of the clean values: p99, average, l2, …; empty if nobody said.
        direction: On which side of the value passing is.
        samples: How many clean values it rests on; 0 if nobody said.
        interval: Bootstrap interval (95 %) of the statistic; None where there is none.
        observed: The statistic before the margin; None if nobody said.
        nan: How many of the clean values were NaN.
        inf: How many were infinite.
        dtypes: The number formats that were pooled.
        shapes: What each shape gives by itself.
    """

    metric: str
    value: float
    site: str = ""
    port: str = ""
    statistic: str = ""
    direction: Direction = "lower"
    samples: int = 0
    interval: tuple[float, float] | None = None
    observed: float | None = None
    nan: int = 0
    inf: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[PerShape, ...] = ()

    @property
    def usable(self) -> bool:
        return math.isfinite(self.value)

    def for_shape(self, shape: Mapping[str, Any] | None) -> float:
        """The value of the shapes that agree in everything asked for (the most lenient of them),
        or the pooled one when none does."""
        own = [
            each.value
            for each in self.shapes
            if shape and all(each.about.get(name) == value for name, value in shape.items())
        ]
        own = [value for value in own if math.isfinite(value)]
        if not own:
            return self.value
        return min(own) if self.direction == "higher" else max(own)


def number(value: JSON) -> float:
    """A number of the file; what is null there is no number."""
    return math.nan if value is None else float(number_from_json(value))


def to_json(entry: Threshold) -> dict[str, JSON]:
    shown: dict[str, JSON] = dict(entry._asdict())
    shown["value"] = number_to_json(entry.value)
    shown["observed"] = None if entry.observed is None else number_to_json(entry.observed)
    shown["interval"] = None if entry.interval is None else list(entry.interval)
    shown["dtypes"] = list(entry.dtypes)
    shown["shapes"] = [
        {**each.about, "value": number_to_json(each.value), "samples": each.samples}
        for each in entry.shapes
    ]
    return shown


def from_json(shown: Mapping[str, JSON]) -> Threshold:
    interval = shown.get("interval")
    observed = shown.get("observed")
    direction = str(shown.get("direction", "lower"))
    if direction not in ("lower", "higher", "zero"):
        raise ValueError(f"{direction!r} is no direction")
    return Threshold(
        metric=str(shown["metric"]),
        value=number(shown["value"]),
        site=str(shown.get("site", "")),
        port=str(shown.get("port", "")),
        statistic=str(shown.get("statistic", "")),
        direction=cast(Direction, direction),
        samples=int(shown.get("samples", 0)),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        observed=None if observed is None else number(observed),
        nan=int(shown.get("nan", 0)),
        inf=int(shown.get("inf", 0)),
        dtypes=tuple(map(str, shown.get("dtypes", ()))),
        shapes=tuple(map(_shape_from_json, shown.get("shapes", ()))),
    )


def _shape_from_json(shown: Mapping[str, JSON]) -> PerShape:
    about = {name: value for name, value in shown.items() if name not in ("value", "samples")}
    return PerShape(about, number(shown["value"]), int(shown.get("samples", 0)))
