"""The door to alignment: two runs and what the user said become one plan.

Rules are tried strongest first; each sees only what the stronger ones left over. What is not needed
is not imported: runs whose names agree never pay for the rest. No rule knows another; values are
read where they break a tie, and where bytes say who feeds whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from driftline.alignment.normalise.pipeline import (
    Seen,
    after_matching,
    before_matching,
    is_compiled,
    keeps_graphs,
)
from driftline.alignment.plan import Pair, Plan, Rule
from driftline.alignment.rules.names import nothing_in_common, pair_by_name, select
from driftline.errors import BadInput
from driftline.runs.records import Record
from driftline.runs.run import Run

LONG = 4_000
"""Tensors of each side from which on it is tried to pair them without holding them."""
UNMASKED = "none"
"""In place of a mask: pads count, whatever was captured."""


class AlignOptions(NamedTuple):
    """What the user said about how two runs belong together.

    Attributes:
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, globs whose stars stand for the same text on both sides.
        mapping_file: A file (or the folder of an `op_mapping_file.json`) that says the same.
        plan_file: A saved, perhaps edited, plan; it wins over every rule.
        structural: Whether what names leave over may be paired by class, shape and dataflow.
        placements: `SITE=shard(1)`: how tensors lie over ranks.
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
    """Say which tensor of one run belongs to which of the other.

    Raises:
        DriftlineError: A run without tensors, a glob that matches nothing, a map or plan that
            cannot be read, or two runs that have nothing in common.
    """
    for run in (reference, candidate):
        if not len(run):
            raise BadInput(f"run '{run.name}' holds no tensor", hint="was anything captured?")
    if options.plan_file is not None:
        from driftline.alignment.plan_file import saved_plan

        compiled = is_compiled(reference) or is_compiled(candidate)
        plan = saved_plan(options.plan_file, reference, candidate, compiled=compiled)
        if options.masks:
            from driftline.alignment.reconcile.masks import masked

            plan = masked(plan, reference, candidate, options.masks)
        return plan
    if (plan := _alike(reference, candidate, options)) is not None:
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


