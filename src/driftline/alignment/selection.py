"""Of a plan that gathers many ranks, what some of them hold: each part against its own place.

A shard is set against its slice of the whole, a replica against the whole. What only all ranks
together are (the sum of terms, rows in another order) no single rank can show: that is left out,
and counted in a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from driftline.alignment.normalise.view import with_steps
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.errors import BadInput
from driftline.runs.records import Record
from driftline.runs.run import Run
from driftline.runs.views import narrowed

Cuts = tuple[Step, ...]
_ALONE = ("times",)
"""Steps after a join that mean the same for each of its parts."""


def have_the_same_ranks(reference: Run, candidate: Run) -> bool:
    """Whether two runs can be compared rank by rank."""
    return _ranks(reference) == _ranks(candidate)


def of_ranks(plan: Plan, reference: Run, candidate: Run, ranks: Collection[int]) -> Plan:
    """Only what these ranks hold of the run that has more of them.

    Raises:
        BadInput: That run has not all of these ranks, or nothing of theirs has a partner.
    """
    # The run with more ranks is the distributed one; its parts are compared one by one.
    in_reference = len(_ranks(reference)) > len(_ranks(candidate))
    many = reference if in_reference else candidate
    narrowed(many, ranks=ranks)  # says which ranks there are not
    pairs: list[Pair] = []
    together = 0
    for pair in plan.pairs:
        found = list(_of_ranks(pair, ranks, in_reference=in_reference))
        pairs += found
        # A pair of which these ranks hold a part, but not one that stands for itself.
        together += not found and _has(pair, ranks, in_reference=in_reference)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
    if not pairs:
        raise BadInput(
            f"nothing that {who} of '{many.name}' holds can be compared by itself",
            hint="leave out --rank: all ranks together are compared then",
        )
    note = f"only what {who} of '{many.name}' holds"
    if together:
        note += f"; left out: {together} that only all ranks together make "
        note += "(sums, rows in another order)"
    # Lone tensors of the other run belong to all ranks: they are no finding about these.
    mine = plan.missing if in_reference else plan.extra
    kept = tuple(record for record in mine if record.key.rank in ranks)
    return plan._replace(
        pairs=tuple(pairs),
        missing=kept if in_reference else (),
        extra=() if in_reference else kept,
        notes=(*plan.notes, note),
    )


def _of_ranks(pair: Pair, ranks: Collection[int], *, in_reference: bool) -> Iterator[Pair]:
    side, other = ("reference", "candidate") if in_reference else ("candidate", "reference")
    source = _source(pair, in_reference=in_reference)
    # All parts are of the wanted ranks: the pair stays as it is.
    if all(record.key.rank in ranks for record in _records(source)):
        yield pair
        return
    parts = _parts(source)
    for record, cuts in parts if parts is not None else ():
        if record.key.rank not in ranks:
            continue
        # The first step joins the parts; what follows is done to each part alone.
        steps = source.steps[1:] if isinstance(source, Recipe) else ()
        recipe = start(record).then(*steps, shape=record.shape) if steps else None
        whole = record._replace(placement="")  # how it lies is settled
        alone = pair._replace(**{side: whole, f"{side}_recipe": recipe})
        shape = source.shape
        # The other side is cut from the outermost join inwards, as the parts lie in it.
        for cut in cuts:
            shape = (*shape[: cut.axis], cut.stop - cut.start, *shape[cut.axis + 1 :])
            alone = with_steps(alone, other, cut, shape=shape)
        yield alone


def _parts(source: Source) -> list[tuple[Record, Cuts]] | None:
    """Every record of a join, and how to cut its place out of the whole; None where it has none."""
    if isinstance(source, Record):
        return [(source, ())]
    if not source.steps or source.steps[0].kind != "concat":
        return None
    # Rows in another order, or a reshape, mix the parts: none has a place of its own then.
    if any(step.kind not in _ALONE for step in source.steps[1:]):
        return None
    axis, at = source.steps[0].axis, 0
    found: list[tuple[Record, Cuts]] = []
    for each in source.sources:
        inner = _parts(each)
        if inner is None:
            return None
        size = each.shape[axis]
        cut = Step("split", axis, at, at + size)
        found += [(record, (cut, *cuts)) for record, cuts in inner]
        at += size
    return found


def _has(pair: Pair, ranks: Collection[int], *, in_reference: bool) -> bool:
    records = _records(_source(pair, in_reference=in_reference))
    return any(record.key.rank in ranks for record in records)


def _source(pair: Pair, *, in_reference: bool) -> Source:
    if in_reference:
        return pair.reference_recipe or pair.reference
    return pair.candidate_recipe or pair.candidate


def _records(source: Source) -> Sequence[Record]:
    return source.records if isinstance(source, Recipe) else (source,)


def _ranks(run: Run) -> set[int]:
    return {record.key.rank for record in run.records}
