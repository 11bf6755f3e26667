"""Annotations from compiled graphs: source lines, fused kernels, and the first faulty node.

While kernels are recorded, torch also computes each operator of the program, and each node that the
compiler decomposed it into, from the same inputs. A node whose results disagree is faulty whatever
the other run has: it is the culprit of everything computed from it. This file reads lists, but no
tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.compiled_graphs import Graphs, Value, is_view
from driftline.graphs.sources.graph_files import Graph, GraphNode, NodeError
from driftline.runs.records import TensorKey

_ROOTS = ("(root)", "")
_AS_NODES = (
    "{node}: what inductor makes of it is relative_l2 {error:.3g} from torch's own operator for "
    "the same inputs"
)
_AS_KERNEL = (
    "{node}: the generated {kernel} is relative_l2 {error:.3g} from the nodes that it was made of, "
    "computed one by one from the same inputs"
)


class Culprits:
    """The faulty nodes upstream of the values in a process's graphs.

    Args:
        graphs: The graphs.
        errors: Faulty nodes in execution order.
    """

    def __init__(self, graphs: Graphs, errors: Sequence[NodeError]) -> None:
        self._graphs = graphs
        self._errors = errors
        self._by_number = {graph.number: graph for graph in graphs.graphs}
        self._off: dict[tuple[int, int], dict[str, NodeError]] = defaultdict(dict)
        for error in errors:
            # A kernel's own error is more specific than that of its nodes.
            previous = self._off[error.graph, error.step].get(error.node)
            if previous is None or (error.kernel and not previous.kernel):
                self._off[error.graph, error.step][error.node] = error
        self._first: dict[tuple[int, int], Mapping[str, NodeError]] = {}

    def of(self, value: Value) -> str:
        """Description of the first faulty node upstream of a value; empty if there is none."""
        graph_step = (value.graph.number, value.record.key.step)
        if graph_step not in self._off:
            return ""
        if graph_step not in self._first:
            # Computed once for each graph and step, because every value of the graph needs it.
            self._first[graph_step] = _first_faults(value.graph, self._off[graph_step])
        names = [value.node.name] if value.node is not None else []
        if value.kept is not None:
            names += value.kept.nodes
        faults = [
            first for name in names if (first := self._first[graph_step].get(name)) is not None
        ]
        if not faults:
            return ""
        # Execution order decides which fault is first, not the order in which errors were listed.
        order = {node.name: place for place, node in enumerate(value.graph.nodes)}
        return self._describe(value.graph, min(faults, key=lambda fault: order[fault.node]))

    def of_module(self, site: str, step: int) -> str:
        """Description of the first faulty node of a module in a step; empty if there is none."""
        for error in self._errors:
            graph = self._by_number.get(error.graph)
            node = self._graphs.node(graph, error.node) if graph is not None else None
            if graph is None or node is None or error.step != step:
                continue
            # The root stands for every module; otherwise the node must be inside the site.
            if site in _ROOTS or f"{node.module}.".startswith(f"{site}."):
                return self._describe(graph, self._off[error.graph, step][error.node])
        return ""

    def of_gradients(self, step: int) -> str:
        """Description of the first faulty node of a step; all gradients are computed after it."""
        return self.of_module(_ROOTS[0], step)

    def all(self) -> Iterator[str]:
        """Descriptions of all faulty operators, each once for all its steps."""
        seen: set[tuple[str, str]] = set()
        for error in self._errors:
            graph = self._by_number.get(error.graph)
            node = self._graphs.node(graph, error.node) if graph is not None else None
            if graph is None or node is None or (node.site, node.phase) in seen:
                continue
            seen.add((node.site, node.phase))
            yield self._describe(graph, self._off[error.graph, error.step][error.node])

    def _describe(self, graph: Graph, error: NodeError) -> str:
        node = self._graphs.node(graph, error.node)
        if node is None:
            return ""
        operator = node.origins[0].operator if node.origins else node.target
        location = f" at {node.line}" if node.line else ""
        name = f"{operator} of '{node.module}'{location} (node {node.name})"
        if error.kernel:
            kernel = self._graphs.kernel_of(graph, node)
            return _AS_KERNEL.format(node=name, kernel=kernel, error=error.error)
        return _AS_NODES.format(node=name, error=error.error)


def _first_faults(graph: Graph, off: Mapping[str, NodeError]) -> Mapping[str, NodeError]:
    """For every node, the first faulty node among itself and its dependencies."""
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    first_fault: dict[str, NodeError] = {}
    for node in graph.nodes:
        before = [first_fault[name] for name in node.inputs if name in first_fault]
        own = [off[node.name]] if node.name in off else []
        if before or own:
            # The earliest fault upstream explains the later ones.
            first_fault[node.name] = min((*before, *own), key=lambda fault: order[fault.node])
    return first_fault


# --- annotations of a plan


Owners = Mapping[tuple[int, int], Graphs]
_SHOWN = 3
_NOT_COMPUTED = ("placeholder", "get_attr", "getitem")


def with_lines(plan: Plan, reference: Owners, candidate: Owners) -> Plan:
    """The plan with source lines for pairs and unpaired tensors, and with fusions for pairs.

    Args:
        plan: The plan.
        reference: Graphs of the reference, by rank and process; empty if it was not compiled.
        candidate: Graphs of the candidate, likewise.
    """
    reference_values, candidate_values = _values(reference), _values(candidate)
    lone: dict[tuple[str, TensorKey], str] = {}
    # Unpaired tensors get their lines too, which show the code that has no partner.
    for side, records, values in (
        ("reference", plan.missing, reference_values),
        ("candidate", plan.extra, candidate_values),
    ):
        for record in records:
            if line := _line(values.get(record.key)):
                lone[side, record.key] = line
    blamed = _faulty_nodes(reference), _faulty_nodes(candidate)
    pairs = (_with_line(pair, reference_values, candidate_values) for pair in plan.pairs)
    return plan._replace(
        pairs=tuple(_with_culprit(pair, *blamed) for pair in pairs),
        lone_lines=lone,
        notes=(
            *plan.notes,
            *_fault_notes("reference", blamed[0]),
            *_fault_notes("candidate", blamed[1]),
        ),
    )


def _faulty_nodes(owners: Owners) -> dict[tuple[int, int], Culprits]:
    """Faulty nodes by process, for processes that have any."""
    return {
        owner: Culprits(graphs, graphs.errors) for owner, graphs in owners.items() if graphs.errors
    }


def _fault_notes(side: str, blamed: Mapping[tuple[int, int], Culprits]) -> Iterator[str]:
    faults = list(dict.fromkeys(fault for culprits in blamed.values() for fault in culprits.all()))
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        what = "an operator" if len(faults) == 1 else f"{len(faults)} operators"
        yield (
            f"{what} of the {side} {'is' if len(faults) == 1 else 'are'} off, whatever the other "
            f"run has: {'; '.join(faults[:_SHOWN])}{more}"
        )


def _with_culprit(
    pair: Pair,
    reference: Mapping[tuple[int, int], Culprits],
    candidate: Mapping[tuple[int, int], Culprits],
) -> Pair:
    """Add the culprit to pairs of modules and gradients around compiled graphs."""
    if pair.culprit:
        return pair
    # The candidate first, because it is usually the compiled run.
    for record, blamed in ((pair.candidate, candidate), (pair.reference, reference)):
        key = record.key
        culprits = blamed.get((key.rank, key.process))
        if culprits is None or "/" in key.site:
            continue
        culprit = ""
        if key.port == "output":
            culprit = culprits.of_module(key.site, key.step)
        # Any fault in the forward pass of the step precedes all gradients.
        elif key.port.endswith(("grad", "grad_input", "grad_output")):
            culprit = culprits.of_gradients(key.step)
        if culprit:
            return pair._replace(culprit=culprit)
    return pair


class _Described(NamedTuple):
    """A value, its graphs, and the faulty nodes in them."""

    graphs: Graphs
    value: Value
    culprits: Culprits


def _values(owners: Owners) -> dict[TensorKey, _Described]:
    by_key: dict[TensorKey, _Described] = {}
    for graphs in owners.values():
        culprits = Culprits(graphs, graphs.errors)
        for value in graphs.values:
            by_key[value.record.key] = _Described(graphs, value, culprits)
    return by_key


def _with_line(
    pair: Pair,
    reference_values: Mapping[TensorKey, _Described],
    candidate_values: Mapping[TensorKey, _Described],
) -> Pair:
    reference, candidate = (
        reference_values.get(pair.reference.key),
        candidate_values.get(pair.candidate.key),
    )
    line = _line(reference) or _line(candidate)
    # The line is the reference's if it has one; the fusion is the candidate's, which is the run in
    # question.
    fused = _fused(candidate) or _fused(reference)
    culprit = next(
        (
            text
            for value in (candidate, reference)
            if value and (text := value.culprits.of(value.value))
        ),
        "",
    )
    if line or fused or culprit:
        return pair._replace(line=line, fused=fused, culprit=culprit)
    return pair


def _line(described: _Described | None) -> str:
    """The source line of the node; if no node has the value, of the last node computed for it."""
    if described is None:
        return ""
    if described.value.node is not None:
        return described.value.node.line
    lines = [node.line for node in described.graphs.computed_for(described.value) if node.line]
    return lines[-1] if lines else ""


def _fused(described: _Described | None) -> str:
    """Operators in a kernel's result, by module; empty for a single operator."""
    if described is None:
        return ""
    if described.value.inside:
        return f"{described.value.inside}, whose nodes were computed one by one"
    calls: dict[str, list[str]] = {}
    of_passes: list[str] = []
    # Views and inputs compute nothing, so they are not part of a fusion.
    for node in described.graphs.computed_for(described.value):
        if node.target in _NOT_COMPUTED or is_view(node):
            continue
        # Nodes that a compiler pass inserted have no module.
        operators = calls.setdefault(node.module, []) if node.calls or node.origins else of_passes
        operators += [name for name in _called(node) if name not in operators]
    everywhere = {name for operators in calls.values() for name in operators}
    if more := [name for name in of_passes if name not in everywhere]:
        base = calls.setdefault(described.value.graph.base, [])
        base += [name for name in more if name not in base]
    # A single operator is no fusion, and naming it would repeat the site.
    if sum(map(len, calls.values())) < 2:
        return ""
    return "; ".join(f"{module}: {', '.join(operators)}" for module, operators in calls.items())


def _called(node: GraphNode) -> list[str]:
    """The operators that a node comes from, or its own operator if they are unknown."""
    names = [origin.operator for origin in node.origins] or [node.operator or node.target]
    return [_without_overload(name) for name in names]


def _without_overload(operator: str) -> str:
    """An operator without its library and overload.

    >>> _without_overload("aten.silu.default")
    'silu'
    """
    parts = operator.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]