def _alike(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """Long runs that need no rule but names; None for all others."""
    plain = options._replace(sites=(), ports=(), structural=True) == AlignOptions()
    if not plain or min(len(reference), len(candidate)) < LONG:
        return None
    from driftline.alignment.streaming import plan_alike, selected

    plan = plan_alike(reference, candidate)
    if plan is not None and (options.sites or options.ports):
        return selected(plan, options.sites, options.ports)
    return plan


def _has_graphs(reference: Run, candidate: Run) -> bool:
    """Whether both sides left the graph of a compiler, as a dump or, converted, in their tree."""
    if all("graphs" in run.manifest for run in (reference, candidate)):
        return True
    if set(reference.sites()) == set(candidate.sites()):
        return False  # names say it all, and the trees stay unread
    return keeps_graphs(reference) and keeps_graphs(candidate)


def _by_graph(reference: Run, candidate: Run, options: AlignOptions) -> Plan | None:
    """Two dumps of compiled graphs, whose own names say more than all other rules."""
    from driftline.alignment.rules.compiler_dumps import align_graphs, narrowed

    # The graphs know their ranks and steps; only what the user says about them is done first.
    said = bool(options.placements or options.step_map or options.masks)
    seen = before_matching(reference, candidate, options) if said else Seen(reference, candidate)
    plan = Plan((), tuple(seen.reference.records), tuple(seen.candidate.records))
    if options.maps or options.mapping_file is not None:
        plan = _by_map(plan, options)
    found = align_graphs(seen.reference, seen.candidate, plan.missing, plan.extra)
    if found is None:
        return None
    together = sorted([*plan.pairs, *found.pairs], key=lambda pair: _execution(pair.reference))
    plan = found._replace(pairs=tuple(together))
    if said:
        plan = after_matching(plan, seen, options)
    return narrowed(plan, options.sites, options.ports)


def _match(reference: Run, candidate: Run, options: AlignOptions) -> Plan:
    """The rules, strongest first; each sees what the ones before left over."""
    plan = Plan((), tuple(reference.records), tuple(candidate.records))
    if options.maps or options.mapping_file is not None:
        plan = _by_map(plan, options)
    if is_compiled(reference) or is_compiled(candidate):
        from driftline.alignment.annotate.compiled_graphs import with_lines
        from driftline.alignment.rules.operator_calls import align_compiled
        from driftline.alignment.sites.compiled_graphs import graphs_of

        graphs = graphs_of(reference), graphs_of(candidate)
        plan = _by_calls(align_compiled(*graphs, plan), reference, candidate)
        return with_lines(plan, *graphs) if plan.pairs else _in_common(plan)
    ordered = reference.ordered and candidate.ordered
    notes: list[str] = []
    if not (options.structural and ordered and _only_numbered(reference, candidate, notes)):
        by_name = pair_by_name(plan.missing, plan.extra)
        plan = _more(plan, by_name.pairs, by_name) if plan.pairs else by_name
        if plan.missing and plan.extra and (found := _by_export(plan, reference, candidate)):
            return found
        if plan.missing and plan.extra:
            plan = _by_plain_name(plan)
            if plan.missing and plan.extra and (found := _by_export(plan, reference, candidate)):
                return found
    if (
        plan.missing
        and plan.extra
        and options.structural
        and ordered
        and (found := _by_export(plan, reference, candidate, structural=True))
    ):
        return found
    if (plan.missing or plan.extra) and options.structural and ordered:
        plan = _by_structure(plan, reference, candidate, options)
        plan = _passed_on(plan, reference, candidate)
    if plan.pairs and plan.missing and plan.extra and options.structural:
        from driftline.alignment.rules.fused_projections import pair_in_projections

        if found := pair_in_projections(plan):
            plan = _without_reasons(_more(plan, found))
    plan = plan._replace(notes=(*plan.notes, *notes))
    return plan if plan.pairs else _in_common(plan)


def _in_common(plan: Plan) -> NoReturn:
    trouble = nothing_in_common(plan.missing, plan.extra)
    if tried := next(iter((*plan.notes, *plan.reasons.values())), ""):
        said = f"{trouble}; structure tells none apart either: {tried}"
        raise BadInput(said, hint=f"{trouble.hint}; --map says which site is which")
    raise trouble


def _by_calls(plan: Plan, reference: Run, candidate: Run) -> Plan:
    from driftline.alignment.rules.exported import with_calls

    return with_calls(plan, reference, candidate)


def _by_export(
    plan: Plan, reference: Run, candidate: Run, *, structural: bool = False
) -> Plan | None:
    from driftline.alignment.rules.exported import align_exported

    return align_exported(plan, reference, candidate, structural=structural)


def _by_structure(plan: Plan, reference: Run, candidate: Run, options: AlignOptions) -> Plan:
    from driftline.alignment.rules.accidental_names import in_doubt, still_alone

    doubted = in_doubt(plan.pairs, plan.missing, plan.extra)
    if not doubted and not (plan.missing and plan.extra):
        return plan
    if doubted:
        loose = {id(pair) for pair in doubted}
        kept = tuple(pair for pair in plan.pairs if id(pair) not in loose)
        missing = sorted([*plan.missing, *(pair.reference for pair in doubted)], key=_execution)
        extra = sorted([*plan.extra, *(pair.candidate for pair in doubted)], key=_execution)
        plan = plan._replace(pairs=kept, missing=tuple(missing), extra=tuple(extra))
    from driftline.alignment.rules.structure import align_by_structure

    found = align_by_structure(
        reference,
        candidate,
        plan.pairs,
        plan.missing,
        plan.extra,
        _same_class(options.mapping_file),
    )
    again = still_alone(doubted, found.pairs)
    notes = found.notes
    moved = {(p.reference.key.site, p.candidate.key.site) for p in doubted}
    moved -= {(p.reference.key.site, p.candidate.key.site) for p in (*again, *found.pairs)}
    if moved:
        notes = [
            *notes,
            f"the names of {len(moved)} sites agree by accident (such as '{min(moved)[0]}'): they "
            "do other work or stand in another place, so structure decides; --map overrides it",
        ]
    plan = _more(plan, [*found.pairs, *again])
    least, most = sorted((len(plan.missing), len(plan.extra)))
    if 2 * least > len(plan.pairs) > 0:
        notes = [
            *notes,
            f"many tensors have no partner ({least} and {most} on the two sides, {len(plan.pairs)} "
            "pairs): are these runs of one model?",
        ]
    reasons = {
        (side, record.key): found.reasons[side, record.key]
        for side, records in _left(plan)
        for record in records
        if (side, record.key) in found.reasons
    }
    return plan._replace(reasons=reasons, notes=(*plan.notes, *notes))


def _passed_on(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """With pairs for lone sites that give on what they were given, such as dropouts."""
    if not plan.pairs or not (plan.missing or plan.extra):
        return plan
    from driftline.alignment.rules.same_value import pair_passed

    found = pair_passed(plan, reference, candidate)
    if not found:
        return plan
    return _without_reasons(_more(plan, found))


def _without_reasons(plan: Plan) -> Plan:
    """The plan with reasons for those only that are still alone."""
    alone = {(side, r.key) for side, left in _left(plan) for r in left}
    return plan._replace(reasons={at: why for at, why in plan.reasons.items() if at in alone})


def _left(plan: Plan) -> tuple[tuple[str, Sequence[Record]], ...]:
    return ("reference", plan.missing), ("candidate", plan.extra)


def _only_numbered(reference: Run, candidate: Run, notes: list[str]) -> bool:
    """Whether layers are numbered as their program built them, and the two built different ones.

    Equal names are then as good as accidents: the second `linear` of one is the third of the other.
    """
    if reference.facts.numbered_names and candidate.facts.numbered_names:
        return set(reference.sites()) != set(candidate.sites())
    if not all(run.records[0].key.site[:1].isdigit() for run in (reference, candidate)):
        return False
    # ATB counts operators (`1_Decoder_layer.2_LinearOperation`): one more, and every name after it
    # means another one, unless one side only has a part of what the other has.
    ours, theirs = set(reference.sites()), set(candidate.sites())
    every = ours | theirs
    counted = sum(site.partition("_")[0].isdigit() for site in every) > 0.9 * len(every)
    if not counted or not (ours <= theirs or theirs <= ours):
        return counted
    if _takes_others(reference, candidate):
        return True
    from driftline.alignment.sites.roles import rewired

    if site := rewired(reference, candidate):
        notes.append(
            f"operators of the same number are used differently (such as '{site}'), so what feeds "
            "what decides, not the number; --no-structure overrides it"
        )
    return bool(site)


def _takes_others(reference: Run, candidate: Run) -> bool:
    """Whether a layer takes other inputs than that of the same name: their numbers mean nothing."""
    inputs = [Counter[str](), Counter[str]()]
    holders: set[str] = set()
    for run, counts in zip((reference, candidate), inputs, strict=True):
        first = run.records[0].key
        for record in run.records:
            key = record.key
            if (key.rank, key.process, key.step) != (first.rank, first.process, first.step):
                continue
            if key.port == "input" and key.moment == "before":
                counts[key.site] += 1
            holders.add(key.site.rpartition(".")[0])
    both = inputs[0].keys() & inputs[1].keys() & holders
    return any(inputs[0][site] != inputs[1][site] for site in both)


def _same_class(mapping: Path | None) -> list[tuple[str, str]]:
    if mapping is None:
        return []
    from driftline.alignment.rules.maps import read_mapping

    return [(each.left, each.right) for each in read_mapping(mapping).classes]


def _by_map(plan: Plan, options: AlignOptions) -> Plan:
    from driftline.alignment.rules.maps import link_classes, link_sites, parse_map, read_mapping

    maps = [parse_map(text) for text in options.maps]
    said = None if options.mapping_file is None else read_mapping(options.mapping_file)
    if said is not None:
        maps += said.sites
    sites = [{record.key.site for record in side} for side in (plan.missing, plan.extra)]
    links = link_sites(maps, (record.key.site for record in plan.missing), sites[1])
    plan = _more(plan, _of_sites(plan, links, "map", 1.0))
    if said is not None and said.classes:
        found = link_classes(said.classes, plan.missing, plan.extra)
        plan = _more(plan, [Pair(ours, theirs, "map") for ours, theirs in found])
    return plan


def _by_plain_name(plan: Plan) -> Plan:
    from driftline.alignment.rules.names import link_names

    known = {pair.reference.key.site for pair in plan.pairs}
    taken = {pair.candidate.key.site for pair in plan.pairs}
    links = link_names(
        dict.fromkeys(r.key.site for r in plan.missing if r.key.site not in known),
        dict.fromkeys(r.key.site for r in plan.extra if r.key.site not in taken),
    )
    return _more(plan, _of_sites(plan, links, "normalised", 0.95)) if links else plan


def _of_sites(plan: Plan, links: dict[str, str], by: Rule, confidence: float) -> list[Pair]:
    """Pairs of the tensors of sites that belong together, call by call."""
    from driftline.alignment.sites.tensors import pair_tensors

    here: dict[tuple[object, ...], list[Record]] = {}
    there: dict[tuple[object, ...], list[Record]] = {}
    for side, records, name in (
        (here, plan.missing, links.get),
        (there, plan.extra, {site: site for site in links.values()}.get),
    ):
        for record in records:
            key = record.key
            if (site := name(key.site)) is not None:
                call = (key.rank, key.process, key.step, site, key.visit)
                side.setdefault(call, []).append(record)
    return [
        Pair(ours, theirs, by, confidence)
        for call, records in here.items()
        for ours, theirs in pair_tensors(records, there.get(call, []))
    ]


def _more(plan: Plan, pairs: Sequence[Pair], rest: Plan | None = None) -> Plan:
    """A plan with more pairs, and what is then still alone."""
    more = plan.with_pairs(pairs)
    return more if rest is None else more._replace(missing=rest.missing, extra=rest.extra)


def _execution(record: Record) -> tuple[int, int, int]:
    return (record.key.rank, record.key.process, record.order)
