"""Values of JSON files that anybody may have written; a value of a wrong type counts as missing.

A damaged or hostile file then gives fewer facts, but never an error far from where it was read.
This file does not know what the values mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MOST_RANKS = 1 << 20
"""No job has so many ranks.

Larger counts are ignored, because tables of this size would be made.
"""


def object_of(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object; otherwise an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def list_of(value: Any) -> list[Any]:
    """The value if it is a list; otherwise an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def count_of(value: Any, below: int = 1 << 62) -> int:
    """The value if it is an integer of at least 0 and less than `below`; otherwise 0.

    >>> count_of(3, 8), count_of(8, 8), count_of(True, 8), count_of("3", 8)
    (3, 0, 0, 0)
    """
    return value if type(value) is int and 0 <= value < below else 0
