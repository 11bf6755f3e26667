"""Entry point of alignment: two runs and the user's options become one plan.

Rules are tried strongest first, and each rule sees only the tensors that stronger rules left
unpaired. A rule is imported when it is needed, so runs whose names agree do not pay for the others.
Rules do not know each other. Tensor values are read only to break a tie, and to see which operator
feeds which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

from driftline.alignment.normalise.pipeline import (
    Views,
    after_matching,
    before_matching,
    is_compiled,
    keeps_graphs,
)
from driftline.alignment.plan import Pair, Plan, Rule, execution
from driftline.alignment.rules.names import nothing_in_common, pair_by_name, select
from driftline.errors import BadInput
from driftline.runs.records import Record
from driftline.runs.run import Run

LONG = 4_000
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
            raise BadInput(f"run '{run.name}' holds no tensor", hint="was anything captured?")
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
        plan = _by_map(plan, options)
    graph_plan = align_graphs(seen.reference, seen.candidate, plan.missing, plan.extra)
    if graph_plan is None:
        return None
    # A plan lists its pairs as the reference executed them, whichever rule made them.
    pairs = sorted([*plan.pairs, *graph_plan.pairs], key=lambda pair: execution(pair.reference))
    plan = graph_plan._replace(pairs=tuple(pairs))
    if declared:
        plan = after_matching(plan, seen, options)
    return narrowed(plan, options.sites, options.ports)


class _Context:
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
        propose: The plan with more pairs; None if the rule has nothing to say.
        final: If the rule proposes a plan, no weaker rule is asked.
    """

    name: str
    applies: Callable[[Plan, _Context], bool]
    propose: Callable[[Plan, _Context], Plan | None]
    final: bool = False


def _match(reference: Run, candidate: Run, options: AlignOptions) -> Plan:
    """Apply the rules, strongest first; each sees what the ones before left unpaired."""
    context = _Context(reference, candidate, options)
    plan = Plan((), tuple(reference.records), tuple(candidate.records))
    for rule in RULES:
        proposed = rule.propose(plan, context) if rule.applies(plan, context) else None
        if proposed is not None:
            plan = proposed
            if rule.final:
                return plan
    if any(_differ_in_width(pair) for pair in plan.pairs):
        from driftline.alignment.normalise.residuals import reassign_inputs, release_wider

        plan = release_wider(reassign_inputs(plan))
    plan = plan._replace(notes=(*plan.notes, *context.notes))
    return plan if plan.pairs else _refuse_unrelated(plan)


def _differ_in_width(pair: Pair) -> bool:
    """Whether two inputs of one name have another number of features."""
    widths = pair.reference.shape[-1:], pair.candidate.shape[-1:]
    return pair.reference.key.port == "input" and widths[0] != widths[1]


def _has_map(plan: Plan, context: _Context) -> bool:
    del plan
    return bool(context.options.maps) or context.options.mapping_file is not None


def _has_compiled_graphs(plan: Plan, context: _Context) -> bool:
    del plan
    return is_compiled(context.reference) or is_compiled(context.candidate)


def _names_apply(plan: Plan, context: _Context) -> bool:
    del plan
    return context.names_count


def _more_names_apply(plan: Plan, context: _Context) -> bool:
    return context.names_count and _both_have_more(plan)


def _order_applies(plan: Plan, context: _Context) -> bool:
    return context.structural and _both_have_more(plan)


def _structure_applies(plan: Plan, context: _Context) -> bool:
    return context.structural and bool(plan.missing or plan.extra)


def _guesses_apply(plan: Plan, context: _Context) -> bool:
    return _structure_applies(plan, context) and not context.operators_named


def _projections_apply(plan: Plan, context: _Context) -> bool:
    return context.options.structural and bool(plan.pairs) and _both_have_more(plan)


def _by_user_map(plan: Plan, context: _Context) -> Plan:
    return _by_map(plan, context.options)


def _by_name(plan: Plan, context: _Context) -> Plan:
    del context
    by_name = pair_by_name(plan.missing, plan.extra)
    return _with_pairs(plan, by_name.pairs, by_name) if plan.pairs else by_name


def _by_compiled_graphs(plan: Plan, context: _Context) -> Plan:
    """Pairs by the calls that a compiler lists, with the program lines they come from."""
    from driftline.alignment.annotate.compiled_graphs import with_lines
    from driftline.alignment.rules.exported import with_calls
    from driftline.alignment.rules.operator_calls import align_compiled
    from driftline.alignment.sites.compiled_graphs import graphs_of

    graphs = graphs_of(context.reference), graphs_of(context.candidate)
    plan = with_calls(align_compiled(*graphs, plan), context.reference, context.candidate)
    return with_lines(plan, *graphs) if plan.pairs else _refuse_unrelated(plan)


