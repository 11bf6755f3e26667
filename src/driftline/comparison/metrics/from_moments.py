"""The standard metrics, derived from the moments that one pass over a pair gives.

Each function gives the result of the definition of the same name, over the elements that are finite
on both sides. Sums of squares are float64, so pairs outside about 1e-150 ... 1e150 use the
definitions instead (see `needs_definition`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from driftline.comparison.table.row import Number
from driftline.numerics.fields import PairMoments

_TINY = 1e-290
_HUGE = 1e290


def needs_definition(m: PairMoments) -> bool:
    """Return whether a sum left float64's range, so that the definitions must be used."""
    # The usual case is tested first, in one comparison, because this runs for every pair.
    if (
        _TINY <= m.sum_rr <= _HUGE and _TINY <= m.sum_cc <= _HUGE and _TINY <= m.sum_ee <= _HUGE
    ) or not m.finite:
        return m.max_rel_e < math.inf == m.sum_rel_e
    for sum_of_squares in (m.sum_rr, m.sum_cc, m.sum_ee):
        if not sum_of_squares <= _HUGE:
            return True
    # Tiny squares are exact if all elements are zero, but have lost digits if they are not.
    reference_largest = max(abs(m.r_min), abs(m.r_max))
    candidate_largest = max(abs(m.c_min), abs(m.c_max))
    return (
        (m.sum_rr < _TINY and reference_largest > 0)
        or (m.sum_cc < _TINY and candidate_largest > 0)
        or (m.sum_ee < _TINY and m.max_abs_e > 0)
    )


def max_abs_error(m: PairMoments) -> float:
    return m.max_abs_e if m.finite else 0.0


def mean_abs_error(m: PairMoments) -> float:
    return m.sum_abs_e / m.finite if m.finite else 0.0


def rmse(m: PairMoments) -> float:
    return math.sqrt(m.sum_ee / m.finite) if m.finite else 0.0


def max_rel_error(m: PairMoments) -> float:
    return m.max_rel_e if m.finite else 0.0


def mean_rel_error(m: PairMoments) -> float:
    return m.sum_rel_e / m.finite if m.finite else 0.0


def relative_l2(m: PairMoments) -> float:
    if m.sum_rr == 0.0:
        return 0.0 if m.sum_ee == 0.0 else math.inf
    return math.sqrt(m.sum_ee) / math.sqrt(m.sum_rr)


def sqnr(m: PairMoments) -> float:
    share = relative_l2(m)
    return -20.0 * math.log10(share) if share else math.inf


def cosine(m: PairMoments) -> float:
    if m.sum_rr == 0.0 or m.sum_cc == 0.0:
        return 1.0 if m.sum_rr == m.sum_cc else 0.0
    reference_norm, candidate_norm = math.sqrt(m.sum_rr), math.sqrt(m.sum_cc)
    if m.sum_ee < 0.5 * m.sum_rr:
        # For nearly equal tensors the quotient loses all digits beyond 1e-10. This form of the same
        # value does not: 1 - cos = (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|).
        rest = (m.sum_ee - (reference_norm - candidate_norm) ** 2) / (
            2.0 * reference_norm * candidate_norm
        )
        return 1.0 - rest if rest > 0.0 else (1.0 if rest <= 0.0 else math.nan)
    quotient = m.sum_rc / reference_norm / candidate_norm
    return quotient if not abs(quotient) > 1.0 else math.copysign(1.0, quotient)


def projection(m: PairMoments) -> float:
    if m.sum_rr == 0.0:
        return 0.0 if m.sum_ee == 0.0 else math.inf
    if m.sum_ee == 0.0:
        return 0.0
    return (m.sum_rc - m.sum_rr) / m.sum_rr


def max_ulp(m: PairMoments) -> float:
    return m.max_ulp if m.finite else 0.0


def outside_share(m: PairMoments) -> float:
    return m.outside / m.count if m.count else 0.0


def different(m: PairMoments) -> int:
    return m.different


def one_sided(m: PairMoments) -> int:
    return m.one_sided


def one_sided_at(m: PairMoments) -> int | None:
    return _place(m.one_sided_at)


def max_abs_error_at(m: PairMoments) -> int | None:
    return _place(m.max_abs_e_at)


def first_different_at(m: PairMoments) -> int | None:
    return _place(m.first_different_at)


def _place(position: int) -> int | None:
    return position if position >= 0 else None


