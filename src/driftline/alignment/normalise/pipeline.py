"""Inputs that one run took before the call and the other after it: the same, unless written into.

A weak rule: it is used where a run has inputs of the other moment only, and never for outputs (an
output before the call is memory that nobody has written yet).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.normalise.view import Origin, SeenRun, aside_of, origins_of
from driftline.alignment.plan import Pair, Plan
from driftline.errors import BadInput
from driftline.runs.facts import first_records
from driftline.runs.layout import GRAPHS
from driftline.runs.records import Moment, Record, TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import AlignOptions


CONFIDENCE = 0.8


def seen_moments(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs, with the inputs of a run that took them after the call seen as the other's."""
    ours, theirs = _moments(reference), _moments(candidate)
    # Only where every input of a run is of the one moment: a run with both has the right one
    # itself.
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
        # An earlier view's origin is carried over; a record that is its own needs no entry.
        if origin is not seen:
            origins[seen.key] = origin
        records.append(seen)
    whole = run.whole if isinstance(run, SeenRun) else run
    return SeenRun(whole, records, origins, aside_of(run))


# What happens to two runs before their tensors are matched, and to the pairs afterwards.


PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types that need nothing done to be compared with each other."""


_CODES = frozenset({"int8", "int4"})
WEIGHTS = frozenset({"param", "param_grad", "optimizer_grad"})


class Seen(NamedTuple):
    """Both runs as the matching rules see them, and what was concluded on the way."""

    reference: Run
    candidate: Run
    notes: tuple[str, ...] = ()


def before_matching(reference: Run, candidate: Run, options: AlignOptions) -> Seen:
    """See the ranks and steps of both runs under the same numbers.

    Raises:
        BadInput: A placement or step map that means nothing here.
    """
    notes: list[str] = []
    ours, theirs = _places(reference), _places(candidate)
    # Ranks come first: steps and moments are then looked at once, not once per rank.
    if options.placements or _lie_differently(reference, candidate, ours, theirs):
        reference, candidate = _gathered(reference, candidate, options, notes)
    elif ours != theirs and len(ours) == len(theirs):
        from driftline.alignment.normalise.steps import seen_ranks

        candidate, said = seen_ranks(reference, candidate)
        notes += said
    # Steps before moments: inputs can only be compared once their steps have the same number.
    step_map = options.step_map
    if step_map or len(_steps(reference) | _steps(candidate)) > 1:
        from driftline.alignment.normalise.steps import parse_step_map, seen_steps

        said_map = parse_step_map(",".join(step_map)) if step_map else None
        reference, candidate, said = seen_steps(reference, candidate, said_map)
        notes += said
    if any(_late(record.key) for run in (reference, candidate) for record in run.records):
        reference, candidate = seen_moments(reference, candidate)
    # Cheap looks at names decide whether a normaliser is imported at all.
    if any(
        record.key.site[-7:] == "qweight" or record.key.slot == "qweight"
        for run in (reference, candidate)
        for record in run.records
    ):
        from driftline.alignment.normalise.encodings import seen_packed

        reference, candidate = seen_packed(reference, candidate)
    return Seen(reference, candidate, tuple(notes))


def after_matching(plan: Plan, seen: Seen, options: AlignOptions) -> Plan:
    """The plan of the runs themselves, with a recipe wherever a pair needs one.

    Raises:
        BadInput: A mask that cannot be read or fits no tensor.
    """
    from driftline.alignment.normalise.view import SeenRun, taken_back

    reference, candidate = (
        run.whole if isinstance(run, SeenRun) else run for run in (seen.reference, seen.candidate)
    )
    plan = taken_back(plan, seen.reference, seen.candidate)
    plan = plan._replace(notes=(*plan.notes, *seen.notes))
    if any(_late(pair.reference.key) != _late(pair.candidate.key) for pair in plan.pairs):
        plan = said_of_moments(plan)
    # Between frameworks a square weight may be stored transposed, which its shape does not
    # show.
    foreign = any(_is_square_weight(pair) for pair in plan.pairs) and (
        reference.facts.framework != candidate.facts.framework
    )
    operators = reference.facts.operator_sites and candidate.facts.operator_sites
    codes = operators and any(
        record.dtype in _CODES for run in (reference, candidate) for record in run.records
    )
    # The reconciler reads whole runs, so it is made only if a pair needs it.
    unlike = [
        _unlike(pair, foreign) or (operators and _operands(pair, codes)) for pair in plan.pairs
    ]
    if any(unlike):
        from driftline.alignment.reconcile.reconciler import Reconciler

        rules = Reconciler(reference, candidate, plan)
        pairs = tuple(
            rules.settled(pair) if apart else pair
            for pair, apart in zip(plan.pairs, unlike, strict=True)
        )
        notes = tuple(dict.fromkeys((*plan.notes, *rules.notes)))  # of ranks each for itself
        plan = _without_sources(plan._replace(pairs=pairs, notes=notes))
    # Masks come last, because they must fit the shapes that are really compared.
    if options.masks:
        from driftline.alignment.reconcile.masks import masked

        plan = masked(plan, reference, candidate, options.masks)
    return _explained(plan)


def _without_sources(plan: Plan) -> Plan:
    """The plan without lone tensors that a recipe uses: a scale is part of what it scales."""
    ours = {r.key for p in plan.pairs if p.reference_recipe for r in p.reference_recipe.records}
    theirs = {r.key for p in plan.pairs if p.candidate_recipe for r in p.candidate_recipe.records}
    return plan._replace(
        missing=tuple(record for record in plan.missing if record.key not in ours),
        extra=tuple(record for record in plan.extra if record.key not in theirs),
    )


def is_compiled(run: Run) -> bool:
    """Whether any process lists graphs of a compiler beside its tensors: one look at its folder."""
    return any(GRAPHS in run.sheets(r.key.rank, r.key.process) for r in first_records(run))


def keeps_graphs(run: Run) -> bool:
    """Whether the module tree of any process holds the graph that a compiler's dump came with."""
    trees = (run.topology(r.key.rank, r.key.process) for r in first_records(run))
    return any(tree is not None and tree.get("graphs") for tree in trees)


