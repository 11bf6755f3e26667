"""How numbers, sizes, shapes and lines of bars are written for people.

Files for programs never use these functions: they round and shorten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise


def number(value: float | int | None) -> str:
    """The number with three significant digits; integers unchanged; None as a dash.

    For a value just below 1 (a cosine), the distance from 1 matters, and its digits are kept.

    >>> number(0.0123456), number(12), number(float("nan")), number(None)
    ('0.0123', '12', 'nan', '-')
    >>> number(0.99968812), number(1 - 1e-9), number(1.0)
    ('0.99969', '1-1e-09', '1')
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    # Three digits would write every good cosine as 1.
    if 0.99 < value < 1:
        return f"{value:.5f}" if 1 - value >= 1e-4 else f"1-{1 - value:.2g}"
    return f"{value:.3g}"


def shape(sizes: Sequence[int] | None) -> str:
    """`2x3x4`; a scalar has no sizes to show.

    >>> shape((2, 3)), shape(()), shape(None)
    ('2x3', 'scalar', '-')
    """
    if sizes is None:
        return "-"
    return "x".join(str(size) for size in sizes) if sizes else "scalar"


def size(count: int) -> str:
    """A number of bytes in a readable unit.

    >>> size(999), size(1_080_000_000)
    ('999 B', '1.08 GB')
    """
    amount, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.5 would be rounded to 1000 of the smaller unit.
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{count} B" if unit == "B" else f"{amount:.3g} {unit}"


def counted(count: int, noun: str, many: str = "") -> str:
    """A number and its noun, in the right form.

    >>> counted(1, "tensor"), counted(2, "tensor"), counted(2, "process", "processes")
    ('1 tensor', '2 tensors', '2 processes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with their neighbours joined.

    >>> ranges([0, 1, 2, 5]), ranges([])
    ('0-2, 5', 'none')
    """
    parts: list[str] = []
    start = last = None
    # The None at the end closes the last range.
    for value in [*sorted(set(numbers)), None]:
        if last is not None and (value is None or value != last + 1):
            parts.append(str(start) if start == last else f"{start}-{last}")
            start = value
        elif start is None:
            start = value
        last = value
    return ", ".join(parts) or "none"


def dtypes(reference: str, candidate: str) -> str:
    """One name when both sides agree.

    >>> dtypes("float32", "bfloat16"), dtypes("float32", "float32")
    ('float32 → bfloat16', 'float32')
    """
    if not reference or not candidate or reference == candidate:
        return reference or candidate
    return f"{reference} → {candidate}"


def shorten(text: str, width: int) -> str:
    """Cut the middle out: the ends of a module path say most.

    >>> shorten("model.layers.10.mlp.act_fn", 16)
    'model…mlp.act_fn'
    """
    if len(text) <= width:
        return text
    if width < 4:
        return text[:width]
    # Two thirds for the end: it names the layer, the beginning is the same for all.
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


# Bars: a row of numbers as a line, one number as a single bar.


BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
BEYOND = "!"
"""The sign for values that are not finite."""
_COLDEST, _HOTTEST = -3.0, 1.0
"""Decimal logarithms of value over limit for the lowest and the highest bar."""


def spark(values: Sequence[float | None], width: int = WIDTH, *, errors: bool = False) -> str:
    """A line of bars, on a logarithmic scale if the values span more than a decade.

    Args:
        values: In order; None for a missing value. If there are more than `width`, neighbours are
            grouped, and the largest of each group is shown.
        width: The largest number of bars.
        errors: Whether the values are errors: 0 is then the smallest possible value, and does not
            prevent a logarithmic scale.

    >>> spark([1.0, 2.0, None, 8.0]), spark([1.0, 1.001])
    ('▁▂ █', '▁▁')
    >>> spark([0.0, 1e-6, 1e-3, 1.0], errors=True)
    '▁▁▅█'
    >>> spark([0.0, 0.0, 1.0, 0.98], errors=True)
    '▁▁██'
    """
    if len(values) > width:
        values = [_largest(group) for group in grouped(values, width)]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    positive = [v for v in finite if v > 0]
    if not finite:
        return "".join(" " if v is None else BEYOND for v in values).rstrip()
    # Exact sites have error 0, which has no logarithm; they get the lowest bar.
    least = min(positive, default=0.0) if errors else min(finite)
    wide = least > 0 and max(finite) / least > 10

    def scale(value: float) -> float:
        return math.log(max(value, least)) if wide else value

    # Errors of one size and exact sites: the exact ones are the bottom of the scale.
    low = 0.0 if errors and not wide and len(positive) < len(finite) else scale(least)
    # Values that hardly change get bars of equal height.
    high = max(scale(max(finite)), low if wide else low + 0.2 * abs(max(finite, key=abs)))
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
    """The values in `width` groups of neighbours."""
    # Rounded edges, so that groups differ by one value at most.
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def group_of(index: int, count: int, width: int) -> int:
    """The index of the group that holds the value at an index."""
    if count <= width:
        return index
    edges = [round(i * count / width) for i in range(width + 1)]
    return next(number for number, (a, b) in enumerate(pairwise(edges)) if a <= index < b)


def _largest(group: Sequence[float | None]) -> float | None:
    beyond = [v for v in group if v is not None and not math.isfinite(v)]
    # A group with a NaN or infinity must show it, whatever else is in the group.
    if beyond:
        return beyond[0]
    return max((v for v in group if v is not None), key=abs, default=None)


def heat(severity: float) -> str:
    """One bar for value over limit, on a logarithmic scale: half of the limit is already high.

    >>> heat(0.0), heat(0.5), heat(1.0), heat(30.0), heat(float("nan"))
    ('▁', '▆', '▇', '█', '█')
    """
    # A value that is not finite gets the highest bar.
    if math.isnan(severity) or severity == math.inf:
        return BARS[-1]
    if severity <= 0:
        return BARS[0]
    share = (math.log10(severity) - _COLDEST) / (_HOTTEST - _COLDEST)
    return BARS[max(0, min(len(BARS) - 1, int(share * len(BARS))))]
