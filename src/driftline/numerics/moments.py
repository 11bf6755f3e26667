"""Everything one pass over a pair of tensors can know; every built-in metric is derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class PairMoments(NamedTuple):
    """Sums, extremes and counts of one pair, in float64; r reference, c candidate, e = c - r.

    "Finite" means finite on both sides, where the lowest value of a 16-bit-or-wider float format
    counts as -inf on its side: attention masks are filled with it. Sums and error extremes are over
    those elements. Positions are flat C-order indices, -1 for "nowhere".

    A tuple, because forty fields of a small tensor take longer to set one by one than to measure.
    """

    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    finite: int
    sum_r: float
    sum_c: float
    sum_rr: float
    sum_cc: float
    sum_rc: float
    sum_ee: float
    sum_abs_e: float
    max_abs_e: float
    max_abs_e_at: int
    sum_rel_e: float  # |e|/|r|; 0 where both are 0, inf where only r is
    max_rel_e: float
    max_ulp: float  # distance in the candidate's format, the reference rounded to it first
    outside: int  # elements with not |e| <= atol + rtol*|r|, one-sided non-finite ones included
    different: int  # elements whose values differ; NaN equals NaN here
    first_different_at: int
    # One side at a time. Extremes and moments of that side's own finite elements.
    r_finite: int
    c_finite: int
    r_min: float
    r_max: float
    c_min: float
    c_max: float
    r_sum: float
    c_sum: float
    r_sumsq: float
    c_sumsq: float
    r_std: float
    c_std: float
    r_nan: int
    c_nan: int
    r_pos_inf: int
    c_pos_inf: int
    r_neg_inf: int  # sentinels included
    c_neg_inf: int
    one_sided: int  # non-finite on one side only, or differently on the two
    one_sided_at: int
    r_nonfinite_at: int
    c_nonfinite_at: int


def merge_moments(parts: Sequence[PairMoments]) -> PairMoments:
    """The moments of a pair from those of its consecutive blocks, in order.

    Spreads are joined by Chan's formula, so a mean far from zero costs no digits.

    >>> merge_moments([])
    Traceback (most recent call last):
    ValueError: no blocks to merge
    """
    if not parts:
        raise ValueError("no blocks to merge")
    whole = parts[0]
    for part in parts[1:]:
        whole = _join(whole, part)
    return whole


def _join(a: PairMoments, b: PairMoments) -> PairMoments:
    shift = a.count

    def first(x: int, y: int) -> int:
        return x if x >= 0 else y + shift if y >= 0 else -1

    larger_later = b.max_abs_e > a.max_abs_e
    return PairMoments(
        count=a.count + b.count,
        finite=a.finite + b.finite,
        sum_r=a.sum_r + b.sum_r,
        sum_c=a.sum_c + b.sum_c,
        sum_rr=a.sum_rr + b.sum_rr,
        sum_cc=a.sum_cc + b.sum_cc,
        sum_rc=a.sum_rc + b.sum_rc,
        sum_ee=a.sum_ee + b.sum_ee,
        sum_abs_e=a.sum_abs_e + b.sum_abs_e,
        max_abs_e=max(a.max_abs_e, b.max_abs_e),
        max_abs_e_at=b.max_abs_e_at + shift if larger_later else a.max_abs_e_at,
        sum_rel_e=a.sum_rel_e + b.sum_rel_e,
        max_rel_e=max(a.max_rel_e, b.max_rel_e),
        max_ulp=max(a.max_ulp, b.max_ulp),
        outside=a.outside + b.outside,
        different=a.different + b.different,
        first_different_at=first(a.first_different_at, b.first_different_at),
        r_finite=a.r_finite + b.r_finite,
        c_finite=a.c_finite + b.c_finite,
        r_min=_of_numbers(min, a.r_min, b.r_min),
        r_max=_of_numbers(max, a.r_max, b.r_max),
        c_min=_of_numbers(min, a.c_min, b.c_min),
        c_max=_of_numbers(max, a.c_max, b.c_max),
        r_sum=a.r_sum + b.r_sum,
        c_sum=a.c_sum + b.c_sum,
        r_sumsq=a.r_sumsq + b.r_sumsq,
        c_sumsq=a.c_sumsq + b.c_sumsq,
        r_std=joined_std(
            (a.r_finite, _mean(a.r_sum, a.r_finite), a.r_std),
            (b.r_finite, _mean(b.r_sum, b.r_finite), b.r_std),
        ),
        c_std=joined_std(
            (a.c_finite, _mean(a.c_sum, a.c_finite), a.c_std),
            (b.c_finite, _mean(b.c_sum, b.c_finite), b.c_std),
        ),
        r_nan=a.r_nan + b.r_nan,
        c_nan=a.c_nan + b.c_nan,
        r_pos_inf=a.r_pos_inf + b.r_pos_inf,
        c_pos_inf=a.c_pos_inf + b.c_pos_inf,
        r_neg_inf=a.r_neg_inf + b.r_neg_inf,
        c_neg_inf=a.c_neg_inf + b.c_neg_inf,
        one_sided=a.one_sided + b.one_sided,
        one_sided_at=first(a.one_sided_at, b.one_sided_at),
        r_nonfinite_at=first(a.r_nonfinite_at, b.r_nonfinite_at),
        c_nonfinite_at=first(a.c_nonfinite_at, b.c_nonfinite_at),
    )


def joined_std(a: tuple[int, float, float], b: tuple[int, float, float]) -> float:
    """Standard deviation of two groups together, each given as (count, mean, std)."""
    (n, mean_a, std_a), (m, mean_b, std_b) = a, b
    if n == 0 or m == 0:
        return std_a if n else std_b
    whole, apart = n + m, mean_b - mean_a
    variance = (n * std_a * std_a + m * std_b * std_b) / whole + apart * apart * (n / whole) * (
        m / whole
    )
    return math.sqrt(variance)


def _mean(total: float, count: int) -> float:
    return total / count if count else math.nan


def _of_numbers(choose: Callable[[float, float], float], a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return choose(a, b)
