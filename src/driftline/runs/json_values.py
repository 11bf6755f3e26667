"""Values in JSON files that anybody may have written: one of another type counts as missing.

So a damaged or hostile file leads to fewer facts, never to an error far away from where it was
read. Does not know what the values mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MOST_RANKS = 1 << 20
"""No job has so many: counts of ranks beyond are not believed, because tables are made by them."""


def object_of(value: Any) -> Mapping[str, Any]:
    """The value if it is an object of JSON; otherwise an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def list_of(value: Any) -> list[Any]:
    """The value if it is a list; otherwise an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def count_of(value: Any, below: int = 1 << 62) -> int:
    """The value if it is a whole number from 0 up to, not including, `below`; otherwise 0.

    >>> count_of(3, 8), count_of(8, 8), count_of(True, 8), count_of("3", 8)
    (3, 0, 0, 0)
    """
    return value if type(value) is int and 0 <= value < below else 0
