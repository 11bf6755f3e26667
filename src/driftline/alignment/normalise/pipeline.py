"""The order of normalisers and reconcilers: what happens to two runs before and after matching.

Before matching, ranks are gathered, steps renumbered, inputs brought to the same moment and packed
weights unpacked (`before_matching`). After matching, the plan of the views becomes one of the runs,
and pairs that differ in layout, size or scale get recipes (`after_matching`). `alignment.rules`
decides which tensors are paired.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.normalise.view import AlignedView, Origin, excluded_of, origins_of
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.kinds import kind_of
from driftline.errors import BadInput
from driftline.runs.facts import first_records
from driftline.runs.layout import GRAPHS
from driftline.runs.records import Moment, Record, TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import AlignOptions


CONFIDENCE = 0.8
"""Confidence of a pair of inputs of different moments; an operator may write into its input."""

# Moments: one run stored its inputs before the call, the other after it. They are equal unless the
# call writes into them. Outputs are never matched like this: before the call, an output is memory
# that nothing has been written to.


def align_moments(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs, with inputs that were stored after the call shown as stored before it."""
    reference_moments, candidate_moments = _moments(reference), _moments(candidate)
    # Only if all inputs of a run have the same moment: a run with both moments has the right one
    # itself.
    if reference_moments == {"after"} and candidate_moments == {"before"}:
        return _with_inputs_before(reference), candidate
    if reference_moments == {"before"} and candidate_moments == {"after"}:
        return reference, _with_inputs_before(candidate)
    return reference, candidate


def note_moments(plan: Plan) -> Plan:
    """The plan with pairs of different moments marked by a rule of their own, and a note."""
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
        _paired_by_moment(pair) if differs else pair
        for pair, differs in zip(plan.pairs, apart, strict=True)
    )
    return plan._replace(pairs=pairs, notes=(*plan.notes, note))


def _paired_by_moment(pair: Pair) -> Pair:
    return pair._replace(by="moment", confidence=min(pair.confidence, CONFIDENCE))


def _moments(run: Run) -> set[Moment]:
    return {record.key.moment for record in run.records if record.key.port == "input"}


def _with_inputs_before(run: Run) -> Run:
    before = origins_of(run)
    records: list[Record] = []
    origins: dict[TensorKey, Origin] = {}
    for record in run.records:
        seen = record
        if record.key.port == "input":
            seen = record._replace(key=record.key._replace(moment="before"))
        origin = before.get(record.key, record)
        # An earlier view's origin is kept; a record that is its own origin needs no entry.
        if origin is not seen:
            origins[seen.key] = origin
        records.append(seen)
    base = run.base if isinstance(run, AlignedView) else run
    return AlignedView(base, records, origins, excluded_of(run))


PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Types that can be compared with each other without a recipe."""


_CODES = frozenset({"int8", "int4"})
_INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int4", "uint4"})
"""Types that a quantised graph may compute with."""
WEIGHTS = frozenset({"param", "param_grad", "optimizer_grad"})


class Views(NamedTuple):
    """Both runs as the matching rules see them, and notes on how they were changed."""

    reference: Run
    candidate: Run
    notes: tuple[str, ...] = ()


def before_matching(reference: Run, candidate: Run, options: AlignOptions) -> Views:
    """Views of both runs with common ranks, steps, moments and encodings.

    Raises:
        BadInput: A placement or step map does not fit the runs.
    """
    notes: list[str] = []
    reference_places, candidate_places = _places(reference), _places(candidate)
    # Ranks come first, so that steps and moments are processed once, not once per rank.
    if options.placements or _must_gather(reference, candidate, reference_places, candidate_places):
        reference, candidate = _gathered(reference, candidate, options, notes)
    elif reference_places != candidate_places and len(reference_places) == len(candidate_places):
        from driftline.alignment.normalise.steps import align_ranks

        candidate, more_notes = align_ranks(reference, candidate)
        notes += more_notes
    # Steps before moments: inputs can be compared only if their steps have the same number.
    step_map = options.step_map
    if step_map or len(_steps(reference) | _steps(candidate)) > 1:
        from driftline.alignment.normalise.steps import align_steps, parse_step_map

        declared_map = parse_step_map(",".join(step_map)) if step_map else None
        reference, candidate, more_notes = align_steps(reference, candidate, declared_map)
        notes += more_notes
    if any(_is_stored_late(record.key) for run in (reference, candidate) for record in run.records):
        reference, candidate = align_moments(reference, candidate)
    reference, candidate = _decoded(reference, candidate)
    if _may_add_residuals(reference) != _may_add_residuals(candidate):
        from driftline.alignment.normalise.residuals import add_residuals

        reference, candidate = add_residuals(reference, candidate)
    return Views(reference, candidate, tuple(notes))


def _decoded(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs with numbers, if one of them has packed, wrapped or plain integer codes."""
    # Cheap checks of names decide whether a normaliser is imported at all.
    if any(
        record.key.site[-7:] == "qweight" or record.key.slot == "qweight"
        for run in (reference, candidate)
        for record in run.records
    ):
        from driftline.alignment.normalise.encodings import unpack_weights

        reference, candidate = unpack_weights(reference, candidate)
    if any(r.key.slot.endswith(".qdata") for run in (reference, candidate) for r in run.records):
        from driftline.alignment.normalise.encodings import decode_wrapped

        reference, candidate = decode_wrapped(reference, candidate)
    if any(
        record.dtype in _INTEGERS and record.key.port in ("input", "output")
        for run in (reference, candidate)
        for record in run.records
    ):
        from driftline.alignment.normalise.encodings import decode_integers

        reference, candidate = decode_integers(reference), decode_integers(candidate)
    return reference, candidate


