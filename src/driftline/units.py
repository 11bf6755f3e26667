"""Sizes in bytes: `2GB` into a number, and a number into text."""

from __future__ import annotations

import re

from driftline.errors import BadInput

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_UNITS = "kmgtp"


def size_of(text: str) -> int:
    """Bytes from `2GB`, `500MB`, `1GiB`, `1000`.

    >>> size_of("2GB"), size_of("1.5KiB"), size_of("7")
    (2000000000, 1536, 7)
    """
    match = _SIZE.fullmatch(text.strip())
    # A limit of zero would refuse everything, so it is taken for a mistake.
    if match is None or float(match[1]) == 0:
        raise BadInput(f"a limit is a size such as 500MB or 2GiB, not '{text}'")
    # Decimal units as disks are sold; with an `i` the powers of 1024.
    power = _UNITS.index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def size_text(count: int) -> str:
    """A number of bytes in decimal units, to one digit.

    >>> size_text(999), size_text(1_234_567)
    ('999 bytes', '1.2 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