def _is_square_weight(pair: Pair) -> bool:
    shape = pair.reference.shape
    return len(shape) == 2 and shape[0] == shape[1] and pair.reference.key.port in WEIGHTS


def _unlike(pair: Pair, foreign: bool) -> bool:
    """Whether two sides are kept apart by more than their values."""
    ours, theirs = pair.reference, pair.candidate
    here = ours.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    there = theirs.shape if pair.candidate_recipe is None else pair.candidate_recipe.shape
    if here != there:
        return not pair.trouble
    if ours.dtype != theirs.dtype and not (ours.dtype in PLAIN and theirs.dtype in PLAIN):
        return not pair.trouble
    # A square weight may lie transposed and have the same shape.
    return (
        (foreign or ours.class_name != theirs.class_name)
        and not {ours.key.port, theirs.key.port}.isdisjoint(WEIGHTS)
        and len(here) == 2
        and not pair.trouble
    )


def _operands(pair: Pair, codes: bool) -> bool:
    """Whether two inputs may be a weight or, among codes, the scale of one or codes themselves."""
    ours, theirs = pair.reference, pair.candidate
    if pair.trouble or ours.key.port != theirs.key.port:
        return False
    if ours.dtype == theirs.dtype and ours.dtype in _CODES:
        return ours.key.port in ("input", "output")
    recipe = pair.reference_recipe
    shape = ours.shape if recipe is None else recipe.shape
    square = len(shape) == 2 and shape[0] == shape[1]
    return ours.key.port == "input" and (square or (codes and len(shape) == 1))


