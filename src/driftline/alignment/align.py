"""Entry point of alignment: two runs and the user's options become one plan.

Rules are tried strongest first, and each rule sees only the tensors that stronger rules left
unpaired. A rule is imported when it is needed, so runs whose names agree do not pay for the others.
Rules do not know each other. Tensor values are read only to break a tie, and to see which operator
feeds which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from driftline.alignment.normalise.pipeline import (
    Views,
    after_matching,
    before_matching,
    is_compiled,
    keeps_graphs,
)
from driftline.alignment.plan import Pair, Plan, execution
from driftline.alignment.rules.names import refuse_unrelated, select
from driftline.errors import BadInput
from driftline.registry import Address
from driftline.runs.run import Run
from driftline.runs.scope import scope_of

LONG = 1 << 15
"""With so many tensors on each side, a plan that does not hold its pairs in memory is tried."""
UNMASKED = "none"
"""Value of `--mask` that turns masks off: padding counts, even if a mask was captured."""


class AlignOptions(NamedTuple):
    """The user's options for pairing two runs.

    Attributes:
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, globs whose stars stand for the same text on both sides.
        mapping_file: A file (or the folder of an `op_mapping_file.json`) that says the same.
        plan_file: A saved, perhaps edited, plan; it wins over every rule.
        structural: Whether tensors without a partner by name may be paired by class, shape and
            dataflow.
        placements: `SITE=shard(1)`: how tensors are distributed over ranks.
        masks: Files of the positions that count (shape [batch, tokens]), or `captured`.
        step_map: `REFERENCE=CANDIDATE` step numbers, such as `0=1`, several with commas.
    """

    sites: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    mapping_file: Path | None = None
    plan_file: Path | None = None
    structural: bool = True
    placements: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    step_map: tuple[str, ...] = ()


def align_runs(reference: Run, candidate: Run, options: AlignOptions = AlignOptions()) -> Plan:  # noqa: B008 - a tuple
    """Plan which tensors of two runs are compared with each other.

    Raises:
        DriftlineError: A run without tensors, a glob that matches nothing, a map or plan that
            cannot be read, or two runs that have nothing in common.
    """
    # Refused before anything else: every later message would speak of names that are not there.
    for run in (reference, candidate):
        if not len(run):
            ending = scope_of(run).ending
            raise BadInput(
                f"run '{run.name}' holds no tensor" + (f": its program {ending}" if ending else ""),
                hint="let it come to its end, then compare" if ending else "was anything captured?",
            )
    # The user may have edited a saved plan, so no rule may add to it or take from it.
    if options.plan_file is not None:
        from driftline.alignment.plan_file import saved_plan

        compiled = is_compiled(reference) or is_compiled(candidate)
        plan = saved_plan(options.plan_file, reference, candidate, compiled=compiled)
        if options.masks:
            from driftline.alignment.reconcile.masks import masked

            plan = masked(plan, reference, candidate, options.masks)
        return plan
    # Asked before all rules: where names settle everything, the records of long runs are never
    # held.
    if (plan := _streamed(reference, candidate, options)) is not None:
        return plan
    if _has_graphs(reference, candidate):
        by_graph = _by_graph(reference, candidate, options)
        if by_graph is not None:
            return by_graph
    if options.sites or options.ports:
        select(reference.records, options.sites, options.ports)  # says what matches nothing
    seen = before_matching(reference, candidate, options)
    plan = after_matching(_match(seen.reference, seen.candidate, options), seen, options)
    if options.sites or options.ports:
        # Last, because a site's partner may be called anything.
        from driftline.alignment.rules.compiler_dumps import narrowed

        plan = narrowed(plan, options.sites, options.ports)
    return plan


def _streamed(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """Plan of two long runs that need no rule but names; None for all others."""
    # Sites and ports only narrow a finished plan. Every other option asks for a rule that the
    # streaming plan does not have.
    plain = options._replace(sites=(), ports=(), structural=True) == AlignOptions()
    if not plain or min(len(reference), len(candidate)) < LONG:
        return None
    from driftline.alignment.streaming import selected, streamed_plan

    plan = streamed_plan(reference, candidate)
    if plan is not None and (options.sites or options.ports):
        return selected(plan, options.sites, options.ports)
    return plan


def _has_graphs(reference: Run, candidate: Run) -> bool:
    """Whether both runs hold the graph of a compiler: as a dump, or in a converted module tree."""
    if all("graphs" in run.manifest for run in (reference, candidate)):
        return True
    if set(reference.sites()) == set(candidate.sites()):
        return False  # names say it all, and the trees stay unread
    return keeps_graphs(reference) and keeps_graphs(candidate)


def _by_graph(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """Plan of two dumps of compiled graphs, whose node names are better evidence than any rule."""
    from driftline.alignment.rules.compiler_dumps import align_graphs, narrowed

    # The graphs know their ranks and steps; only what the user says about them is done first.
    declared = bool(options.placements or options.step_map or options.masks)
    seen = (
        before_matching(reference, candidate, options) if declared else Views(reference, candidate)
    )
    plan = Plan((), tuple(seen.reference.records), tuple(seen.candidate.records))
    if options.maps or options.mapping_file is not None:
        from driftline.alignment.rules.maps import pair_by_map

        plan = pair_by_map(plan, options)
    graph_plan = align_graphs(seen.reference, seen.candidate, plan.missing, plan.extra)
    if graph_plan is None:
        return None
    # A plan lists its pairs as the reference executed them, whichever rule made them.
    pairs = sorted([*plan.pairs, *graph_plan.pairs], key=lambda pair: execution(pair.reference))
    plan = graph_plan._replace(pairs=tuple(pairs))
    if declared:
        plan = after_matching(plan, seen, options)
    return narrowed(plan, options.sites, options.ports)


class Context:
    """The two runs and the options, as matching rules ask for them.

    Attributes:
        structural: Structure may pair: it follows the order of execution, which some dumps lack.
        notes: Sentences about the runs that are added to the plan.
        operators_named: The names of operators have told which modules they belong to; structure
            could only guess at what has none.
    """

    def __init__(self, reference: Run, candidate: Run, options: AlignOptions) -> None:
        self.reference = reference
        self.candidate = candidate
        self.options = options
        self.structural = options.structural and reference.ordered and candidate.ordered
        self.notes: list[str] = []
        self.operators_named = False

    @cached_property
    def names_count(self) -> bool:
        """Whether equal names are evidence; asked late, because it may read the dataflow."""
        return not (self.structural and _only_numbered(self.reference, self.candidate, self.notes))


class MatchingRule(NamedTuple):
    """One rule of the matching.

    Attributes:
        name: For readers of this list.
        applies: Whether the rule is asked, given the plan so far.
        place: Where the function is that gives the plan with more pairs, or None if it has nothing
            to say: `file:function`, in `rules`.
        final: If the rule proposes a plan, no weaker rule is asked.
    """

    name: str
    applies: Callable[[Plan, Context], bool]
    place: str
    final: bool = False

    def proposed(self, plan: Plan, context: Context) -> Plan | None:
        """What the rule makes of the plan so far; imports it."""
        return Address(f"driftline.alignment.rules.{self.place}").load()(plan, context)


def _match(reference: Run, candidate: Run, options: AlignOptions) -> Plan:
    """Apply the rules, strongest first; each sees what the ones before left unpaired."""
    context = Context(reference, candidate, options)
    plan = Plan((), tuple(reference.records), tuple(candidate.records))
    for rule in RULES:
        proposed = rule.proposed(plan, context) if rule.applies(plan, context) else None
        if proposed is not None:
            plan = proposed
            if rule.final:
                return plan
    if any(_differ_in_width(pair) for pair in plan.pairs):
        from driftline.alignment.normalise.residuals import reassign_inputs, release_wider

        plan = release_wider(reassign_inputs(plan))
    plan = plan._replace(notes=(*plan.notes, *context.notes))
    return plan if plan.pairs else refuse_unrelated(plan)


def _differ_in_width(pair: Pair) -> bool:
    """Whether two inputs of one name have another number of features."""
    widths = pair.reference.shape[-1:], pair.candidate.shape[-1:]
    return pair.reference.key.port == "input" and widths[0] != widths[1]


def _has_map(plan: Plan, context: Context) -> bool:
    del plan
    return bool(context.options.maps) or context.options.mapping_file is not None


def _has_compiled_graphs(plan: Plan, context: Context) -> bool:
    del plan
    return is_compiled(context.reference) or is_compiled(context.candidate)


def _names_apply(plan: Plan, context: Context) -> bool:
    del plan
    return context.names_count


def _more_names_apply(plan: Plan, context: Context) -> bool:
    return context.names_count and _both_have_more(plan)


def _order_applies(plan: Plan, context: Context) -> bool:
    return context.structural and _both_have_more(plan)


def _structure_applies(plan: Plan, context: Context) -> bool:
    return context.structural and bool(plan.missing or plan.extra)


def _guesses_apply(plan: Plan, context: Context) -> bool:
    return _structure_applies(plan, context) and not context.operators_named


def _projections_apply(plan: Plan, context: Context) -> bool:
    return context.options.structural and bool(plan.pairs) and _both_have_more(plan)


def _both_have_more(plan: Plan) -> bool:
    """Whether both sides still have unpaired tensors: else no rule has anything to pair."""
    return bool(plan.missing and plan.extra)


def _only_numbered(reference: Run, candidate: Run, notes: list[str]) -> bool:
    """Whether names only number the layers, and the two programs have built different ones.

    Equal names are then accidental: the second `linear` of one is the third of the other.
    """
    if reference.facts.numbered_names and candidate.facts.numbered_names:
        return set(reference.sites()) != set(candidate.sites())
    if not all(run.records[0].key.site[:1].isdigit() for run in (reference, candidate)):
        return False
    # ATB counts operators (`1_Decoder_layer.2_LinearOperation`): one more operator changes every
    # later name, unless one side only captured a part of what the other has.
    reference_sites, candidate_sites = set(reference.sites()), set(candidate.sites())
    every = reference_sites | candidate_sites
    # Nine tenths, because a dump of counted operators may have a few sites with plain names.
    counted = sum(site.partition("_")[0].isdigit() for site in every) > 0.9 * len(every)
    if not counted or not (
        reference_sites <= candidate_sites or candidate_sites <= reference_sites
    ):
        return counted
    if _inputs_differ(reference, candidate):
        return True
    from driftline.alignment.sites.roles import rewired

    if site := rewired(reference, candidate):
        notes.append(
            f"operators of the same number are used differently (such as '{site}'), so what feeds "
            "what decides, not the number; --no-structure overrides it"
        )
    return bool(site)


def _inputs_differ(reference: Run, candidate: Run) -> bool:
    """Whether layers of the same name take another number of inputs: then numbers mean nothing."""
    inputs = [Counter[str](), Counter[str]()]
    holders: set[str] = set()
    for run, counts in zip((reference, candidate), inputs, strict=True):
        # The first step of the first process is enough: every step runs the same operators.
        first = run.records[0].key
        for record in run.records:
            key = record.key
            if (key.rank, key.process, key.step) != (first.rank, first.process, first.step):
                continue
            if key.port == "input" and key.moment == "before":
                counts[key.site] += 1
            holders.add(key.site.rpartition(".")[0])
    common_sites = inputs[0].keys() & inputs[1].keys() & holders
    return any(inputs[0][site] != inputs[1][site] for site in common_sites)


RULES: tuple[MatchingRule, ...] = (
    MatchingRule("map", _has_map, "maps:by_map"),
    # Compiled graphs end the matching: a tensor that they leave unpaired has no partner.
    MatchingRule(
        "compiled calls", _has_compiled_graphs, "operator_calls:by_compiled_graphs", final=True
    ),
    MatchingRule("name", _names_apply, "names:by_name"),
    MatchingRule("operators of modules", _order_applies, "module_operators:by_operators"),
    # An exported graph is asked after either kind of name: it needs some named pairs to start
    # from, and its own node names are stronger than normalised ones.
    MatchingRule("exported names", _more_names_apply, "exported:by_export", final=True),
    MatchingRule("normalised name", _more_names_apply, "names:by_plain_name"),
    MatchingRule("exported names", _more_names_apply, "exported:by_export", final=True),
    MatchingRule("exported order", _order_applies, "exported:by_export_order", final=True),
    MatchingRule("structure", _guesses_apply, "structure:by_structure"),
    MatchingRule("same value", _structure_applies, "same_value:by_same_value"),
    MatchingRule("fused parameters", _projections_apply, "in_projections:by_projections"),
    MatchingRule("map of classes", _has_map, "maps:by_class_map"),
)
"""The matching rules, strongest first. A new rule is a function in `rules` and a line here."""
