"""Inputs that one run took before the call and the other after it: the same, unless written into.

A weak rule: it is used where a run has inputs of the other moment only, and never for outputs (an
output before the call is memory that nobody has written yet).
"""

from __future__ import annotations

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sides import Origin, SeenRun, aside_of, origins_of
from driftline.runs.key import Moment, TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

CONFIDENCE = 0.8


def seen_moments(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs, with the inputs of a run that took them after the call seen as the other's."""
    ours, theirs = _moments(reference), _moments(candidate)
    if ours == {"after"} and theirs == {"before"}:
        return _as_before(reference), candidate
    if ours == {"before"} and theirs == {"after"}:
        return reference, _as_before(candidate)
    return reference, candidate


def said_of_moments(plan: Plan) -> Plan:
    """The plan with such pairs under their own rule, and a note; of the runs, not of views."""
    apart = [pair.reference.key.moment != pair.candidate.key.moment for pair in plan.pairs]
    if not any(apart):
        return plan
    first = plan.pairs[apart.index(True)]
    when = [f"{pair.key.moment} the call" for pair in (first.reference, first.candidate)]
    note = (
        f"inputs were taken {when[0]} in the reference and {when[1]} in the candidate; "
        "what an operator writes into its own input cannot be compared"
    )
    pairs = tuple(
        _weaker(pair) if differs else pair for pair, differs in zip(plan.pairs, apart, strict=True)
    )
    return plan._replace(pairs=pairs, notes=(*plan.notes, note))


def _weaker(pair: Pair) -> Pair:
    return pair._replace(by="moment", confidence=min(pair.confidence, CONFIDENCE))


def _moments(run: Run) -> set[Moment]:
    return {record.key.moment for record in run.records if record.key.port == "input"}


def _as_before(run: Run) -> Run:
    before = origins_of(run)
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    for record in run.records:
        seen = record
        if record.key.port == "input":
            seen = record._replace(key=record.key._replace(moment="before"))
        origin = before.get(record.key, record)
        if origin is not seen:
            origins[seen.key] = origin
        records.append(seen)
    whole = run.whole if isinstance(run, SeenRun) else run
    return SeenRun(whole, records, origins, aside_of(run))
