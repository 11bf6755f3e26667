"""Entry point of alignment: two runs and the user's options become a plan.

Rules are tried strongest first, and each rule sees only the tensors that stronger rules left
unpaired. A rule is imported when it is needed, so that runs with equal names load no others. Rules
do not know each other. Tensor values are read only to break a tie, and to find out which operator
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
"""If both sides have this many tensors, a plan is tried that does not hold its pairs in memory."""
UNMASKED = "none"
"""Value of `--mask` that turns masks off: padding is compared, even if a mask was captured."""


class AlignOptions(NamedTuple):
    """The user's options for pairing two runs.

    Attributes:
        sites: Globs of sites to compare; empty for all.
        ports: Ports to compare; empty for all.
        maps: `REFERENCE=CANDIDATE`: globs in which a star stands for the same text on both sides.
        mapping_file: A file of such maps, or the folder of an `op_mapping_file.json`.
        plan_file: A saved plan, which may be edited; it replaces all rules.
        structural: Whether tensors without a partner by name may be paired by class, shape and
            dataflow.
        placements: `SITE=shard(1)`: how tensors are distributed over ranks.
        masks: Files that say which positions count (shape [batch, tokens]), or `captured`.
        step_map: `REFERENCE=CANDIDATE` step numbers, such as `0=1`; several are separated by
            commas.
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
        DriftlineError: A run has no tensors, a glob matches nothing, a map or plan cannot be read,
            or the runs have nothing in common.
    """
    # Checked first, because every later message would mention names that do not exist.
    for run in (reference, candidate):
        if not len(run):
            ending = scope_of(run).ending
            raise BadInput(
                f"run '{run.name}' holds no tensor" + (f": its program {ending}" if ending else ""),
                hint="let it come to its end, then compare" if ending else "was anything captured?",
            )
    # The user may have edited a saved plan, so no rule may change it.
    if options.plan_file is not None:
        from driftline.alignment.plan_file import saved_plan

        compiled = is_compiled(reference) or is_compiled(candidate)
        plan = saved_plan(options.plan_file, reference, candidate, compiled=compiled)
        if options.masks:
            from driftline.alignment.reconcile.masks import masked

            plan = masked(plan, reference, candidate, options.masks)
        return plan
    # Tried before all rules: if names pair everything, the records of long runs need not be kept.
    if (plan := _streamed(reference, candidate, options)) is not None:
        return plan
    if _has_graphs(reference, candidate):
        by_graph = _by_graph(reference, candidate, options)
        if by_graph is not None:
            return by_graph
    if options.sites or options.ports:
        select(reference.records, options.sites, options.ports)  # raises if nothing matches
    seen = before_matching(reference, candidate, options)
    plan = after_matching(_match(seen.reference, seen.candidate, options), seen, options)
    if options.sites or options.ports:
        # Last, because a site's partner may have any name.
        from driftline.alignment.rules.compiler_dumps import narrowed

        plan = narrowed(plan, options.sites, options.ports)
    return plan


def _streamed(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """The plan of two long runs that need no rule but names; None for all others."""
    # Sites and ports only narrow a finished plan. Every other option needs a rule that the
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
        return False  # names are enough, and the trees stay unread
    return keeps_graphs(reference) and keeps_graphs(candidate)


def _by_graph(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """The plan of two dumps of compiled graphs; their node names are better evidence than rules."""
    from driftline.alignment.rules.compiler_dumps import align_graphs, narrowed

    # Graphs know their ranks and steps; only the user's own declarations are applied first.
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
    # A plan lists its pairs in the reference's execution order, whichever rule made them.
    pairs = sorted([*plan.pairs, *graph_plan.pairs], key=lambda pair: execution(pair.reference))
    plan = graph_plan._replace(pairs=tuple(pairs))
    if declared:
        plan = after_matching(plan, seen, options)
    return narrowed(plan, options.sites, options.ports)


class Context:
    """The two runs and the options, as matching rules use them.

    Attributes:
        structural: Whether structure may pair; it needs an execution order, which some dumps lack.
        notes: Sentences about the runs that are added to the plan.
        operators_named: Whether the names of operators have shown their modules. Structure could
            then only guess at the other operators.
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
        """Whether equal names are evidence; computed late, because it may read the dataflow."""
        return not (self.structural and _only_numbered(self.reference, self.candidate, self.notes))


class MatchingRule(NamedTuple):
    """One rule of the matching.

    Attributes:
        name: Name, for readers of this list.
        applies: Whether the rule is tried, given the plan so far.
        place: `file:function`, in `rules`: the function that returns the plan with more pairs, or
            None if it finds none.
        final: Whether no weaker rule is tried if this rule proposes a plan.
    """

    name: str
    applies: Callable[[Plan, Context], bool]
    place: str
    final: bool = False

    def proposed(self, plan: Plan, context: Context) -> Plan | None:
        """Import the rule, and apply it to the plan so far."""
        return Address(f"driftline.alignment.rules.{self.place}").load()(plan, context)


def _match(reference: Run, candidate: Run, options: AlignOptions) -> Plan:
    """Apply the rules, strongest first; each sees what the earlier ones left unpaired."""
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
    plan = plan._replace(notes=(*plan.notes, *context.notes, *_operators_of_lists(plan)))
    return plan if plan.pairs else refuse_unrelated(plan)


_OF_LISTS = ("aten._foreach_", "aten._fused_")
"""Operators with which an optimizer updates all parameters at once."""


def _operators_of_lists(plan: Plan) -> tuple[str, ...]:
    """A note if only one side's optimizer updates its parameters in lists."""
    of_lists = [
        next((r.class_name for r in records if r.class_name.startswith(_OF_LISTS)), "")
        for _, records in plan.unpaired()
    ]
    if bool(of_lists[0]) == bool(of_lists[1]):
        return ()
    side, other = ("reference", "candidate") if of_lists[0] else ("candidate", "reference")
    return (
        f"the optimizer of the {side} computes with lists of tensors (such as "
        f"{of_lists[0] or of_lists[1]}), that of the {other} with single ones, so these "
        "operators have no partner; foreach=False, fused=False in both programs makes them alike",
    )


def _differ_in_width(pair: Pair) -> bool:
    """Whether two inputs of the same name have different numbers of features."""
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
    """Whether both sides have unpaired tensors; otherwise no rule can pair anything."""
    return bool(plan.missing and plan.extra)


def _only_numbered(reference: Run, candidate: Run, notes: list[str]) -> bool:
    """Whether names only number the layers, and the two programs have built different layers.

    Equal names are then accidental: the second `linear` of one program is the third of the other.
    """
    if reference.facts.numbered_names and candidate.facts.numbered_names:
        return set(reference.sites()) != set(candidate.sites())
    if not all(run.records[0].key.site[:1].isdigit() for run in (reference, candidate)):
        return False
    # ATB counts operators (`1_Decoder_layer.2_LinearOperation`), so an additional operator changes
    # every later name, unless one side only captured a part of what the other has.
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
    """Whether layers of the same name differ in number of inputs, so that names mean nothing."""
    inputs = [Counter[str](), Counter[str]()]
    holders: set[str] = set()
    for run, counts in zip((reference, candidate), inputs, strict=True):
        # The first step of the first process is enough, because every step runs the same operators.
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
    # An exported graph is tried after either kind of name: it needs some named pairs to start from,
    # and its own node names are stronger than normalised ones.
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
