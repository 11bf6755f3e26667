"""How large tensors are cut into blocks for several threads, and how many threads there may be."""

from __future__ import annotations

import os

BLOCK = 4 << 20
"""Elements per block of a large tensor: enough to keep a core busy, few enough to share out."""


def blocks_of(count: int) -> list[tuple[int, int]]:
    """First and last-plus-one element of each block of so many; a single one for most tensors."""
    if count <= 2 * BLOCK:
        return [(0, count)]
    return [(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]


def cores() -> int:
    """Cores this process may use; a container is often given fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
