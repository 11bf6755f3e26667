"""GE operators against FX nodes: outputs by the names in the graph, inputs by who produced them.

FX numbers its inputs as the Python call had them, scalars included, and GE as its operator wants
them (`addmm(bias, x, w)` becomes `MatMul(x, w, bias)`), so positions alone would pair wrong ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from driftline.alignment.operator_graph import Input, OperatorGraph
from driftline.alignment.operators import Found, Match, Operator, at_slot
from driftline.numerics.dtypes import DTYPES
from driftline.runs.record import Record

Same = Callable[[Record, Record], bool]
"""Whether two tensors of the FX dump hold the same bytes; asked only where shapes leave a doubt."""

CONVERSIONS = ("Cast", "TransData")
IN_ORDER = 0.9
"""Confidence of inputs that only their shape and their order pair."""


def match_fx(
    ge: Mapping[str, Operator], fx: Mapping[str, Operator], graph: OperatorGraph, same: Same
) -> Found:
    """Pair the tensors of GE operators (ours) with those of FX nodes (theirs)."""
    found = Found([], {}, {})
    for operator in ge.values():
        members = graph.members(operator.name)
        if not members:
            _say(found, operator.records, _unknown(operator))
            continue
        _inputs(operator, members, fx, graph, same, found)
        _outputs(operator, members, fx, graph, found)
        if len(members) > 1:
            _say_inside(operator, members, fx, graph, found)
    for node in fx.values():
        for record in node.records:
            found.theirs.setdefault(record.key, "no tensor of the GE dump stands for it")
    return found


def _say_inside(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    found: Found,
) -> None:
    for node in (fx.get(graph.owner(name)) for name in members):
        for record in node.records if node is not None else ():
            found.theirs.setdefault(record.key, f"inside the fused operator {operator.name}")


def _unknown(operator: Operator) -> str:
    if is_conversion(operator.class_name):
        return "a conversion that the compiler put in; FX has no such node"
    return "the graph has no operator of this name"


def is_conversion(class_name: str) -> bool:
    """Whether an operator only changes type or layout, so that its output should be its input."""
    return any(word in class_name for word in CONVERSIONS)


def _say(found: Found, records: Sequence[Record], why: str) -> None:
    for record in records:
        found.ours.setdefault(record.key, why)


def _outputs(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    found: Found,
) -> None:
    made = [(members[-1], output) for output in range(len(operator.outputs))]
    if len(members) > 1:
        seen = graph.outputs_of(members)
        made = seen if len(seen) == len(operator.outputs) else made
    for record, tensor in zip(operator.outputs, made, strict=True):
        name = graph.fx_tensor(tensor)
        if name is None:
            _say(found, [record], "no FX tensor stands for it")
            continue
        node = fx.get(name[0])
        partner = at_slot(node.outputs, name[1]) if node is not None else None
        if partner is None:
            _say(found, [record], f"the FX dump has no output {name[1]} of {name[0]}")
        else:
            found.matches.append(Match(record, partner))


def _inputs(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    same: Same,
    found: Found,
) -> None:
    read = graph.inputs_of(members, len(operator.inputs))
    known = len(read) == len(operator.inputs)
    places: list[Input | None] = list(read) if known else [None] * len(operator.inputs)
    wanted: dict[str, list[tuple[Record, Input | None]]] = defaultdict(list)
    first = next((owner for name in members if (owner := graph.owner(name))), "")
    for record, place in zip(operator.inputs, places, strict=True):
        owner = graph.owner(place.node) if place is not None else first
        if place is not None and graph.is_inner(place.source, owner):
            why = f"a step on the way to {owner}" if owner else "no FX node reads it"
            _say(found, [record], f"{why}; FX has no such tensor")
        elif owner not in fx:
            _say(found, [record], f"the FX dump has no node {owner}" if owner else "of no FX node")
        else:
            wanted[owner].append((record, place))
    for owner, takers in wanted.items():
        _assign(takers, fx[owner].inputs, fx, graph, same, found)


def _assign(
    takers: list[tuple[Record, Input | None]],
    offered: list[Record],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    same: Same,
    found: Found,
) -> None:
    """Give each GE input one of an FX node's inputs, those of known producers first."""
    free = list(offered)
    chosen: dict[int, Match] = {}
    for at, (record, place) in enumerate(takers):
        made = _made_by(place, fx, graph)
        if made is None:
            continue
        alike = [one for one in free if (one.shape, one.dtype) == (made.shape, made.dtype)]
        if len(alike) > 1:
            alike = [one for one in alike if same(one, made)]
        if alike:
            chosen[at] = Match(record, alike[0])
            free.remove(alike[0])
    left = list(free)
    for at, (record, _) in enumerate(takers):
        if at not in chosen:
            partner = next((one for one in free if _alike(one, record)), None)
            if partner is None:
                _say(found, [record], "no FX input of this shape is left for it")
                continue
            others = sum(_alike(one, record) for one in left)
            chosen[at] = Match(record, partner, 1.0 if others == 1 else IN_ORDER)
            free.remove(partner)
    found.matches.extend(chosen[at] for at in sorted(chosen))
    for one in free:
        found.theirs.setdefault(one.key, "an argument of the FX call that GE has no input for")


def _made_by(
    place: Input | None, fx: Mapping[str, Operator], graph: OperatorGraph
) -> Record | None:
    """The FX tensor that the producer of a GE input stands for."""
    name = graph.fx_tensor(place.source) if place is not None else None
    node = fx.get(name[0]) if name is not None else None
    return at_slot(node.outputs, name[1]) if node is not None and name is not None else None


def _alike(offered: Record, record: Record) -> bool:
    """Same shape, and numbers of one kind: a weight is no index."""
    ours, theirs = DTYPES.get(record.dtype), DTYPES.get(offered.dtype)
    if ours is None or theirs is None:
        return False
    kinds = {"uint": "int"}
    return offered.shape == record.shape and (
        kinds.get(ours.kind, ours.kind) == kinds.get(theirs.kind, theirs.kind)
    )
