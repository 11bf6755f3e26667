"""Element-wise difference: how far apart are two tensors, in their own units and relative to size?

Every function takes finite float64 arrays of one shape, `reference` first, and returns a float.
Non-finite elements never reach this file: the engine counts and masks them. Two empty arrays do not
differ. These are the definitions; the engine derives the same numbers from one pass of the kernel.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def max_abs_error(reference: F64, candidate: F64) -> float:
    """The largest `|candidate - reference|`.

    >>> max_abs_error(np.array([1.0, 2.0]), np.array([1.0, -2.0]))
    4.0
    >>> max_abs_error(np.array([]), np.array([]))
    0.0
    """
    return float(np.max(np.abs(candidate - reference), initial=0.0))


def mean_abs_error(reference: F64, candidate: F64) -> float:
    """The mean `|candidate - reference|`.

    >>> mean_abs_error(np.array([1.0, 2.0]), np.array([1.0, -2.0]))
    2.0
    """
    return float(np.mean(np.abs(candidate - reference))) if reference.size else 0.0


def rmse(reference: F64, candidate: F64) -> float:
    """Root of the mean squared difference.

    >>> rmse(np.array([0.0, 0.0]), np.array([2.0, 2.0]))
    2.0
    """
    if not reference.size:
        return 0.0
    return norm(candidate - reference) / float(np.sqrt(reference.size))


def relative_errors(reference: F64, candidate: F64) -> F64:
    """`|candidate - reference| / |reference|` per element: 0 where both are 0, inf where one is.

    >>> relative_errors(np.array([0.0, 0.0, 2.0]), np.array([0.0, 1e-9, 3.0]))
    array([0. , inf, 0.5])
    """
    error = np.abs(candidate - reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = error / np.abs(reference)
    relative[error == 0] = 0.0
    return relative


def max_rel_error(reference: F64, candidate: F64) -> float:
    """The largest relative error of an element; inf as soon as a zero is not reproduced.

    >>> max_rel_error(np.array([0.0, 4.0]), np.array([0.0, 5.0]))
    0.25
    """
    return float(np.max(relative_errors(reference, candidate), initial=0.0))


def mean_rel_error(reference: F64, candidate: F64) -> float:
    """The mean relative error of the elements; inf as soon as a zero is not reproduced.

    >>> mean_rel_error(np.array([0.0, 4.0]), np.array([0.0, 5.0]))
    0.125
    """
    return float(np.mean(relative_errors(reference, candidate))) if reference.size else 0.0


def relative_l2(reference: F64, candidate: F64) -> float:
    """`||candidate - reference|| / ||reference||`, the scale-free size of the error.

    A zero reference has no scale: 0.0 when the candidate is zero too, otherwise inf, so that a
    threshold cannot pass by accident.

    >>> relative_l2(np.zeros(2), np.array([0.0, 1e-9]))
    inf
    >>> relative_l2(np.zeros(2), np.zeros(2))
    0.0
    >>> relative_l2(np.array([3e-200, 4e-200]), np.array([3e-200, 0.0]))
    0.8
    """
    error, scale = norm(candidate - reference), norm(reference)
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale


def different(reference: F64, candidate: F64) -> float:
    """How many elements do not have the same value; zeros of either sign are the same.

    >>> different(np.array([0.0, 1.0]), np.array([-0.0, 2.0]))
    1.0
    """
    return float(np.count_nonzero(reference != candidate))


def norm(values: F64) -> float:
    """Euclidean norm, scaled first so that neither 1e-200 nor 1e200 leaves the range of float64.

    >>> norm(np.array([3e200, 4e200])) / 1e200
    5.0
    """
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0 or not np.isfinite(largest):
        return largest
    # A power of two: dividing by it rounds nothing.
    exponent = int(np.frexp(largest)[1])
    scaled = np.ldexp(values, -exponent)
    return float(np.ldexp(np.sqrt(np.sum(scaled * scaled)), exponent))


def sqnr(reference: F64, candidate: F64) -> float:
    """Signal to quantisation noise in decibels: `20 log10(||r|| / ||c - r||)`; inf if all agrees.

    >>> round(sqnr(np.array([3.0, 4.0]), np.array([3.0, 4.05])), 6)  # a hundredth of the length
    40.0
    >>> sqnr(np.array([1.0]), np.array([1.0]))
    inf
    """
    share = relative_l2(reference, candidate)
    return float(-20.0 * np.log10(share)) if share else float("inf")
