"""Definitions of the metrics: element-wise differences, direction, and distribution of two tensors.

Every function takes finite float64 arrays of one shape, `reference` first, and returns a float,
or an array for `relative_errors`. Non-finite elements never reach this file, because the engine
counts and masks them. Two empty arrays do not differ. The engine derives the same numbers from one
pass of the kernel.

Sums and differences that would overflow float64 are computed from values scaled by a power of two,
so that a result that fits float64 is never lost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def max_abs_error(reference: F64, candidate: F64) -> float:
    """Return the largest `|candidate - reference|`.

    >>> max_abs_error(np.array([1.0, 2.0]), np.array([1.0, -2.0]))
    4.0
    >>> max_abs_error(np.array([]), np.array([]))
    0.0
    """
    return float(np.max(np.abs(candidate - reference), initial=0.0))


def mean_abs_error(reference: F64, candidate: F64) -> float:
    """Return the mean `|candidate - reference|`.

    >>> mean_abs_error(np.array([1.0, 2.0]), np.array([1.0, -2.0]))
    2.0
    >>> mean_abs_error(np.array([1e308, 1e308, 0.0, 0.0]), np.array([0.0, 0.0, 1e308, 0.0]))
    7.5e+307
    """
    error, exponent = _difference(reference, candidate)
    return _times_two_to(_mean(np.abs(error)), exponent)


def rmse(reference: F64, candidate: F64) -> float:
    """Return the root of the mean squared difference.

    >>> rmse(np.array([0.0, 0.0]), np.array([2.0, 2.0]))
    2.0
    """
    if not reference.size:
        return 0.0
    length, exponent = _length(reference, candidate)
    return _times_two_to(length / float(np.sqrt(reference.size)), exponent)


def relative_errors(reference: F64, candidate: F64) -> F64:
    """Return `|candidate - reference| / |reference|` per element; 0 if both are 0, inf if one is.

    >>> relative_errors(np.array([0.0, 0.0, 2.0]), np.array([0.0, 1e-9, 3.0]))
    array([0. , inf, 0.5])
    """
    error, exponent = _difference(reference, candidate)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.abs(error) / np.abs(np.ldexp(reference, -exponent))
    relative[candidate == reference] = 0.0
    return relative


def max_rel_error(reference: F64, candidate: F64) -> float:
    """Return the largest relative error of an element; inf if a zero is not reproduced.

    >>> max_rel_error(np.array([0.0, 4.0]), np.array([0.0, 5.0]))
    0.25
    """
    return float(np.max(relative_errors(reference, candidate), initial=0.0))


def mean_rel_error(reference: F64, candidate: F64) -> float:
    """Return the mean relative error of the elements; inf if a zero is not reproduced.

    >>> mean_rel_error(np.array([0.0, 4.0]), np.array([0.0, 5.0]))
    0.125
    """
    return _mean(relative_errors(reference, candidate))


def relative_l2(reference: F64, candidate: F64) -> float:
    """Return `||candidate - reference|| / ||reference||`, the scale-free size of the error.

    A zero reference has no scale: 0.0 if the candidate is zero too, otherwise inf, so that a
    threshold cannot pass by accident.

    >>> relative_l2(np.zeros(2), np.array([0.0, 1e-9]))
    inf
    >>> relative_l2(np.zeros(2), np.zeros(2))
    0.0
    >>> relative_l2(np.array([3e-200, 4e-200]), np.array([3e-200, 0.0]))
    0.8
    >>> relative_l2(np.full(4, 1.5e308), np.full(4, -1.5e308))
    2.0
    """
    error, error_exponent = _length(reference, candidate)
    scale, scale_exponent = _scaled_norm(reference)
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return _times_two_to(error / scale, error_exponent - scale_exponent)


def different(reference: F64, candidate: F64) -> float:
    """Return the number of elements with different values; zeros of either sign are equal.

    >>> different(np.array([0.0, 1.0]), np.array([-0.0, 2.0]))
    1.0
    """
    return float(np.count_nonzero(reference != candidate))


def norm(values: F64) -> float:
    """Return the Euclidean norm, scaled so that neither 1e-200 nor 1e200 leaves float64's range.

    >>> norm(np.array([3e200, 4e200])) / 1e200
    5.0
    """
    return _times_two_to(*_scaled_norm(values))


def _scaled_norm(values: F64) -> tuple[float, int]:
    """Return the norm as a number and a power of two to multiply by; it may exceed float64."""
    scaled, exponent = _scaled(values)
    return float(np.sqrt(np.sum(scaled * scaled))), exponent


def _scaled(values: F64) -> tuple[F64, int]:
    """Return values scaled so that the largest is about 1, and the power of two to undo it."""
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0 or not np.isfinite(largest):
        return values, 0
    # Dividing by a power of two causes no rounding.
    exponent = int(np.frexp(largest)[1])
    return np.ldexp(values, -exponent), exponent


def _difference(reference: F64, candidate: F64) -> tuple[F64, int]:
    """Return `candidate - reference` and a power of two to multiply by; it may exceed float64."""
    with np.errstate(over="ignore"):
        error = candidate - reference
    if np.isfinite(error).all():
        return error, 0
    return candidate / 4 - reference / 4, 2


def _length(reference: F64, candidate: F64) -> tuple[float, int]:
    """Return the norm of the difference, in the form of `_scaled_norm`."""
    error, exponent = _difference(reference, candidate)
    length, more = _scaled_norm(error)
    return length, exponent + more


def _mean(values: F64) -> float:
    """Return the mean, even if the sum exceeds float64; 0 for no values, inf if one is inf."""
    if not values.size:
        return 0.0
    scaled, exponent = _scaled(values)
    return _times_two_to(float(np.mean(scaled)), exponent)


def _times_two_to(value: float, exponent: int) -> float:
    """Return `value * 2**exponent`; inf if that exceeds float64."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.ldexp(value, exponent))