def _may_add_residuals(run: Run) -> bool:
    """Whether a norm has a second input, which it may add to the first."""
    return any(
        record.key.port == "input"
        and kind_of(record.class_name).startswith("norm")
        and (record.alias == "1" or record.key.slot in ("1", "residual"))
        for record in run.records
    )


def after_matching(plan: Plan, seen: Views, options: AlignOptions) -> Plan:
    """The plan of the runs themselves, with a recipe for every pair that needs one.

    Raises:
        BadInput: A mask cannot be read or fits no tensor.
    """
    from driftline.alignment.normalise.view import AlignedView, resolve_views

    reference, candidate = (
        run.base if isinstance(run, AlignedView) else run
        for run in (seen.reference, seen.candidate)
    )
    plan = resolve_views(plan, seen.reference, seen.candidate)
    plan = plan._replace(notes=(*plan.notes, *seen.notes))
    if any(
        _is_stored_late(pair.reference.key) != _is_stored_late(pair.candidate.key)
        for pair in plan.pairs
    ):
        plan = note_moments(plan)
    # Between frameworks, a square weight may be stored transposed, which its shape does not show.
    foreign = any(_is_square_weight(pair) for pair in plan.pairs) and (
        reference.facts.framework != candidate.facts.framework
    )
    operators = reference.facts.operator_sites and candidate.facts.operator_sites
    codes = operators and any(
        record.dtype in _CODES for run in (reference, candidate) for record in run.records
    )
    # The reconciler reads complete runs, so it is made only if a pair needs it.
    unlike = [
        _needs_reconciler(pair, foreign) or (operators and _operands(pair, codes))
        for pair in plan.pairs
    ]
    if any(unlike):
        from driftline.alignment.reconcile.reconciler import Reconciler

        rules = Reconciler(reference, candidate, plan)
        pairs = tuple(
            rules.reconcile(pair) if apart else pair
            for pair, apart in zip(plan.pairs, unlike, strict=True)
        )
        # Ranks are reconciled one by one, and many give the same note.
        notes = tuple(dict.fromkeys((*plan.notes, *rules.notes)))
        plan = _without_sources(plan._replace(pairs=pairs, notes=notes, left_out=rules.left_out))
    # Masks come last, because they must fit the shapes that are compared.
    if options.masks:
        from driftline.alignment.reconcile.masks import masked

        plan = masked(plan, reference, candidate, options.masks)
    return _explained(plan)


def _without_sources(plan: Plan) -> Plan:
    """The plan without unpaired tensors that a recipe uses, such as the scale of a weight."""
    reference_keys = {
        r.key for p in plan.pairs if p.reference_recipe for r in p.reference_recipe.records
    }
    candidate_keys = {
        r.key for p in plan.pairs if p.candidate_recipe for r in p.candidate_recipe.records
    }
    return plan._replace(
        missing=tuple(record for record in plan.missing if record.key not in reference_keys),
        extra=tuple(record for record in plan.extra if record.key not in candidate_keys),
    )


