"""A tensor's shadow in 64 numbers that notices permutations, and how far apart two shadows are.

Min, max, mean, std and l2 do not change when two heads are swapped or the tokens are shifted by
one. The signed count-sketch does: every element is added, with a sign that depends on its place,
to one of 64 buckets chosen by its place. It is linear, so the difference of two sketches is the
sketch of the difference, and its length is an unbiased estimate of the difference's length
(squared; relative standard error about sqrt(2/64) = 18 %, half of that for the length itself).

Element `i` in flat C order belongs to group `k = i // 64`. One 64-bit hash of `k` gives the
signs, bit `i % 64` set meaning minus; six bits of a product of that hash are XORed to `i % 64`
to give the bucket. So a group fills every bucket once, which is what makes the kernel's version
a permutation of lanes.

Knows arrays of finite float64 only: the caller puts zeros where elements are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.numerics.summary import SKETCH_BUCKETS

F64: TypeAlias = "npt.NDArray[np.float64]"
U64: TypeAlias = "npt.NDArray[np.uint64]"


def group_signs(groups: U64) -> U64:
    """The hash of each group number: bit j set means that its element j counts negatively."""
    with np.errstate(over="ignore"):
        z = (groups + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def group_flips(signs: U64) -> U64:
    """What is XORed to the place inside the group to give the bucket: six bits."""
    with np.errstate(over="ignore"):
        return (signs * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(58)


def sketch(values: F64, *, first: int = 0) -> F64:
    """The sketch of finite values, the first of which stands at flat place `first`.

    >>> bool(np.allclose(sketch(np.ones(100)) + sketch(-np.ones(100)), 0))
    True
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    place = np.arange(first, first + flat.size, dtype=np.uint64)
    group, inside = place // np.uint64(SKETCH_BUCKETS), place % np.uint64(SKETCH_BUCKETS)
    signs = group_signs(group)
    bucket = inside ^ group_flips(signs)
    negative = (signs >> inside) & np.uint64(1)
    signed = np.where(negative == 1, -flat, flat)
    into = np.zeros(SKETCH_BUCKETS)
    np.add.at(into, bucket.astype(np.int64), signed)
    return into


def estimate_l2(of: Sequence[float]) -> float:
    """About the Euclidean norm of the tensor whose sketch this is."""
    return math.sqrt(math.fsum(value * value for value in of))


def estimate_l2_distance(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """About `||candidate - reference||`, from the two sketches.

    Exactly 0.0 for equal sketches; nan when either is missing or the two have different lengths.
    """
    if not reference or len(reference) != len(candidate):
        return math.nan
    return math.sqrt(
        math.fsum((c - r) * (c - r) for r, c in zip(reference, candidate, strict=True))
    )


def estimate_relative_l2(
    reference: Sequence[float], candidate: Sequence[float], *, reference_l2: float
) -> float:
    """About `||candidate - reference|| / ||reference||`; the norm below is exact, from the summary.

    A zero reference has no scale: 0.0 when the sketches agree, otherwise inf.
    """
    distance = estimate_l2_distance(reference, candidate)
    if reference_l2 == 0.0:
        return 0.0 if distance == 0.0 else math.nan if math.isnan(distance) else math.inf
    return distance / reference_l2


def estimate_inner_product(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """About `<reference, candidate>`; its error is about an eighth of the two norms' product."""
    if not reference or len(reference) != len(candidate):
        return math.nan
    return math.fsum(r * c for r, c in zip(reference, candidate, strict=True))
