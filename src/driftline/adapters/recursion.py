"""Room on Python's stack for the capture's own frames: modules nested by the hundred need it.

They would otherwise run into the recursion limit only because they are watched.
"""

from __future__ import annotations

import contextlib
import sys

DEEP = 32
"""Every so many levels of modules the limit is raised."""
_OWN_FRAMES = 6  # at most, for each module call: the wrapper's own, and calls from C count too


def more_room() -> int:
    """Raise the limit by what our own frames take of it; returns what it is then."""
    with contextlib.suppress(ValueError, OverflowError):
        limit = sys.getrecursionlimit() + _OWN_FRAMES * DEEP
        sys.setrecursionlimit(limit)
        return limit
    return 0


def give_room_back(limit: int) -> None:
    """Lower it again."""
    if sys.getrecursionlimit() == limit:  # else the program has set its own meanwhile
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit - _OWN_FRAMES * DEEP)
