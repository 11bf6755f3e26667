"""Numbers as a line of bars, and one number as the heat of a place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
BEYOND = "!"
"""Stands for what is not finite."""
_COLDEST, _HOTTEST = -3.0, 1.0
"""Decimal logarithms of value over limit that the lowest and the highest bar stand for."""


def spark(values: Sequence[float | None], width: int = WIDTH, *, errors: bool = False) -> str:
    """A line of bars, logarithmic where sizes spread over more than a decade.

    Args:
        values: In order; None where there is none. More of them than the width are taken together,
            the largest of each group.
        width: At most so many bars.
        errors: They are errors: 0 is the least there is, and does not speak against logarithms.

    >>> spark([1.0, 2.0, None, 8.0]), spark([1.0, 1.001])
    ('▁▂ █', '▁▁')
    >>> spark([0.0, 1e-6, 1e-3, 1.0], errors=True)
    '▁▁▅█'
    """
    if len(values) > width:
        values = [_largest(group) for group in grouped(values, width)]
    known = [v for v in values if v is not None and math.isfinite(v)]
    positive = [v for v in known if v > 0]
    if not known:
        return "".join(" " if v is None else BEYOND for v in values).rstrip()
    least = min(positive, default=0.0) if errors else min(known)
    wide = least > 0 and max(known) / least > 10

    def scale(value: float) -> float:
        return math.log(max(value, least)) if wide else value

    low = scale(least)
    # Values that hardly move look so.
    high = max(scale(max(known)), low if wide else low + 0.2 * abs(max(known, key=abs)))
    bars: list[str] = []
    for value in values:
        if value is None:
            bars.append(" ")
        elif not math.isfinite(value):
            bars.append(BEYOND)
        else:
            share = (scale(value) - low) / (high - low) if high > low else 0.0
            bars.append(BARS[max(0, min(len(BARS) - 1, int(share * len(BARS))))])
    return "".join(bars)


def grouped(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    """As many neighbours together as it takes for `width` groups."""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def group_of(at: int, count: int, width: int) -> int:
    """In which group a value is."""
    if count <= width:
        return at
    edges = [round(i * count / width) for i in range(width + 1)]
    return next(number for number, (a, b) in enumerate(pairwise(edges)) if a <= at < b)


def _largest(group: Sequence[float | None]) -> float | None:
    beyond = [v for v in group if v is not None and not math.isfinite(v)]
    if beyond:
        return beyond[0]
    return max((v for v in group if v is not None), key=abs, default=None)


def heat(severity: float) -> str:
    """One bar for value over limit; half of the limit is high already, on this logarithmic scale.

    >>> heat(0.0), heat(0.5), heat(1.0), heat(30.0), heat(float("nan"))
    ('▁', '▆', '▇', '█', '█')
    """
    if math.isnan(severity) or severity == math.inf:
        return BARS[-1]
    if severity <= 0:
        return BARS[0]
    share = (math.log10(severity) - _COLDEST) / (_HOTTEST - _COLDEST)
    return BARS[max(0, min(len(BARS) - 1, int(share * len(BARS))))]