def is_compiled(run: Run) -> bool:
    """Whether any process has side files that list graphs of a compiler."""
    return any(GRAPHS in run.sheets(r.key.rank, r.key.process) for r in first_records(run))


def keeps_graphs(run: Run) -> bool:
    """Whether the module tree of any process holds the graph of a compiler's dump."""
    trees = (run.topology(r.key.rank, r.key.process) for r in first_records(run))
    return any(tree is not None and tree.get("graphs") for tree in trees)


def _is_square_weight(pair: Pair) -> bool:
    shape = pair.reference.shape
    return len(shape) == 2 and shape[0] == shape[1] and pair.reference.key.port in WEIGHTS


def _needs_reconciler(pair: Pair, foreign: bool) -> bool:
    """Whether two sides differ in shape, type or layout, so that they need a reconciler."""
    reference, candidate = pair.reference, pair.candidate
    reference_shape = (
        reference.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    )
    candidate_shape = (
        candidate.shape if pair.candidate_recipe is None else pair.candidate_recipe.shape
    )
    if reference_shape != candidate_shape:
        return not pair.trouble
    if reference.dtype != candidate.dtype and not (
        reference.dtype in PLAIN and candidate.dtype in PLAIN
    ):
        return not pair.trouble
    # A square weight may be stored transposed and still have the same shape.
    return (
        (foreign or reference.class_name != candidate.class_name)
        and not {reference.key.port, candidate.key.port}.isdisjoint(WEIGHTS)
        and len(reference_shape) == 2
        and not pair.trouble
    )


def _operands(pair: Pair, codes: bool) -> bool:
    """Whether a pair may be operands that need a recipe: weights, scales or quantised codes."""
    reference, candidate = pair.reference, pair.candidate
    if pair.trouble or reference.key.port != candidate.key.port:
        return False
    if reference.dtype == candidate.dtype and reference.dtype in _CODES:
        return reference.key.port in ("input", "output")
    recipe = pair.reference_recipe
    shape = reference.shape if recipe is None else recipe.shape
    square = len(shape) == 2 and shape[0] == shape[1]
    return reference.key.port == "input" and (square or (codes and len(shape) == 1))


def _must_gather(
    reference: Run,
    candidate: Run,
    reference_places: list[tuple[int, int]],
    candidate_places: list[tuple[int, int]],
) -> bool:
    """Whether the ranks of a side must be gathered before tensors can be paired."""
    ranks = {rank for rank, _ in reference_places}, {rank for rank, _ in candidate_places}
    if len(ranks[0]) != len(ranks[1]):
        # Ranks that crashed or were not captured do not change what the other ranks hold.
        subset = ranks[0] < ranks[1] or ranks[1] < ranks[0]
        if not subset or reference.facts.world != candidate.facts.world:
            return True
    elif len(ranks[0]) == 1 and _cut_over_more_ranks(reference) != _cut_over_more_ranks(candidate):
        return True  # the only captured rank of a sharded job holds parts of tensors
    elif len(ranks[0]) == 1 or reference_places != candidate_places:
        return False
    # With equally many ranks, the meshes may still differ: then the placements or the shapes of
    # equal keys differ.
    if reference.facts.stages or candidate.facts.stages:
        return True  # other stages, or another order of micro-batches
    records_by_key = {record.key: record for record in reference.records}
    for record in candidate.records:
        same = records_by_key.get(record.key)
        if same is None:
            continue
        if placement_kind(same.placement) != placement_kind(record.placement):
            return True
        if record.key.port == "param" and same.shape != record.shape:
            return True  # one program cut its weights itself
    return False


def _cut_over_more_ranks(run: Run) -> bool:
    """Whether the placements of a job with several ranks say that tensors are shards."""
    # Records first, because most runs have no placements, and the facts of processes are in files.
    return any("S(" in record.placement for record in run.records) and run.facts.world > 1


def placement_kind(placement: str) -> str:
    """A placement's text without the coordinates of the rank, which differ on every rank."""
    return "" if placement.startswith("local ") else placement.partition(" at (")[0]


