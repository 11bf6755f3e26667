"""Select ranks of a plan that gathers a distributed run, and compare each part with its own slice.

A shard is compared with its slice of the other run's tensor, a replica with all of it. A tensor
that only all ranks together can make (a sum of terms, rows in another order) is left out and
counted in a note.
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
"""Steps after a join that can be applied to each part alone."""


def have_the_same_ranks(reference: Run, candidate: Run) -> bool:
    """Whether two runs can be compared rank by rank."""
    return _ranks(reference) == _ranks(candidate)


def of_ranks(plan: Plan, reference: Run, candidate: Run, ranks: Collection[int]) -> Plan:
    """The plan narrowed to the parts of these ranks of the run with more ranks.

    Raises:
        BadInput: The run lacks one of these ranks, or nothing that they hold has a partner.
    """
    # The run with more ranks is the distributed one; its parts are compared one by one.
    in_reference = len(_ranks(reference)) > len(_ranks(candidate))
    distributed = reference if in_reference else candidate
    narrowed(distributed, ranks=ranks)  # raises if a rank does not exist
    pairs: list[Pair] = []
    left_out = 0
    for pair in plan.pairs:
        rank_pairs = list(_of_ranks(pair, ranks, in_reference=in_reference))
        pairs += rank_pairs
        # These ranks hold a part of the pair that cannot be compared alone.
        left_out += not rank_pairs and _has(pair, ranks, in_reference=in_reference)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
    if not pairs:
        raise BadInput(
            f"nothing that {who} of '{distributed.name}' holds can be compared alone",
            hint="leave out --rank: all ranks together are compared then",
        )
    note = f"only what {who} of '{distributed.name}' holds"
    if left_out:
        note += f"; left out: {left_out} that only all ranks together make "
        note += "(sums, rows in another order)"
    # Unpaired tensors of the other run belong to all ranks, so they are no finding about these.
    unpaired = plan.missing if in_reference else plan.extra
    kept = tuple(record for record in unpaired if record.key.rank in ranks)
    return plan._replace(
        pairs=tuple(pairs),
        missing=kept if in_reference else (),
        extra=() if in_reference else kept,
        notes=(*plan.notes, note),
        selected=(*plan.selected, who),
    )


def _of_ranks(pair: Pair, ranks: Collection[int], *, in_reference: bool) -> Iterator[Pair]:
    side, other = ("reference", "candidate") if in_reference else ("candidate", "reference")
    source = _source(pair, in_reference=in_reference)
    # If all parts belong to the selected ranks, the pair stays unchanged.
    if all(record.key.rank in ranks for record in _records(source)):
        yield pair
        return
    parts = _parts(source)
    for record, cuts in parts if parts is not None else ():
        if record.key.rank not in ranks:
            continue
        # The first step joins the parts; the later steps are applied to each part alone.
        steps = source.steps[1:] if isinstance(source, Recipe) else ()
        recipe = start(record).then(*steps, shape=record.shape) if steps else None
        part_record = record._replace(placement="")  # the cut replaces its placement
        part_pair = pair._replace(**{side: part_record, f"{side}_recipe": recipe})
        shape = source.shape
        # The other side is cut from the outermost join inwards, in the order in which parts are
        # nested.
        for cut in cuts:
            shape = (*shape[: cut.axis], cut.stop - cut.start, *shape[cut.axis + 1 :])
            part_pair = with_steps(part_pair, other, cut, shape=shape)
        yield part_pair


def _parts(source: Source) -> list[tuple[Record, Cuts]] | None:
    """Every record of a join with the steps that cut its slice; None if parts have no slice."""
    if isinstance(source, Record):
        return [(source, ())]
    if not source.steps or source.steps[0].kind != "concat":
        return None
    # Rows in another order, or a reshape, mix the parts, so that none has its own place.
    if any(step.kind not in _ALONE for step in source.steps[1:]):
        return None
    axis, offset = source.steps[0].axis, 0
    parts: list[tuple[Record, Cuts]] = []
    for joined in source.sources:
        inner = _parts(joined)
        if inner is None:
            return None
        size = joined.shape[axis]
        cut = Step("split", axis, offset, offset + size)
        parts += [(record, (cut, *cuts)) for record, cuts in inner]
        offset += size
    return parts


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
