"""In which order ranks had the rows and tokens of a batch, seen by its inputs.

Samplers deal rows out, and context parallelism gives every rank two stretches of the text, one from
either end. Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Order = tuple[int, ...]
"""Where the elements of the other run's axis lie in the joined one."""


def orders(
    made: npt.NDArray[Any], wanted: npt.NDArray[Any], parts: Mapping[int, int]
) -> dict[int, Order]:
    """What must be done to joined inputs to make them the other run's, by axis; empty if nothing,
    or if nothing does it.

    Args:
        made: Inputs, joined rank after rank.
        wanted: The other run's.
        parts: Axis of the inputs → among how many ranks it was split.
    """
    if made.shape != wanted.shape or np.array_equal(made, wanted):
        return {}
    if 0 in parts and (rows := _matched(made, wanted)):
        return {0: rows}
    for axis, many in parts.items():
        if axis == 0 or axis >= made.ndim:
            continue
        for order in (from_both_ends(made.shape[axis], many), _distinct(made, wanted, axis)):
            if not order:
                continue
            turned = np.take(made, order, axis=axis)
            if np.array_equal(turned, wanted):
                return {axis: order}
            if 0 in parts and (rows := _matched(turned, wanted)):
                return {0: rows, axis: order}
    return {}


def from_both_ends(length: int, many: int) -> Order:
    """Rank r holds stretch r and, counted from the end, stretch r; empty if that does not go.

    >>> from_both_ends(8, 2)
    (0, 1, 4, 5, 6, 7, 2, 3)
    """
    if many < 2 or length % (2 * many):
        return ()
    each = length // (2 * many)
    found = [0] * (2 * many)
    for rank in range(many):
        found[rank], found[2 * many - 1 - rank] = 2 * rank, 2 * rank + 1
    return tuple(stretch * each + n for stretch in found for n in range(each))


def _matched(made: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> Order:
    """Equal rows, in the order in which they come: what is computed of equal rows is equal."""
    rows: dict[bytes, list[int]] = {}
    found: Any
    for at, found in enumerate(np.ascontiguousarray(made)):
        rows.setdefault(found.tobytes(), []).append(at)
    order: list[int] = []
    for found in np.ascontiguousarray(wanted):
        places = rows.get(found.tobytes())
        if not places:
            return ()
        order.append(places.pop(0))
    return tuple(order)


def _distinct(made: npt.NDArray[Any], wanted: npt.NDArray[Any], axis: int) -> Order:
    """The same for tokens, if no two are alike: what is computed of equal tokens is not equal."""
    ours, theirs = (np.ascontiguousarray(np.moveaxis(each, axis, 0)) for each in (made, wanted))
    tokens: Any = theirs
    if len({each.tobytes() for each in tokens}) < len(theirs):
        return ()
    return _matched(ours, theirs)
