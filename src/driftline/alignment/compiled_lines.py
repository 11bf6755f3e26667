"""What a compiled graph tells a reader of a row: the program's line, and what a kernel fused.

Adds words to a plan that is made already, and changes no pair. Reads lists of graphs and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from driftline.alignment.compiled import Graphs, Value, is_view
from driftline.alignment.compiled_errors import Culprits
from driftline.alignment.plan import Pair, Plan
from driftline.runs.graphs import GraphNode
from driftline.runs.key import TensorKey

Owners = Mapping[tuple[int, int], Graphs]
_NOT_COMPUTED = ("placeholder", "get_attr", "getitem")


def with_lines(plan: Plan, reference: Owners, candidate: Owners) -> Plan:
    """The plan whose pairs and lone tensors know their lines, and pairs what was fused.

    Args:
        plan: What was set against what.
        reference: The graphs of the one run, by rank and process; empty if it was not compiled.
        candidate: The graphs of the other.
    """
    ours, theirs = _values(reference), _values(candidate)
    lone: dict[tuple[str, TensorKey], str] = {}
    for side, records, values in (
        ("reference", plan.missing, ours),
        ("candidate", plan.extra, theirs),
    ):
        for record in records:
            if line := _line(values.get(record.key)):
                lone[side, record.key] = line
    return plan._replace(
        pairs=tuple(_with_line(pair, ours, theirs) for pair in plan.pairs), lone_lines=lone
    )


class _Told(NamedTuple):
    """A value, the graphs that tell about it, and what is known to be off in them."""

    graphs: Graphs
    value: Value
    culprits: Culprits


def _values(owners: Owners) -> dict[TensorKey, _Told]:
    found: dict[TensorKey, _Told] = {}
    for graphs in owners.values():
        culprits = Culprits(graphs, graphs.errors)
        for value in graphs.values:
            found[value.record.key] = _Told(graphs, value, culprits)
    return found


def _with_line(
    pair: Pair, ours: Mapping[TensorKey, _Told], theirs: Mapping[TensorKey, _Told]
) -> Pair:
    here, there = ours.get(pair.reference.key), theirs.get(pair.candidate.key)
    line = _line(here) or _line(there)
    fused = _fused(there) or _fused(here)
    culprit = next(
        (said for one in (there, here) if one and (said := one.culprits.of(one.value))), ""
    )
    if line or fused or culprit:
        return pair._replace(line=line, fused=fused, culprit=culprit)
    return pair


def _line(told: _Told | None) -> str:
    """The line of the node; of a kernel's result that is no node's, that of its last one."""
    if told is None:
        return ""
    if told.value.node is not None:
        return told.value.node.line
    found = [node.line for node in told.graphs.computed_for(told.value) if node.line]
    return found[-1] if found else ""


def _fused(told: _Told | None) -> str:
    """Operators that went into a kernel's result, module by module; empty for a single one."""
    if told is None:
        return ""
    if told.value.inside:
        return f"{told.value.inside}, whose nodes were computed one by one"
    calls: dict[str, list[str]] = {}
    of_passes: list[str] = []
    for node in told.graphs.computed_for(told.value):
        if node.target in _NOT_COMPUTED or is_view(node):
            continue
        # A pass of the compiler leaves nodes that know no module.
        known = calls.setdefault(node.module, []) if node.calls or node.origins else of_passes
        known += [name for name in _called(node) if name not in known]
    everywhere = {name for known in calls.values() for name in known}
    if more := [name for name in of_passes if name not in everywhere]:
        base = calls.setdefault(told.value.graph.base, [])
        base += [name for name in more if name not in base]
    if sum(map(len, calls.values())) < 2:
        return ""
    return "; ".join(f"{module}: {', '.join(known)}" for module, known in calls.items())


def _called(node: GraphNode) -> list[str]:
    """The operators that a node stems from, or its own where nothing is known of that."""
    names = [origin.operator for origin in node.origins] or [node.operator or node.target]
    return [_short(name) for name in names]


def _short(operator: str) -> str:
    """An operator without its library and overload.

    >>> _short("aten.silu.default")
    'silu'
    """
    parts = operator.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]