def _gathered(
    reference: Run, candidate: Run, options: AlignOptions, notes: list[str]
) -> tuple[Run, Run]:
    from driftline.alignment.placements.declared import gather_ranks, parse_placement

    rules = [parse_placement(text) for text in options.placements]
    reference_places, candidate_places = _places(reference), _places(candidate)
    single = len(reference_places) == len(candidate_places) == 1
    part = single and _cut_over_more_ranks(reference)
    if single and part == _cut_over_more_ranks(candidate):
        raise BadInput(
            "--placement, but both runs have one rank only",
            hint="give the folder that holds all ranks of the sharded run",
        )
    # The user's placements say how to gather; with equally many ranks, nothing is gathered.
    if rules and len(reference_places) == len(candidate_places) > 1:
        notes.append(
            f"both runs have {len(reference_places)} ranks: compared rank by rank, the placements "
            "are not used"
        )
        return reference, candidate
    # The side with a single rank gives the rank under which the other side is seen.
    onto = (
        reference_places[0]
        if len(reference_places) == 1
        else (candidate_places[0] if len(candidate_places) == 1 else (0, 0))
    )
    if len(reference_places) == 1 and not part:
        gathered = gather_ranks(candidate, rules, reference, onto=onto)
        notes += gathered.notes
        return reference, gathered.run
    if len(candidate_places) == 1:
        gathered = gather_ranks(reference, rules, candidate, onto=onto)
        notes += gathered.notes
        return gathered.run, candidate
    # Both runs are sharded, so they are gathered into shapes that both can make.
    from driftline.alignment.placements.gather import common_shapes

    # The shapes are found from both sides first. Then the candidate is gathered towards the
    # reference, and the reference towards the result.
    calls = _calls_differ(reference, candidate)
    targets = common_shapes(reference, candidate, onto, calls=calls)
    gather = partial(gather_ranks, rules=rules, onto=onto, targets=targets, calls=calls)
    gathered_candidate = gather(candidate, other=gather(reference, other=None).run)
    if not gathered_candidate.decided:
        # Neither run alone shows whether gradients are averaged, so sums are tried as well.
        gathered_candidate = gather(
            candidate, other=gather(reference, other=None, averaged=False).run
        )
    gathered_reference = gather(reference, other=gathered_candidate.run)
    notes += [*gathered_reference.notes, *gathered_candidate.notes]
    return gathered_reference.run, gathered_candidate.run


def _calls_differ(reference: Run, candidate: Run) -> bool:
    """Whether two pipelines split their batch into different numbers of micro-batches."""
    if not reference.facts.stages or not candidate.facts.stages:
        return False
    visits = [
        max((r.key.visit for r in run.records if r.key.port == "output"), default=0)
        for run in (reference, candidate)
    ]
    return visits[0] != visits[1]


def _explained(plan: Plan) -> Plan:
    """The plan with a reason for tensors whose step or rank the other run does not have."""
    if not plan.missing and not plan.extra:
        return plan
    reasons = dict(plan.reasons)
    paired = [pair.reference.key for pair in plan.pairs], [p.candidate.key for p in plan.pairs]
    other_keys = {
        "reference": paired[1] + [record.key for record in plan.extra],
        "candidate": paired[0] + [record.key for record in plan.missing],
    }
    for side, other, records in (
        ("reference", "candidate", plan.missing),
        ("candidate", "reference", plan.extra),
    ):
        # Paired tensors count too: a step is missing only if the other side has no tensor of it.
        steps = {key.step for key in other_keys[side]}
        ranks = {key.rank for key in other_keys[side]}
        for record in records:
            if (side, record.key) not in reasons and (
                why := why_alone(record.key, other, steps, ranks)
            ):
                reasons[side, record.key] = why
    return plan if reasons == dict(plan.reasons) else plan._replace(reasons=reasons)


def why_alone(key: TensorKey, other: str, steps: set[int], ranks: set[int]) -> str:
    """Why the other side, with these steps and ranks, lacks a tensor; empty if it could have it."""
    if key.step not in steps:
        return f"the {other} has no step {key.step}"
    return "" if key.rank in ranks else f"the {other} has no rank {key.rank}"


def _is_stored_late(key: TensorKey) -> bool:
    """Whether this is an input that was stored after the call."""
    return key.moment == "after" and key.port == "input"


def _places(run: Run) -> list[tuple[int, int]]:
    return sorted({(record.key.rank, record.key.process) for record in run.records})


def _steps(run: Run) -> set[int]:
    return {record.key.step for record in run.records}
