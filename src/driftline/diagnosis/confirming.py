"""A suspicion from sums over whole tensors is looked at again, on each half of the tokens.

For sites that were judged without a replay. What shows on one half only is an accident, unless it
is far outside: then one token is off, and that is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.choices import REMARK, UNTOLD, Flip, concerned
from driftline.diagnosis.effects import NOTHING, Effect, effect_of, halves, sums
from driftline.diagnosis.floor import Floor
from driftline.diagnosis.naming import Runs
from driftline.diagnosis.reading import chosen_rows, is_readable, read_rows
from driftline.diagnosis.replayed import GROSS
from driftline.diagnosis.statuses import Standing
from driftline.runs.key import TensorKey

_GONE = 0.3
"""Of the error may be left when flipped tokens are: then it was theirs."""


class Confirmation(NamedTuple):
    """What a second look gave.

    Attributes:
        holds: Whether the suspicion stands.
        halves: How far outside either half is, in units of the limit.
        whole: The effect on all rows that were looked at.
        remark: Why it does not hold, if it is not for the halves.
    """

    holds: bool
    halves: tuple[float, float]
    whole: Effect
    remark: str = ""


def confirmed(
    runs: Runs, standing: Standing, floor: Floor | None, flips: Sequence[Flip] = ()
) -> Confirmation | None:
    """A second look at the tensor that made a site guilty; None where its values are not there.

    Tokens that a router sent elsewhere, and what they reach, are left out where the error goes with
    them; where it does not, they excuse nothing.
    """
    row = standing.call.worst
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == row.key), None)
    if pair is None or pair.reference_recipe is not None or pair.candidate_recipe is not None:
        return None
    ours, theirs = pair.reference, pair.candidate
    if not is_readable(runs.reference, ours) or not is_readable(runs.candidate, theirs):
        return None
    if ours.shape != theirs.shape:
        return None
    places = chosen_rows(ours.shape)
    r, c = read_rows(runs.reference, ours, places), read_rows(runs.candidate, theirs, places)
    if r is None or c is None:
        return None
    reached = concerned(flips, row.key.site, ours, ours.shape) if flips else None
    if reached is not None:
        kept = ~reached[places]
        if np.count_nonzero(kept) < 4:
            return Confirmation(False, (0.0, 0.0), NOTHING, UNTOLD)
        rest = effect_of(sums(r[kept], c[kept]))
        if rest.error <= _GONE * effect_of(sums(r, c)).error and not rest.nonfinite:
            r, c = r[kept], c[kept]
        else:
            reached = None  # what is off is elsewhere too
    remark = REMARK if reached is not None else ""
    found = sums(r, c)
    whole, (first, second) = effect_of(found), halves(found)
    if standing.leaning:
        over = tuple(_lean(half, row.key, floor) for half in (first, second))
        return Confirmation(min(over) > 1.0, (over[0], over[1]), whole, remark)
    if not math.isfinite(standing.ratio) or len(r) < 4:
        return Confirmation(True, (standing.ratio, standing.ratio), whole)
    limit = standing.call.error / standing.ratio if standing.ratio > 0.0 else math.inf
    over = first.error / limit, second.error / limit
    ratio = standing.ratio if reached is None else whole.error / limit
    return Confirmation(min(over) > 1.0 or ratio > GROSS, over, whole, remark)


def _lean(half: Effect, key: TensorKey, floor: Floor | None) -> float:
    """How far a half leans outside what trusted runs do, in units of five standard errors."""
    span = floor.leans.get(key) if floor is not None else None
    if span is None or not half.projection_se > 0.0:
        return 0.0
    low, high = min(span[0], 0.0), max(span[1], 0.0)
    return max(half.projection - high, low - half.projection, 0.0) / (5.0 * half.projection_se)
