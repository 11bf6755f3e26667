"""What is kept of a tensor without its values: ten numbers and a sketch that sees permutations."""

from __future__ import annotations

from typing import NamedTuple

SKETCH_BUCKETS = 64


class Summary(NamedTuple):
    """One tensor's values in a few numbers. Moments are over finite elements, in float64.

    Other programs keep fewer of them: what is not known is NaN, counts included, and without a
    sketch. `nan` is NaN exactly in such a partial summary.

    Attributes:
        count: Number of elements.
        min: Smallest finite element; nan when there is none (so for mean, max and std).
        std: Population standard deviation (ddof 0).
        l2: Euclidean norm of the finite elements.
        zeros: Elements equal to zero, of either sign.
        nan: NaN elements.
        pos_inf: Elements that are +inf.
        neg_inf: Elements that are -inf, or the lowest value of a float format of 16 bits or more:
            attention masks are filled with it, and it means -inf there.
        sketch: Signed count-sketch of the finite elements; see `sketch.py`.
    """

    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    min: float
    max: float
    mean: float
    std: float
    l2: float
    zeros: int
    nan: int
    pos_inf: int
    neg_inf: int
    sketch: tuple[float, ...] = ()