def _by_operators(plan: Plan, context: _Context) -> Plan | None:
    """Pairs of modules with the operators that ran in them, by the names of these."""
    from driftline.alignment.rules.module_operators import (
        names_modules,
        pair_modules_with_operators,
    )

    runs = context.reference, context.candidate
    context.operators_named = names_modules(*runs) or names_modules(*reversed(runs))
    pairs = pair_modules_with_operators(plan, *runs) if context.operators_named else []
    return _with_pairs(plan, pairs) if pairs else None


def _both_have_more(plan: Plan) -> bool:
    """Whether both sides still have unpaired tensors: else no rule has anything to pair."""
    return bool(plan.missing and plan.extra)


def _refuse_unrelated(plan: Plan) -> NoReturn:
    """Say that the two runs have nothing in common, and what was tried."""
    trouble = nothing_in_common(plan.missing, plan.extra)
    if tried := next(iter((*plan.notes, *plan.reasons.values())), ""):
        message = f"{trouble}; structure cannot tell them apart either: {tried}"
        raise BadInput(message, hint=f"{trouble.hint}; --map says which site is which")
    raise trouble


def _by_export(plan: Plan, context: _Context) -> Plan | None:
    """Pairs of an exported graph whose names fit."""
    from driftline.alignment.rules.exported import align_exported

    return align_exported(plan, context.reference, context.candidate)


def _by_export_order(plan: Plan, context: _Context) -> Plan | None:
    """Pairs of an exported graph whose names do not fit: layers with weights, in order."""
    from driftline.alignment.rules.exported import align_exported

    return align_exported(plan, context.reference, context.candidate, structural=True)


def _by_projections(plan: Plan, context: _Context) -> Plan | None:
    """Pairs of fused parameters (`in_proj_weight`) with separate ones."""
    del context
    from driftline.alignment.rules.fused_projections import pair_in_projections

    projections = pair_in_projections(plan)
    return _without_reasons(_with_pairs(plan, projections)) if projections else None


def _by_structure(plan: Plan, context: _Context) -> Plan:
    from driftline.alignment.rules.accidental_names import in_doubt, still_alone

    # Names that agree may still be accidents: such pairs are released, and structure decides
    # them again.
    doubted = in_doubt(plan.pairs, plan.missing, plan.extra)
    if not doubted and not (plan.missing and plan.extra):
        return plan
    if doubted:
        loose = {id(pair) for pair in doubted}
        kept = tuple(pair for pair in plan.pairs if id(pair) not in loose)
        missing = sorted([*plan.missing, *(pair.reference for pair in doubted)], key=execution)
        extra = sorted([*plan.extra, *(pair.candidate for pair in doubted)], key=execution)
        plan = plan._replace(pairs=kept, missing=tuple(missing), extra=tuple(extra))
    from driftline.alignment.rules.structure import align_by_structure

    structural = align_by_structure(
        context.reference,
        context.candidate,
        plan.pairs,
        plan.missing,
        plan.extra,
        _same_class(context.options.mapping_file),
    )
    again = still_alone(doubted, structural.pairs)
    notes = structural.notes
    # Released pairs that structure has not made again were accidents; the user is told which
    # rule decided.
    moved = {(p.reference.key.site, p.candidate.key.site) for p in doubted}
    moved -= {(p.reference.key.site, p.candidate.key.site) for p in (*again, *structural.pairs)}
    if moved:
        notes = [
            *notes,
            f"the names of {len(moved)} sites agree by accident (such as '{min(moved)[0]}'): they "
            "do other work or are in another place, so structure decides; --map overrides it",
        ]
    plan = _with_pairs(plan, [*structural.pairs, *again])
    least, most = sorted((len(plan.missing), len(plan.extra)))
    # Half as many tensors without partner as pairs: more likely two models than two runs of
    # one.
    if 2 * least > len(plan.pairs) > 0:
        notes = [
            *notes,
            f"many tensors have no partner ({least} and {most} on the two sides, {len(plan.pairs)} "
            "pairs): are these runs of one model?",
        ]
    # A reason is kept only for a tensor that is still unpaired after the released pairs came
    # back.
    reasons = {
        (side, record.key): structural.reasons[side, record.key]
        for side, records in _unpaired(plan)
        for record in records
        if (side, record.key) in structural.reasons
    }
    return plan._replace(reasons=reasons, notes=(*plan.notes, *notes))


def _passed_on(plan: Plan, context: _Context) -> Plan:
    """The plan with pairs for unpaired sites that return their input, such as dropouts."""
    if not plan.pairs or not (plan.missing or plan.extra):
        return plan
    from driftline.alignment.rules.same_value import pair_passed

    passed = pair_passed(plan, context.reference, context.candidate)
    if not passed:
        return plan
    return _without_reasons(_with_pairs(plan, passed))


def _without_reasons(plan: Plan) -> Plan:
    """The plan with reasons only for tensors that are still unpaired."""
    alone = {(side, r.key) for side, left in _unpaired(plan) for r in left}
    return plan._replace(
        reasons={tensor: why for tensor, why in plan.reasons.items() if tensor in alone}
    )


def _unpaired(plan: Plan) -> tuple[tuple[str, Sequence[Record]], ...]:
    return ("reference", plan.missing), ("candidate", plan.extra)


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