_Derivation = Callable[[PairMoments], "Number | None"]
_Described = tuple[tuple[str, str, str], _Derivation]

_MIN = ("min", "smallest finite element", "")
_MAX = ("max", "largest finite element", "")
_MEAN = ("mean", "mean of the finite elements", "")
_STD = ("std", "standard deviation (ddof 0) of the finite elements", "")
_L2 = ("l2", "Euclidean norm of the finite elements", "")
_NAN = ("nan", "NaN elements", "elements")
_INF = ("inf", "infinite elements, mask sentinels included,", "elements")
_AT = ("nonfinite_at", "flat index of the first non-finite element", "")

REFERENCE: tuple[_Described, ...] = (
    (_MIN, lambda m: m.r_min),
    (_MAX, lambda m: m.r_max),
    (_MEAN, lambda m: m.r_mean),
    (_STD, lambda m: m.r_std),
    (_L2, lambda m: m.r_l2),
    (_NAN, lambda m: m.r_nan),
    (_INF, lambda m: m.r_pos_inf + m.r_neg_inf),
    (_AT, lambda m: _place(m.r_nonfinite_at)),
)
CANDIDATE: tuple[_Described, ...] = (
    (_MIN, lambda m: m.c_min),
    (_MAX, lambda m: m.c_max),
    (_MEAN, lambda m: m.c_mean),
    (_STD, lambda m: m.c_std),
    (_L2, lambda m: m.c_l2),
    (_NAN, lambda m: m.c_nan),
    (_INF, lambda m: m.c_pos_inf + m.c_neg_inf),
    (_AT, lambda m: _place(m.c_nonfinite_at)),
)


def standard(m: PairMoments) -> dict[str, Number]:
    """Return all metrics of the catalogue's `STANDARD` at once, in its order.

    Thirty separate calls take longer than measuring 16 kB. A test checks that both agree.
    """
    # fmt: off
    (
        count, finite, _, _, _, sum_ee, sum_abs_e, max_abs_e, max_abs_e_at, sum_rel_e,
        max_rel_e, steps, outside, differing, first_different_at, lonely, one_sided_at, _, _,
        r_min, c_min, r_max, c_max, r_mean, c_mean, r_std, c_std, r_l2, c_l2, r_nan, c_nan,
        r_pos_inf, c_pos_inf, r_neg_inf, c_neg_inf, r_nonfinite_at, c_nonfinite_at,
    ) = m
    # fmt: on
    # Written out instead of looping over derivations, because it runs for every pair.
    measured: dict[str, Number] = {
        "relative_l2": relative_l2(m),
        "cosine": cosine(m),
        "max_abs_error": max_abs_e if finite else 0.0,
        "mean_abs_error": sum_abs_e / finite if finite else 0.0,
        "rmse": math.sqrt(sum_ee / finite) if finite else 0.0,
        "max_rel_error": max_rel_e if finite else 0.0,
        "mean_rel_error": sum_rel_e / finite if finite else 0.0,
        "projection": projection(m),
        "max_ulp": steps if finite else 0.0,
        "outside_share": outside / count if count else 0.0,
        "different": differing,
        "one_sided": lonely,
        "one_sided_at": one_sided_at,
        "max_abs_error_at": max_abs_e_at,
        "first_different_at": first_different_at,
        "reference_min": r_min,
        "reference_max": r_max,
        "reference_mean": r_mean,
        "reference_std": r_std,
        "reference_l2": r_l2,
        "reference_nan": r_nan,
        "reference_inf": r_pos_inf + r_neg_inf,
        "reference_nonfinite_at": r_nonfinite_at,
        "candidate_min": c_min,
        "candidate_max": c_max,
        "candidate_mean": c_mean,
        "candidate_std": c_std,
        "candidate_l2": c_l2,
        "candidate_nan": c_nan,
        "candidate_inf": c_pos_inf + c_neg_inf,
        "candidate_nonfinite_at": c_nonfinite_at,
    }
    # Positions of elements that do not occur are left out.
    if one_sided_at < 0:
        del measured["one_sided_at"]
    if max_abs_e_at < 0:
        del measured["max_abs_error_at"]
    if first_different_at < 0:
        del measured["first_different_at"]
    if r_nonfinite_at < 0:
        del measured["reference_nonfinite_at"]
    if c_nonfinite_at < 0:
        del measured["candidate_nonfinite_at"]
    return measured
