"""Pairs where a run lists compiled graphs: call by call, and modules by what leaves them.

Two compiled runs are paired by the operator calls their nodes stem from. A run of modules or
operators is paired with a compiled one by module and operator, and by the one node of the right
shape that a module's nodes hand to others. A value that a kernel did not keep has no partner: the
reason says in which fusion it lies. Names of nodes decide nothing: the same name may be another
node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from driftline.alignment.compiled import (
    Found,
    Graphs,
    Match,
    Piece,
    Place,
    Value,
    said_of,
)
from driftline.alignment.compiled_lines import Owners
from driftline.alignment.compiled_modules import NO_NODE, pair_modules, reshaped
from driftline.alignment.names import pair_by_name
from driftline.alignment.plan import Pair, Plan
from driftline.runs.key import TensorKey
from driftline.runs.record import Record

_TAKEN = "what an operator takes; a run of graphs keeps what nodes give"


def align_compiled(here: Owners, there: Owners, plan: Plan) -> Plan:
    """The plan with the pairs that compiled graphs tell, and nothing guessed beyond them.

    Args:
        here: The graphs of the reference, by rank and process; empty if it was not compiled.
        there: Those of the candidate.
        plan: Its lone tensors are paired.
    """
    ours, theirs = _by_owner(plan.missing), _by_owner(plan.extra)
    pairs: list[Pair] = []
    reasons: dict[tuple[str, TensorKey], str] = {}
    notes: list[str] = []
    for mine, other in _owners(list(ours), list(theirs)):
        a, b = here.get(mine), there.get(other)
        left, right = ours[mine], theirs[other]
        by_name = pair_by_name(_others(a, left), _others(b, right))
        pairs += by_name.pairs
        taken = {id(record) for pair in by_name.pairs for record in pair.records}
        left = [record for record in left if id(record) not in taken]
        right = [record for record in right if id(record) not in taken]
        if a is not None and b is not None:
            found = _by_calls(a, b)
        elif b is not None:
            found = _plain(left, b)
        elif a is not None:
            turned = _plain(right, a)
            found = Found(
                [one._replace(ours=one.theirs, theirs=one.ours) for one in turned.matches],
                turned.theirs,
                turned.ours,
            )
        else:
            continue
        free = {id(record) for record in (*left, *right)}
        for match in found.matches:
            if id(match.ours) not in free or id(match.theirs) not in free:
                continue
            first = a is not None and b is None
            pairs.append(
                Pair(
                    match.ours,
                    match.theirs,
                    "graph",
                    match.confidence,
                    reference_recipe=match.recipe if first else None,
                    candidate_recipe=None if first else match.recipe,
                )
            )
        reasons.update({("reference", key): why for key, why in found.ours.items()})
        reasons.update({("candidate", key): why for key, why in found.theirs.items()})
        notes += [*_said("reference", a, found.ours), *_said("candidate", b, found.theirs)]
    together = sorted([*plan.pairs, *pairs], key=lambda pair: _execution(pair.reference))
    paired = {id(record) for pair in pairs for record in pair.records}
    missing = tuple(record for record in plan.missing if id(record) not in paired)
    extra = tuple(record for record in plan.extra if id(record) not in paired)
    alone = {("reference", r.key) for r in missing} | {("candidate", r.key) for r in extra}
    return plan._replace(
        pairs=tuple(together),
        missing=missing,
        extra=extra,
        notes=(*plan.notes, *dict.fromkeys(notes)),
        reasons={**plan.reasons, **{at: why for at, why in reasons.items() if at in alone}},
    )


def _said(side: str, graphs: Graphs | None, alone: Mapping[TensorKey, str]) -> Iterator[str]:
    if graphs is None:
        return
    count = len(graphs.graphs)
    what = f"{count} compiled graph{'' if count == 1 else 's'}"
    if graphs.engine == "fx":
        yield f"the {side} executed {what} node by node, with torch's own operators"
        return
    exact = sum(value.node is not None for value in graphs.values)
    inside = len(graphs.values) - exact
    yield (
        f"the {side} ran inductor's kernels of {what}: {exact} of their results are the value of "
        f"one node, and only those are paired; {inside} lie inside a fusion"
    )


# --- two compiled runs


def _by_calls(a: Graphs, b: Graphs) -> Found:
    found = Found([], {}, {})
    index: dict[tuple[Place, int, int], Value] = {}
    shown: dict[tuple[Place, int, int], Value] = {}
    for value in b.values:
        key = value.record.key
        for node in b.same_elements(value):
            for place in b.places(value.graph, node):
                at = (place, key.step, key.visit)
                (index if node is value.node else shown).setdefault(at, value)
    index = shown | index
    inputs: dict[tuple[Piece, str, tuple[int, ...], int, int], list[Value]] = defaultdict(list)
    for value in b.values:
        if value.node is not None and value.node.target == "placeholder":
            inputs[_input(b, value)].append(value)
    matched: set[int] = set()
    for value in a.values:
        partner = _partner(a, value, index)
        if partner is None and value.node is not None and value.node.target == "placeholder":
            waiting = inputs[_input(a, value)]
            partner = waiting.pop(0) if waiting else None
        if partner is not None:
            matched.add(id(partner.record))
            found.matches.append(
                Match(value.record, partner.record, reshaped(partner.record, value.record.shape))
            )
        elif reason := said_of(value) or _why_alone(a, value, b):
            found.ours[value.record.key] = reason
    for value in b.values:
        if id(value.record) not in matched and (
            reason := said_of(value) or _why_alone(b, value, a)
        ):
            found.theirs[value.record.key] = reason
    return found


def _partner(
    a: Graphs, value: Value, index: Mapping[tuple[Place, int, int], Value]
) -> Value | None:
    key = value.record.key
    for node in a.same_elements(value):
        for place in a.places(value.graph, node):
            partner = index.get((place, key.step, key.visit))
            if partner is not None:
                return partner
    return None


def _input(graphs: Graphs, value: Value) -> tuple[Piece, str, tuple[int, ...], int, int]:
    """Inputs of a graph have no call; those of one piece, phase and shape go in order."""
    key = value.record.key
    return graphs.piece(value.graph), key.phase, value.record.shape, key.step, key.visit


def _why_alone(mine: Graphs, value: Value, other: Graphs) -> str:
    if value.node is None:
        return ""
    for place in mine.places(value.graph, value.node):
        there = other.by_place.get(place)
        if there:
            graph, node = there[-1]
            return other.why_not_kept(graph, node) if other.engine != "fx" else ""
    if value.node.target == "placeholder":
        return "an input of the graph"
    return "the other run's graph has no node for this call: it was replaced or left out"


# --- a compiled run and one of modules or operators


def _plain(records: Sequence[Record], graphs: Graphs) -> Found:
    found = Found([], {}, {})
    matched: set[int] = set()
    for match in (*_operators(records, graphs, found), *pair_modules(records, graphs, found)):
        found.matches.append(match)
        matched.add(id(match.theirs))
        found.ours.pop(match.ours.key, None)
    paired = {match.ours.key for match in found.matches}
    for record in records:
        if record.key.port == "input" and "/" in record.key.site and record.key not in paired:
            found.ours[record.key] = _TAKEN
    for value in graphs.values:
        if id(value.record) not in matched:
            reason = said_of(value) or "the other run has no tensor for this node"
            found.theirs.setdefault(value.record.key, reason)
    return found


def _operators(records: Sequence[Record], graphs: Graphs, found: Found) -> Iterator[Match]:
    calls: dict[tuple[int, str, str, str], dict[int, dict[str, Record]]]
    calls = defaultdict(lambda: defaultdict(dict))
    for record in records:
        module, slash, name = record.key.site.rpartition("/")
        if slash and record.key.port == "output":
            key = (record.key.step, module, name, record.key.phase)
            calls[key][record.key.visit][record.key.slot] = record
            found.ours[record.key] = NO_NODE
    if not calls:
        return
    totals = _totals(graphs)
    times = _executions(graphs)
    once: set[TensorKey] = set()
    shown = [
        (node is not value.node, value, node)
        for value in graphs.values
        for node in graphs.same_elements(value)
    ]
    # Views come last: they stand for an operator of which nothing else was kept.
    for _, value, node in sorted(shown, key=lambda one: one[0]):
        key = value.record.key
        for origin in node.origins:
            name = origin.name
            there = calls.get((key.step, node.module, name, key.phase)) or calls.get(
                (key.step, node.module, f"{name}_", key.phase)
            )
            if not there:
                continue
            pieces = totals[node.module, name, key.phase]
            each = sum(pieces.values())
            ran = times[id(value.graph), key.step]
            if each * ran != max(there) + 1:
                found.theirs[key] = (
                    f"{max(there) + 1} calls of {name} in {node.module} there, "
                    f"{each * ran} here: which is which is not known"
                )
                continue
            mine = graphs.piece(value.graph)
            place = sum(count for piece, count in pieces.items() if piece < mine) + origin.nth
            ours = there.get(key.visit * each + place, {}).get(origin.slot)
            fits = ours is not None and math.prod(ours.shape) == math.prod(value.record.shape)
            if ours is not None and fits and ours.key not in once:
                once.add(ours.key)
                yield Match(ours, value.record, reshaped(value.record, ours.shape))
                break


def _totals(graphs: Graphs) -> dict[tuple[str, str, str], dict[Piece, int]]:
    """By module, operator and phase: how many calls each piece of the program has."""
    found: dict[tuple[str, str, str], dict[Piece, int]] = defaultdict(dict)
    for graph in graphs.graphs:
        for node in graph.nodes:
            for origin in node.origins if node.target != "placeholder" else ():
                key = (node.module, origin.name, node.phase)
                found[key][graphs.piece(graph)] = origin.total
    return found


def _executions(graphs: Graphs) -> dict[tuple[int, int], int]:
    """How often a graph was executed in a step."""
    found: dict[tuple[int, int], int] = {}
    for value in graphs.values:
        at = (id(value.graph), value.record.key.step)
        found[at] = max(found.get(at, 0), value.record.key.visit + 1)
    return found


def _others(graphs: Graphs | None, records: Sequence[Record]) -> Sequence[Record]:
    """What is not the value of a node: modules around compiled regions."""
    if graphs is None:
        return [record for record in records if "/" not in record.key.site]
    values = {value.record.key for value in graphs.values}
    return [record for record in records if record.key not in values]


def _by_owner(records: Sequence[Record]) -> dict[tuple[int, int], list[Record]]:
    found: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        found.setdefault((record.key.rank, record.key.process), []).append(record)
    return found


def _owners(
    ours: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    return [(one, one) for one in ours if one in theirs]


def _execution(record: Record) -> tuple[int, int, int]:
    return (record.key.rank, record.key.process, record.order)
