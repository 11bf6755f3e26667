"""Two tensors of which at least one is only a summary: what ten numbers and a sketch can still say.

The sketch is linear, so the difference of two sketches is the sketch of the difference: its length
estimates `||c - r||` within about 16 %, permutations included. Such numbers are marked so.
"""

from __future__ import annotations

import math

from driftline.comparison.row import Number
from driftline.numerics.sketch import estimate_l2_distance
from driftline.numerics.summary import Summary

ESTIMATED = ("relative_l2", "cosine", "rmse")


def measure_summaries(reference: Summary, candidate: Summary) -> dict[str, Number]:
    """The measurements that two summaries allow."""
    found: dict[str, Number] = {}
    unlike = (
        abs(reference.nan - candidate.nan)
        + abs(reference.pos_inf - candidate.pos_inf)
        + abs(reference.neg_inf - candidate.neg_inf)
    )
    found["one_sided"] = unlike  # at least that many: positions are not known
    if reference.sketch and candidate.sketch and not unlike:
        distance = estimate_l2_distance(reference.sketch, candidate.sketch)
        found["relative_l2"] = _relative(distance, reference, candidate)
        found["cosine"] = _cosine(distance, reference, candidate)
        found["rmse"] = distance / math.sqrt(reference.count) if reference.count else 0.0
    for side, summary in (("reference", reference), ("candidate", candidate)):
        found[f"{side}_min"] = summary.min
        found[f"{side}_max"] = summary.max
        found[f"{side}_mean"] = summary.mean
        found[f"{side}_std"] = summary.std
        found[f"{side}_l2"] = summary.l2
        found[f"{side}_nan"] = summary.nan
        found[f"{side}_inf"] = summary.pos_inf + summary.neg_inf
    return found


def _relative(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0:
        return 0.0 if candidate.l2 == 0.0 else math.inf
    return distance / reference.l2


def _cosine(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0 or candidate.l2 == 0.0:
        return 1.0 if reference.l2 == candidate.l2 else 0.0
    rest = (distance**2 - (reference.l2 - candidate.l2) ** 2) / (2 * reference.l2 * candidate.l2)
    if math.isnan(rest):
        return math.nan
    return 1.0 - min(2.0, max(0.0, rest))