def sqnr(reference: F64, candidate: F64) -> float:
    """Return the signal to noise ratio in decibels, `20 log10(||r|| / ||c - r||)`; inf if equal.

    >>> round(sqnr(np.array([3.0, 4.0]), np.array([3.0, 4.05])), 6)  # a hundredth of the length
    40.0
    >>> sqnr(np.array([1.0]), np.array([1.0]))
    inf
    """
    error, error_exponent = _length(reference, candidate)
    scale, scale_exponent = _scaled_norm(reference)
    if error == 0.0 or scale == 0.0:
        return float("-inf") if error else float("inf")
    doublings = error_exponent - scale_exponent
    return float(-20.0 * (np.log10(error / scale) + doublings * np.log10(2.0)))


# Direction: do two tensors point in the same direction as vectors, and how do their lengths differ?


def cosine(reference: F64, candidate: F64) -> float:
    """Return the cosine of the angle between the two; independent of scale: `cosine(u, 2u)` is 1.

    It is computed as `1 - ||u - v||^2 / 2` of the unit vectors. For nearly equal tensors this is
    accurate where the quotient of a dot product is not, and it never exceeds 1. Two zero tensors
    give 1, and a single one gives 0.

    >>> cosine(np.array([1.0, 0.0]), np.array([0.0, 3.0]))
    0.0
    >>> cosine(np.zeros(2), np.ones(2)), cosine(np.zeros(2), np.zeros(2))
    (0.0, 1.0)
    """
    reference_unit, candidate_unit = _unit(reference), _unit(candidate)
    if reference_unit is None or candidate_unit is None:
        return 1.0 if reference_unit is candidate_unit else 0.0
    gap = reference_unit - candidate_unit
    return 1.0 - min(2.0, 0.5 * float(np.sum(gap * gap)))


def projection(reference: F64, candidate: F64) -> float:
    """Return `<e, r> / <r, r>` with `e = candidate - reference`, the error along the reference.

    A scale fault of 3 % gives 0.03 whatever the rounding noise, which adds up to nearly 0. A zero
    reference gives 0 if the candidate is zero too, otherwise inf.

    >>> projection(np.array([0.0, 2.0]), np.array([7.0, 3.0]))
    0.5
    """
    error, exponent = _difference(reference, candidate)
    error, error_exponent = _scaled(error)
    scaled, scale_exponent = _scaled(reference)
    square = float(np.sum(scaled * scaled))
    if square == 0.0:
        return 0.0 if not np.any(error) else float("inf")
    share = float(np.sum(error * scaled)) / square
    return _times_two_to(share, exponent + error_exponent - scale_exponent)


def _unit(values: F64) -> F64 | None:
    """Return the vector of length 1 in the same direction; None for a zero vector."""
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0:
        return None
    scaled = values / largest  # first, so that the norm stays in float64's range
    return scaled / norm(scaled)


# Distribution: how much do two tensors differ as logits?


def kl(reference: F64, candidate: F64) -> float:
    """Return the Kullback-Leibler divergence `sum p ln(p / q)` of the flattened tensors' softmax.

    It is in nats, never negative, and 0 for empty tensors. A constant added to every logit does not
    change it.

    >>> kl(np.array([1.0, 2.0]), np.array([2.0, 3.0]))
    0.0
    >>> round(kl(np.log([0.5, 0.5]), np.log([0.25, 0.75])), 6)
    0.143841
    """
    if not reference.size:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        log_p, log_q = _log_softmax(reference.reshape(-1)), _log_softmax(candidate.reshape(-1))
        nats = float(np.sum(np.exp(log_p) * (log_p - log_q)))
    return 0.0 if nats < 0.0 else nats  # max(0.0, nan) would be 0.0


def _log_softmax(logits: F64) -> F64:
    shifted = logits - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))
