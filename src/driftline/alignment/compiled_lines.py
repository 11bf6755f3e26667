"""What a compiled graph tells a reader of a row: the program's line, and what a kernel fused.

Adds words to a plan that is made already, and changes no pair. Reads lists of graphs and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from driftline.alignment.compiled import Graphs, Value, is_view
from driftline.alignment.compiled_errors import Culprits
from driftline.alignment.plan import Pair, Plan
from driftline.runs.graphs import GraphNode
from driftline.runs.key import TensorKey

Owners = Mapping[tuple[int, int], Graphs]
_TOLD = 3
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
    blamed = _blamed(reference), _blamed(candidate)
    pairs = (_with_line(pair, ours, theirs) for pair in plan.pairs)
    return plan._replace(
        pairs=tuple(_with_culprit(pair, *blamed) for pair in pairs),
        lone_lines=lone,
        notes=(*plan.notes, *_off("reference", blamed[0]), *_off("candidate", blamed[1])),
    )


def _blamed(owners: Owners) -> dict[tuple[int, int], Culprits]:
    """What is off by itself, of processes where anything is."""
    return {
        owner: Culprits(graphs, graphs.errors) for owner, graphs in owners.items() if graphs.errors
    }


def _off(side: str, blamed: Mapping[tuple[int, int], Culprits]) -> Iterator[str]:
    found = list(dict.fromkeys(said for culprits in blamed.values() for said in culprits.all()))
    if found:
        more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        what = "an operator" if len(found) == 1 else f"{len(found)} operators"
        yield (
            f"{what} of the {side} {'is' if len(found) == 1 else 'are'} off, whatever the other "
            f"run has: {'; '.join(found[:_TOLD])}{more}"
        )


def _with_culprit(
    pair: Pair,
    reference: Mapping[tuple[int, int], Culprits],
    candidate: Mapping[tuple[int, int], Culprits],
) -> Pair:
    """What was recorded around compiled graphs, of modules and gradients, knows a culprit, too."""
    if pair.culprit:
        return pair
    for record, blamed in ((pair.candidate, candidate), (pair.reference, reference)):
        key = record.key
        culprits = blamed.get((key.rank, key.process))
        if culprits is None or "/" in key.site:
            continue
        said = ""
        if key.port == "output":
            said = culprits.of_module(key.site, key.step)
        elif key.port.endswith(("grad", "grad_input", "grad_output")):
            said = culprits.of_gradients(key.step)
        if said:
            return pair._replace(culprit=said)
    return pair


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
