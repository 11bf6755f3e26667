"""How numbers, sizes and shapes are written for people; files for programs never use these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def number(value: float | int | None) -> str:
    """Three significant digits; whole counts as they are; absence is a dash.

    Just below 1 (a cosine) the distance from 1 is what matters, and keeps its digits.

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
    """Bytes in the unit a person would use.

    >>> size(999), size(1_080_000_000)
    ('999 B', '1.08 GB')
    """
    amount, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
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
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]