def _lie_differently(
    reference: Run, candidate: Run, ours: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> bool:
    """Whether the ranks of one side, or of both, must be made one before anything can be paired."""
    many = {rank for rank, _ in ours}, {rank for rank, _ in theirs}
    if len(many[0]) != len(many[1]):
        # Ranks that are gone, or were not captured, change nothing about where the others stand.
        subset = many[0] < many[1] or many[1] < many[0]
        if not subset or reference.facts.world != candidate.facts.world:
            return True
    elif len(many[0]) == 1 and _cut_over_more_ranks(reference) != _cut_over_more_ranks(candidate):
        return True  # what is left of a job that dealt out its tensors is a part
    elif len(many[0]) == 1 or ours != theirs:
        return False
    # As many ranks on both sides, but perhaps another mesh: tensors that rank by rank are others.
    if reference.facts.stages or candidate.facts.stages:
        return True  # other stages, or another order of micro-batches
    known = {record.key: record for record in reference.records}
    for record in candidate.records:
        same = known.get(record.key)
        if same is None:
            continue
        if way(same.placement) != way(record.placement):
            return True
        if record.key.port == "param" and same.shape != record.shape:
            return True  # one of them cut its weights itself
    return False


def _cut_over_more_ranks(run: Run) -> bool:
    """Whether one rank is here of a job of several, whose tensors say that they are parts."""
    # Records first: most runs have no placements, and the facts of processes lie in files.
    return any("S(" in record.placement for record in run.records) and run.facts.world > 1


def way(placement: str) -> str:
    """How a tensor lies, without where this rank stands."""
    return "" if placement.startswith("local ") else placement.partition(" at (")[0]


def _gathered(
    reference: Run, candidate: Run, options: AlignOptions, notes: list[str]
) -> tuple[Run, Run]:
    from driftline.alignment.placements.declared import gather_ranks, parse_placement

    rules = [parse_placement(text) for text in options.placements]
    ours, theirs = _places(reference), _places(candidate)
    single = len(ours) == len(theirs) == 1
    part = single and _cut_over_more_ranks(reference)
    if single and part == _cut_over_more_ranks(candidate):
        raise BadInput(
            "--placement, but both runs have one rank only",
            hint="give the folder that holds all ranks of the sharded run",
        )
    # The user's placements say how to gather; with as many ranks on both sides nothing is
    # gathered.
    if rules and len(ours) == len(theirs) > 1:
        notes.append(
            f"both runs have {len(ours)} ranks: compared rank by rank, the placements are not used"
        )
        return reference, candidate
    # The side that has one rank gives the name under which the other is seen.
    onto = ours[0] if len(ours) == 1 else (theirs[0] if len(theirs) == 1 else (0, 0))
    if len(ours) == 1 and not part:
        made = gather_ranks(candidate, rules, reference, onto=onto)
        notes += made.notes
        return reference, made.run
    if len(theirs) == 1:
        made = gather_ranks(reference, rules, candidate, onto=onto)
        notes += made.notes
        return made.run, candidate
    # Both are in pieces: they are made the shapes that both can make.
    from driftline.alignment.placements.gather import common_shapes

    # The shapes are found from both sides first. Then the candidate is gathered towards the
    # reference, and the reference towards the result.
    calls = _calls_differ(reference, candidate)
    targets = common_shapes(reference, candidate, onto, calls=calls)
    gather = partial(gather_ranks, rules=rules, onto=onto, targets=targets, calls=calls)
    there = gather(candidate, other=gather(reference, other=None).run)
    if not there.decided:  # whether gradients are averaged, neither of the two can say alone
        there = gather(candidate, other=gather(reference, other=None, averaged=False).run)
    here = gather(reference, other=there.run)
    notes += [*here.notes, *there.notes]
    return here.run, there.run


def _calls_differ(reference: Run, candidate: Run) -> bool:
    """Whether two pipelines had their batch in another number of parts."""
    if not reference.facts.stages or not candidate.facts.stages:
        return False
    visits = [
        max((r.key.visit for r in run.records if r.key.port == "output"), default=0)
        for run in (reference, candidate)
    ]
    return visits[0] != visits[1]


def _explained(plan: Plan) -> Plan:
    """A reason for what is alone because the other run has no such step or rank at all."""
    if not plan.missing and not plan.extra:
        return plan
    reasons = dict(plan.reasons)
    paired = [pair.reference.key for pair in plan.pairs], [p.candidate.key for p in plan.pairs]
    known = {
        "reference": paired[1] + [record.key for record in plan.extra],
        "candidate": paired[0] + [record.key for record in plan.missing],
    }
    for side, other, records in (
        ("reference", "candidate", plan.missing),
        ("candidate", "reference", plan.extra),
    ):
        # What is paired counts too: a step without a single tensor on the other side is a
        # missing step.
        steps = {key.step for key in known[side]}
        ranks = {key.rank for key in known[side]}
        for record in records:
            if (side, record.key) not in reasons and (
                why := why_alone(record.key, other, steps, ranks)
            ):
                reasons[side, record.key] = why
    return plan if reasons == dict(plan.reasons) else plan._replace(reasons=reasons)


def why_alone(key: TensorKey, other: str, steps: set[int], ranks: set[int]) -> str:
    """Why the other side, of these steps and ranks, cannot have a tensor; empty when it could."""
    if key.step not in steps:
        return f"the {other} has no step {key.step}"
    return "" if key.rank in ranks else f"the {other} has no rank {key.rank}"


def _late(key: TensorKey) -> bool:
    """Whether this is an input as it was after the call."""
    return key.moment == "after" and key.port == "input"


def _places(run: Run) -> list[tuple[int, int]]:
    return sorted({(record.key.rank, record.key.process) for record in run.records})


def _steps(run: Run) -> set[int]:
    return {record.key.step for record in run.records}
