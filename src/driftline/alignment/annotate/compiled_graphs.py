"""Nodes of a compiled graph that are off by themselves, and what is computed from them.

While kernels are recorded, each operator of the program is also computed by torch, from the same
inputs, and so is each node that it was taken apart into. A node for which the results disagree is
off whatever the other run says: it is the first culprit of everything that is computed from it.
Reads lists and no tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.compiled_graphs import Graphs, Value, is_view
from driftline.graphs.sources.graph_files import Graph, GraphNode, Off
from driftline.runs.records import TensorKey

_WHOLE = ("(root)", "")
_AS_NODES = (
    "{node}: what inductor makes of it is relative_l2 {error:.3g} from torch's own operator for "
    "the same inputs"
)
_AS_KERNEL = (
    "{node}: the generated {kernel} is relative_l2 {error:.3g} from the nodes that it was made of, "
    "computed one by one from the same inputs"
)


class Culprits:
    """Who is to blame for the values of a process's graphs.

    Args:
        graphs: The graphs.
        errors: Nodes that are off, in the order of execution.
    """

    def __init__(self, graphs: Graphs, errors: Sequence[Off]) -> None:
        self._graphs = graphs
        self._errors = errors
        self._by_number = {graph.number: graph for graph in graphs.graphs}
        self._off: dict[tuple[int, int], dict[str, Off]] = defaultdict(dict)
        for error in errors:
            # A kernel's own error is more specific than that of the nodes it was made
            # of.
            known = self._off[error.graph, error.step].get(error.node)
            if known is None or (error.kernel and not known.kernel):
                self._off[error.graph, error.step][error.node] = error
        self._first: dict[tuple[int, int], Mapping[str, Off]] = {}

    def of(self, value: Value) -> str:
        """The first node that is off on the way to a value, in words; empty where none is."""
        at = (value.graph.number, value.record.key.step)
        if at not in self._off:
            return ""
        if at not in self._first:
            # Spreading is done once per graph and step, because every value of the
            # graph asks for it.
            self._first[at] = _spread(value.graph, self._off[at])
        names = [value.node.name] if value.node is not None else []
        if value.kept is not None:
            names += value.kept.nodes
        found = [first for name in names if (first := self._first[at].get(name)) is not None]
        if not found:
            return ""
        # Execution order decides who is first, not the order in which errors were listed.
        order = {node.name: place for place, node in enumerate(value.graph.nodes)}
        return self._said(value.graph, min(found, key=lambda one: order[one.node]))

    def of_module(self, site: str, step: int) -> str:
        """The first node of a module that is off in a step."""
        for error in self._errors:
            graph = self._by_number.get(error.graph)
            node = self._graphs.node(graph, error.node) if graph is not None else None
            if graph is None or node is None or error.step != step:
                continue
            # The root stands for every module; otherwise the node must lie inside the
            # site.
            if site in _WHOLE or f"{node.module}.".startswith(f"{site}."):
                return self._said(graph, self._off[error.graph, step][error.node])
        return ""

    def of_gradients(self, step: int) -> str:
        """The first node that is off in a step: all gradients of it come later."""
        return self.of_module(_WHOLE[0], step)

    def all(self) -> Iterator[str]:
        """Every operator that is off, once for all its steps."""
        seen: set[tuple[str, str]] = set()
        for error in self._errors:
            graph = self._by_number.get(error.graph)
            node = self._graphs.node(graph, error.node) if graph is not None else None
            if graph is None or node is None or (node.site, node.phase) in seen:
                continue
            seen.add((node.site, node.phase))
            yield self._said(graph, self._off[error.graph, error.step][error.node])

    def _said(self, graph: Graph, error: Off) -> str:
        node = self._graphs.node(graph, error.node)
        if node is None:
            return ""
        operator = node.origins[0].operator if node.origins else node.target
        at = f" at {node.line}" if node.line else ""
        name = f"{operator} of '{node.module}'{at} (node {node.name})"
        if error.kernel:
            kernel = self._graphs.kernel_of(graph, node)
            return _AS_KERNEL.format(node=name, kernel=kernel, error=error.error)
        return _AS_NODES.format(node=name, error=error.error)


def _spread(graph: Graph, off: Mapping[str, Off]) -> Mapping[str, Off]:
    """For every node, the first of those before it, and itself, that are off."""
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    found: dict[str, Off] = {}
    for node in graph.nodes:
        before = [found[name] for name in node.inputs if name in found]
        own = [off[node.name]] if node.name in off else []
        if before or own:
            # The earliest fault upstream explains the later ones.
            found[node.name] = min((*before, *own), key=lambda one: order[one.node])
    return found


# What a compiled graph tells a reader of a row: the program's line, and what a kernel fused.


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
    # Lone tensors get their lines too: the reader wants to know which code has no partner.
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
    # The candidate is usually the compiled run, so it is asked first.
    for record, blamed in ((pair.candidate, candidate), (pair.reference, reference)):
        key = record.key
        culprits = blamed.get((key.rank, key.process))
        if culprits is None or "/" in key.site:
            continue
        said = ""
        if key.port == "output":
            said = culprits.of_module(key.site, key.step)
        # Any forward fault of the step precedes all gradients.
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
    # The line is the reference's if it has one; the fusion is the candidate's, the run in question.
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
    # Views and inputs compute nothing, so they are not part of what was fused.
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
    # One operator is no fusion, and naming it would repeat the site.
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
