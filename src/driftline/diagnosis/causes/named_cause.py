"""The kind of bug at a place: detectors are asked about the cases of a guilty site.

Where no site is to blame (an input, a mask, integers, the update of an optimizer) the cause is read
off what differs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.comparison.evidence.error_stats import read_whole
from driftline.comparison.verdict.certain_failures import CertainFailure
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.sites import Place, Site
from driftline.comparison.verdict.status import SiteStatus
from driftline.diagnosis.causes.case import F64, other_mask
from driftline.diagnosis.causes.case_builder import CaseBuilder, Runs
from driftline.diagnosis.causes.linear_solve import implied_input
from driftline.diagnosis.causes.registry import Clue, best_clue, rules_for_inputs
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import TensorKey

_RISING = 0.4
"""Share of neighbours that differ by one in numbers of positions; pads have one number."""


class NamedCause(NamedTuple):
    """The kind of bug at a site.

    Attributes:
        cause: Name of the cause, or `unknown`.
        sentence: The evidence for it, or why none was named.
        score: Share of the error that it explains.
        detail: The exact variant.
        others: Other causes that were considered, with scores.
        picture: The tensor that was examined.
    """

    cause: str
    sentence: str = ""
    score: float = 0.0
    detail: str = ""
    others: tuple[tuple[str, float], ...] = ()
    picture: str = ""


def name_cause(
    runs: Runs,
    sites: Mapping[Place, Site],
    place: Place,
    standing: SiteStatus,
    judged: ReplayResult | None,
) -> NamedCause:
    """Ask every detector about a guilty site."""
    builder = CaseBuilder(runs, sites)
    tried: list[NamedCause] = []
    for case, picture in builder.cases(place, standing, judged):
        clue, clues = best_clue(case)
        naming = _named(clue, clues, picture)
        if naming.cause != "unknown":
            return naming
        tried.append(naming)
        # A linear map can be inverted: sometimes the error is simple in terms of the input it
        # implies.
        seen = implied_input(case)
        if seen is not None:
            clue, clues = best_clue(seen, rules_for_inputs())
            naming = _named(clue, clues, picture)
            if clue is not None:
                return naming._replace(
                    sentence=f"its result is that of another input, of which {naming.sentence}"
                )
    if tried:
        return max(tried, key=lambda naming: naming.others[0][1] if naming.others else 0.0)
    return NamedCause("unknown", "the values at this site were not kept")


def name_certain(runs: Runs, certain: CertainFailure) -> NamedCause:
    """The kind of a failure that no site is to blame for."""
    row = certain.row
    if certain.kind == "inputs":
        return NamedCause("input", "nothing that is computed of them can be judged", 1.0)
    if certain.kind in ("codes", "nonfinite") and (masked := _of_masks(runs, row.key)) is not None:
        return masked
    if certain.kind == "codes":
        return _of_codes(runs, row.key)
    if certain.kind != "gradient":
        return NamedCause("unknown", "nothing known fits")
    builder = CaseBuilder(runs, {})
    unit = DTYPES[row.candidate_dtype].unit_roundoff
    case = builder.plain(row.key, row.site, row.class_name, unit)
    clue, clues = (None, []) if case is None else best_clue(case)
    naming = _named(clue, clues, str(row.key))
    if clue is None or clue.cause in ("weights", "missing-reduction"):
        sentence = "the model's output agrees and its gradient does not"
        return naming._replace(cause="loss", sentence=sentence)
    return naming


def _of_masks(runs: Runs, key: TensorKey) -> NamedCause | None:
    """A mask that a model's own code laid out otherwise; None if the tensors are no masks."""
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == key), None)
    if pair is None or key.port != "input" or pair.reference.shape != pair.candidate.shape:
        return None
    sides = (runs.reference, pair.reference), (runs.candidate, pair.candidate)
    tensors: list[F64] = []
    for run, record in sides:
        values = read_whole(run, record)
        if record.dtype == "bool" and record.kept == "full":
            try:
                flags = np.asarray(run.raw(record)).reshape(record.shape) != 0
            except (DriftlineError, OSError, ValueError):
                return None
            # Whether a flag hides or shows what it marks, it is another one.
            values = np.where(flags, -np.inf, 0.0)
        if values is None:
            return None
        tensors.append(values)
    words = other_mask(*tensors)
    return NamedCause("mask", f"of '{key.slot}' {words}", 1.0) if words else None


def _of_codes(runs: Runs, key: TensorKey) -> NamedCause:
    """Integers that a model's own code made: positions that are late, or others."""
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == key), None)
    if pair is None:
        return NamedCause("unknown", "the values at this site were not kept")
    if pair.reference.shape != pair.candidate.shape:
        shapes = [list(record.shape) for record in (pair.candidate, pair.reference)]
        sentence = f"the candidate has another number of tokens ({shapes[0]} for {shapes[1]})"
        return NamedCause("input", sentence, 1.0)
    try:
        tensors = [
            np.asarray(run.raw(record), dtype=np.int64).reshape(record.shape)
            for run, record in ((runs.reference, pair.reference), (runs.candidate, pair.candidate))
        ]
    except (DriftlineError, OSError, ValueError):
        return NamedCause("unknown", "the values at this site were not kept")
    r, c = tensors
    apart = np.unique(c - r)
    if len(apart) == 1:
        return NamedCause("shift", f"every number is {int(apart[0]):+d} of what it should be", 1.0)
    rising = [
        np.count_nonzero(x[..., 1:] - x[..., :-1] == 1) / max(x[..., 1:].size, 1)
        for x in tensors
        if x.ndim
    ]
    if rising and min(rising) > _RISING:
        sentence = (
            f"positions are counted differently, by {int(apart[0]):+d} to {int(apart[-1]):+d}"
        )
        return NamedCause("positions", sentence, 1.0)
    return NamedCause("unknown", "they are no numbers of positions")


def _named(clue: Clue | None, clues: Sequence[Clue], picture: str) -> NamedCause:
    own = "" if clue is None else clue.cause
    best: dict[str, Clue] = {}
    for other in clues:  # the best come first
        if other.cause != own:
            best.setdefault(other.cause, other)
    rivals = list(best.values())
    others = tuple((rival.cause, round(rival.score, 3)) for rival in rivals)[:4]
    if clue is None:
        nearest = rivals[:2]
        if nearest:
            shares = [f"'{rival.cause}' with {rival.score:.0%} of the error" for rival in nearest]
            are = "are" if len(shares) > 1 else "is"
            why = f"nothing known fits clearly; nearest {are} {' and '.join(shares)}"
        else:
            why = "nothing known fits"
        return NamedCause("unknown", why, 0.0, "", others, picture)
    return NamedCause(clue.cause, clue.sentence, clue.score, clue.detail, others, picture)
