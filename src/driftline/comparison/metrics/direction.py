"""Direction: do two tensors, seen as long vectors, point the same way, and how much longer is one?

Every function takes finite float64 arrays of one shape, `reference` first, and returns a float.
"""

from __future__ import annotations

import numpy as np

from driftline.comparison.metrics.difference import F64, norm


def cosine(reference: F64, candidate: F64) -> float:
    """Cosine of the angle between the two; blind to scale: `cosine(u, 2u)` is 1.

    Computed as `1 - ||u - v||^2 / 2` of the unit vectors, which is exact for nearly equal tensors
    where the quotient of a dot product is not, and never exceeds 1. Both zero: 1. One zero: 0.

    >>> cosine(np.array([1.0, 0.0]), np.array([0.0, 3.0]))
    0.0
    >>> cosine(np.zeros(2), np.ones(2)), cosine(np.zeros(2), np.zeros(2))
    (0.0, 1.0)
    """
    ours, theirs = _unit(reference), _unit(candidate)
    if ours is None or theirs is None:
        return 1.0 if ours is theirs else 0.0
    gap = ours - theirs
    return 1.0 - min(2.0, 0.5 * float(np.sum(gap * gap)))


def projection(reference: F64, candidate: F64) -> float:
    """`<e, r> / <r, r>` with `e = candidate - reference`: the error's share along the reference.

    A scale fault of 3 % gives 0.03 whatever the rounding noise around it, which adds up to nearly
    0. Zero reference: 0 when the candidate is zero too, otherwise inf.

    >>> projection(np.array([0.0, 2.0]), np.array([7.0, 3.0]))
    0.5
    """
    scale = norm(reference)
    error = candidate - reference
    if scale == 0.0:
        return 0.0 if not np.any(error) else float("inf")
    return float(np.sum((error / scale) * (reference / scale)))


def _unit(values: F64) -> F64 | None:
    """The vector of length 1 in the same direction; None for a zero one, which has no direction."""
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0:
        return None
    scaled = values / largest  # first, so that the norm stays inside the range of float64
    return scaled / norm(scaled)
