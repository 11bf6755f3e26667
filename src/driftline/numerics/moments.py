"""Everything one pass over a pair of tensors can know; every built-in metric is derived from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairMoments:
    """Sums, extremes and counts of one pair, in float64; `r` is the reference, `c` the candidate, `e = c - r`.

    "Finite" means finite on both sides, where the lowest value of a 16-bit-or-wider float format counts as
    -inf on its side: attention masks are filled with it. Sums and error extremes are over those elements.
    Positions are flat C-order indices, -1 for "nowhere".
    """

    count: int
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
