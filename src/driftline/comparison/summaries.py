"""Two tensors of which at least one is only a summary: what ten numbers and a sketch can still say.

The sketch is linear, so the difference of two sketches is the sketch of the difference: its length
estimates `||c - r||` within about 16 %, permutations included. Such numbers are marked so.

Other programs' dumps keep max, min, mean and l2 alone; what they do not say is NaN. Those four can
prove a difference: `||c - r||` is at least as large as each of `|Δl2|`, `|Δmax|`, `|Δmin|` and
`√n |Δmean|`. They cannot prove that there is none.
"""

from __future__ import annotations

import math

from driftline.comparison.row import Number
from driftline.numerics.definitions import estimate_l2_distance
from driftline.numerics.fields import Summary

ESTIMATED = ("relative_l2", "cosine", "rmse")
FROM_STATISTICS = "from max, min, mean and l2 alone: the error is at least this large"


_PRINTED = 1e-6
"""Statistics in other programs' files have six decimals: two of them may differ by so much."""


def measure_summaries(reference: Summary, candidate: Summary) -> dict[str, Number]:
    """The measurements that two summaries allow."""
    found: dict[str, Number] = {}
    unlike = (
        abs(reference.nan - candidate.nan)
        + abs(reference.pos_inf - candidate.pos_inf)
        + abs(reference.neg_inf - candidate.neg_inf)
    )
    if not math.isnan(unlike):
        found["one_sided"] = unlike  # at least that many: positions are not known
    if reference.sketch and candidate.sketch and not unlike:
        distance = estimate_l2_distance(reference.sketch, candidate.sketch)
        found["relative_l2"] = _relative(distance, reference, candidate)
        found["cosine"] = _cosine(distance, reference, candidate)
        found["rmse"] = distance / math.sqrt(reference.count) if reference.count else 0.0
    elif from_statistics(reference, candidate):
        bound = _least(reference, candidate)
        if not math.isnan(bound):
            found["relative_l2"] = bound
    for side, summary in (("reference", reference), ("candidate", candidate)):
        figures = {
            "min": summary.min,
            "max": summary.max,
            "mean": summary.mean,
            "std": summary.std,
            "l2": summary.l2,
            "nan": summary.nan,
            "inf": summary.pos_inf + summary.neg_inf,
        }
        # NaN is a finding where somebody counted, and nothing at all where nobody did.
        partial = math.isnan(summary.nan)
        for name, value in figures.items():
            if not (partial and math.isnan(value)):
                found[f"{side}_{name}"] = value
    return found


def from_statistics(reference: Summary, candidate: Summary) -> bool:
    """Whether one side has four figures and no sketch: the other's sketch is of no use then."""
    return math.isnan(reference.nan) or math.isnan(candidate.nan)


def _least(reference: Summary, candidate: Summary) -> float:
    """The relative L2 error is at least this; nan when the figures do not allow even that."""
    if math.isnan(reference.l2):
        return math.nan
    for summary in (reference, candidate):
        # Ours leave out what is not finite, theirs do not: figures of different elements.
        if summary.nan > 0 or summary.pos_inf > 0 or summary.neg_inf > 0:
            return math.nan
    deltas = (
        abs(candidate.l2 - reference.l2),
        abs(candidate.max - reference.max),
        abs(candidate.min - reference.min),
        abs(candidate.mean - reference.mean) * math.sqrt(reference.count),
    )
    slack = (_PRINTED, _PRINTED, _PRINTED, _PRINTED * math.sqrt(reference.count))
    known = [max(0.0, d - s) for d, s in zip(deltas, slack, strict=True) if not math.isnan(d)]
    return max(known) / (reference.l2 + _PRINTED) if known else math.nan


def _relative(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0:
        return 0.0 if candidate.l2 == 0.0 else math.inf
    return distance / reference.l2


def _cosine(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0 or candidate.l2 == 0.0:
        return 1.0 if reference.l2 == candidate.l2 else 0.0
    # Quotients first: squares of huge or tiny norms leave float64.
    ours, theirs = reference.l2, candidate.l2
    apart = ours - theirs
    rest = 0.5 * ((distance / ours) * (distance / theirs) - (apart / ours) * (apart / theirs))
    if math.isnan(rest):
        return math.nan
    return 1.0 - min(2.0, max(0.0, rest))