def _same_class(mapping: Path | None) -> list[tuple[str, str]]:
    if mapping is None:
        return []
    from driftline.alignment.rules.maps import read_mapping

    return [(link.left, link.right) for link in read_mapping(mapping).classes]


def _by_map(plan: Plan, options: AlignOptions) -> Plan:
    from driftline.alignment.rules.maps import link_sites, parse_map, read_mapping

    maps = [parse_map(text) for text in options.maps]
    mapping = None if options.mapping_file is None else read_mapping(options.mapping_file)
    if mapping is not None:
        # Maps of the command line come first, so that they win over those of the file.
        maps += mapping.sites
    sites = [{record.key.site for record in side} for side in (plan.missing, plan.extra)]
    links = link_sites(maps, (record.key.site for record in plan.missing), sites[1])
    return _with_pairs(plan, _of_sites(plan, links, "map", 1.0))


def _by_class_map(plan: Plan, context: _Context) -> Plan | None:
    """Pairs of mapped classes for what structure has left alone.

    A map of classes says which classes do the same work; who does whose work is a question of
    structure, which has been asked by now. Order alone decides only where nothing better is known.
    """
    from driftline.alignment.rules.maps import link_classes, read_mapping, unmatched

    path = context.options.mapping_file
    classes = () if path is None else read_mapping(path).classes
    if not classes:
        return None
    notes = unmatched(classes, context.reference.records, context.candidate.records)
    context.notes.extend(f"{path}: {note}" for note in notes)
    # Without an order of execution on both sides the nth of one need not be the nth of the other.
    runs = (context.reference, context.candidate)
    if context.structural and any(run.facts.order != "execution" for run in runs):
        return None
    linked = link_classes(classes, plan.missing, plan.extra)
    pairs = [Pair(reference, candidate, "map") for reference, candidate in linked]
    return _without_reasons(_with_pairs(plan, pairs)) if pairs else None


def _by_plain_name(plan: Plan, context: _Context) -> Plan:
    del context
    from driftline.alignment.rules.names import link_names

    # A site that has a pair by its full name keeps it; only whole sites are renamed.
    paired_reference = {pair.reference.key.site for pair in plan.pairs}
    paired_candidate = {pair.candidate.key.site for pair in plan.pairs}
    links = link_names(
        dict.fromkeys(r.key.site for r in plan.missing if r.key.site not in paired_reference),
        dict.fromkeys(r.key.site for r in plan.extra if r.key.site not in paired_candidate),
    )
    return _with_pairs(plan, _of_sites(plan, links, "normalised", 0.95)) if links else plan


def _of_sites(plan: Plan, links: dict[str, str], by: Rule, confidence: float) -> list[Pair]:
    """Pairs of the tensors of sites that belong together, call by call."""
    from driftline.alignment.sites.tensors import pair_tensors

    reference_calls: dict[tuple[object, ...], list[Record]] = {}
    candidate_calls: dict[tuple[object, ...], list[Record]] = {}
    for side, records, name in (
        (reference_calls, plan.missing, links.get),
        (candidate_calls, plan.extra, {site: site for site in links.values()}.get),
    ):
        for record in records:
            key = record.key
            if (site := name(key.site)) is not None:
                call = (key.rank, key.process, key.step, site, key.visit)
                side.setdefault(call, []).append(record)
    return [
        Pair(reference, candidate, by, confidence)
        for call, records in reference_calls.items()
        for reference, candidate in pair_tensors(records, candidate_calls.get(call, []))
    ]


def _with_pairs(plan: Plan, pairs: Sequence[Pair], rest: Plan | None = None) -> Plan:
    """A plan with more pairs, and the tensors that are then still unpaired."""
    more = plan.with_pairs(pairs)
    return more if rest is None else more._replace(missing=rest.missing, extra=rest.extra)


RULES: tuple[MatchingRule, ...] = (
    MatchingRule("map", _has_map, _by_user_map),
    # Compiled graphs end the matching: a tensor that they leave unpaired has no partner.
    MatchingRule("compiled calls", _has_compiled_graphs, _by_compiled_graphs, final=True),
    MatchingRule("name", _names_apply, _by_name),
    MatchingRule("operators of modules", _order_applies, _by_operators),
    # An exported graph is asked after either kind of name: it needs some named pairs to start
    # from, and its own node names are stronger than normalised ones.
    MatchingRule("exported names", _more_names_apply, _by_export, final=True),
    MatchingRule("normalised name", _more_names_apply, _by_plain_name),
    MatchingRule("exported names", _more_names_apply, _by_export, final=True),
    MatchingRule("exported order", _order_applies, _by_export_order, final=True),
    MatchingRule("structure", _guesses_apply, _by_structure),
    MatchingRule("same value", _structure_applies, _passed_on),
    MatchingRule("fused parameters", _projections_apply, _by_projections),
    MatchingRule("map of classes", _has_map, _by_class_map),
)
"""The matching rules, strongest first. A new rule is a function in `rules` and a line here."""
