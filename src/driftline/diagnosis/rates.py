"""How often a clean site would be called guilty: counted on halves of the tokens, never assumed.

By replay: every clean site is a test, and one that is outside on one half alone is a false screen.
By noise runs: each trusted run is put to the others as if it were a candidate, screened on one half
of the tokens and confirmed on the other. Decides about no site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from driftline.alignment.plan import Plan
from driftline.diagnosis.effects import effect_of, halves, sums
from driftline.diagnosis.floor import Floor, Variant, margin_of
from driftline.diagnosis.reading import F64, chosen_rows, is_readable, read_rows
from driftline.diagnosis.replayed import Judgement
from driftline.numerics.dtypes import DTYPES
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

_TENSORS = 256
_ELEMENTS = 1 << 14
"""Of one tensor: enough rows to tell one half from the other."""


class Rate(NamedTuple):
    """How often a clean site would be called guilty, and what that rests on.

    Attributes:
        rate: Per clean site.
        by: replay, or noise runs.
        tested: How many tests were made.
        screened: How many were outside on one half or the other.
        confirmed: How many were outside on both; None where those are findings.
    """

    rate: float
    by: str
    tested: int
    screened: int
    confirmed: int | None = None

    def as_evidence(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "tested": self.tested,
            "screened": self.screened,
            "confirmed": self.confirmed,
        }


def by_replay(judged: Iterable[Judgement]) -> Rate | None:
    """Sites outside on exactly one half are false screens; a false alarm must happen on both."""
    tested = [found for found in judged if not found.trouble]
    if not tested:
        return None
    split = sum((found.halves[0] > 1.0) != (found.halves[1] > 1.0) for found in tested)
    once = (split + 1) / (2 * len(tested))
    return Rate(_rounded(min(once * once, 1.0)), "replay", len(tested), split)


def by_noise(floor: Floor, variants: Sequence[Variant], reference: Run) -> Rate | None:
    """Each trusted run against the others, on halves of the tokens; None with a single one.

    How much wider the interval of the others must be is learnt from them alone, so that the run
    that is tried has no say in it.
    """
    used = [variant for variant in variants if variant.name in floor.used]
    trusted = [(variant, variant.run) for variant in used if variant.run is not None]
    if len(trusted) < 2 or len(trusted) < len(used):
        return None
    errors = [floor.measured[variant.name] for variant, _ in trusted]
    margins = [
        margin_of([each for other, each in enumerate(errors) if other != at])
        for at in range(len(errors))
    ]
    partners = [_partners(variant.plan) for variant, _ in trusted]
    tested = screened = confirmed = 0
    for record in _chosen(reference, [set(each) for each in partners]):
        places = chosen_rows(record.shape, _ELEMENTS)
        r = read_rows(reference, record, places)
        if r is None or len(r) < 4:
            continue
        seen: list[tuple[float, float, float]] = []
        units: list[float] = []
        for (_, run), partner in zip(trusted, partners, strict=True):
            theirs = partner[record.key]
            c = read_rows(run, theirs, places) if _fits(run, theirs, record) else None
            if c is None:
                break
            seen.append(_errors(r, c))
            units.append(DTYPES[theirs.dtype].unit_roundoff)
        if len(seen) < len(trusted):
            continue
        for at, (_, first, second) in enumerate(seen):
            others = max(whole for other, (whole, _, _) in enumerate(seen) if other != at)
            limit = margins[at] * others + 0.25 * units[at]
            over = first > limit, second > limit
            tested += 1
            screened += any(over)
            confirmed += all(over)
    if not tested:
        return None
    rate = _rounded((confirmed + 1) / (tested + 1))
    return Rate(rate, "noise runs", tested, screened, confirmed)


def _errors(r: F64, c: F64) -> tuple[float, float, float]:
    found = sums(r, c)
    first, second = halves(found)
    return effect_of(found).error, first.error, second.error


def _partners(plan: Plan | None) -> dict[TensorKey, Record]:
    """The reference's key → a trusted run's record of the same tensor as it is."""
    if plan is None:
        return {}
    return {
        pair.reference.key: pair.candidate
        for pair in plan.pairs
        if pair.reference_recipe is None and pair.candidate_recipe is None
    }


def _chosen(reference: Run, there: Sequence[set[TensorKey]]) -> list[Record]:
    """Outputs that every trusted run has, each tensor once; an even sample where there are many."""
    seen: set[str] = set()
    found: list[Record] = []
    for record in reference.records:
        if record.key.port != "output" or not all(record.key in keys for keys in there):
            continue
        if not is_readable(reference, record) or record.digest in seen:
            continue
        if record.digest:
            seen.add(record.digest)
        found.append(record)
    every = max(1, -(-len(found) // _TENSORS))
    return found[::every]


def _fits(run: Run, record: Record, reference: Record) -> bool:
    return record.shape == reference.shape and is_readable(run, record)


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")
