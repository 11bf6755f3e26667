"""A GE dump with fused operators against one without: a fused operator is what it replaced.

Its inputs are those of its members that no member made, its outputs those that somebody else reads.
Operators of one name are pairs as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from driftline.alignment.operator_graph import OperatorGraph
from driftline.alignment.operators import Found, Match, Operator, at_slot
from driftline.runs.record import Record

WITHOUT_EDGES = 0.7
"""Confidence where no graph says who reads whom, and only shape and order are left."""


def match_fused(
    ours: Mapping[str, Operator], theirs: Mapping[str, Operator], graph: OperatorGraph
) -> Found:
    """Pair the tensors of two GE dumps, either of which may have operators fused.

    Args:
        ours: Operators of one side, by name.
        theirs: Those of the other.
        graph: Whichever side's graph is known.
    """
    found = Found([], {}, {})
    reverse = Found([], {}, {})
    for operator in ours.values():
        twin = theirs.get(operator.name)
        if twin is not None:
            _same_name(operator, twin, found)
        else:
            _fused(operator, theirs, graph, found)
    for operator in theirs.values():
        if operator.name not in ours:
            _fused(operator, ours, graph, reverse)
    found.matches.extend(
        match._replace(ours=match.theirs, theirs=match.ours) for match in reverse.matches
    )
    # What is inside a fused operator of the other side has no twin there, which says less.
    found.ours.update(reverse.theirs)
    found.theirs.update({key: why for key, why in reverse.ours.items() if key not in found.theirs})
    return found


def _same_name(operator: Operator, twin: Operator, found: Found) -> None:
    for here, there in ((operator.inputs, twin.inputs), (operator.outputs, twin.outputs)):
        for record in here:
            partner = at_slot(there, record.key.slot)
            if partner is not None:
                found.matches.append(Match(record, partner, same_name=True))


def _fused(
    operator: Operator, others: Mapping[str, Operator], graph: OperatorGraph, found: Found
) -> None:
    members = graph.members(operator.name, others)
    dumped = [name for name in members if name in others]
    if not dumped or members == [operator.name]:
        for record in operator.records:
            found.ours.setdefault(record.key, "the other dump has no operator of this name")
        return
    known = all(name in graph.nodes for name in members)
    shown = len(operator.inputs)
    inputs, outputs = _ends(members, dumped, others, graph if known else None, shown)
    matched = [
        *_matched(operator.inputs, inputs, known),
        *_matched(operator.outputs, outputs, known),
    ]
    found.matches.extend(matched)
    taken = {match.ours.key for match in matched}
    used = {match.theirs.key for match in matched}
    for record in operator.records:
        if record.key not in taken:
            why = f"no tensor of {', '.join(dumped)} fits it"
            found.ours.setdefault(record.key, why)
    for record in (record for name in dumped for record in others[name].records):
        if record.key not in used:
            found.theirs.setdefault(record.key, f"inside the fused operator {operator.name}")


def _ends(
    members: list[str],
    dumped: list[str],
    others: Mapping[str, Operator],
    graph: OperatorGraph | None,
    shown: int,
) -> tuple[list[Record | None], list[Record | None]]:
    """What goes into and comes out of the members as a whole; None for what was not dumped."""
    if graph is None:
        inputs: list[Record | None] = [one for name in dumped for one in others[name].inputs]
        return inputs, list(others[dumped[-1]].outputs)
    read = [
        at_slot(others[one.node].inputs, str(one.position)) if one.node in others else None
        for one in graph.inputs_of(members, shown)
    ]
    made = [
        at_slot(others[name].outputs, str(output)) if name in others else None
        for name, output in graph.outputs_of(members)
    ]
    return read, made


def _matched(here: list[Record], there: list[Record | None], known: bool) -> list[Match]:
    """One by one where the numbers agree, else the next of the same shape."""
    if known and len(here) == len(there):
        return [Match(one, other) for one, other in zip(here, there, strict=True) if other]
    free = [record for record in there if record is not None]
    found: list[Match] = []
    for record in here:
        partner = next((one for one in free if one.shape == record.shape), None)
        if partner is not None:
            found.append(Match(record, partner, WITHOUT_EDGES))
            free.remove(partner)
    return found
