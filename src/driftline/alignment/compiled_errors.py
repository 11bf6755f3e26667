"""Nodes of a compiled graph that are off by themselves, and what is computed from them.

While kernels are recorded, each operator of the program is also computed by torch, from the same
inputs, and so is each node that it was taken apart into. A node for which the results disagree is
off whatever the other run says: it is the first culprit of everything that is computed from it.
Reads lists and no tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from driftline.alignment.compiled import Graphs, Value
from driftline.runs.graphs import Graph, Off

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
            self._first[at] = _spread(value.graph, self._off[at])
        names = [value.node.name] if value.node is not None else []
        if value.kept is not None:
            names += value.kept.nodes
        found = [first for name in names if (first := self._first[at].get(name)) is not None]
        if not found:
            return ""
        order = {node.name: place for place, node in enumerate(value.graph.nodes)}
        return self._said(value.graph, min(found, key=lambda one: order[one.node]))

    def of_module(self, site: str, step: int) -> str:
        """The first node of a module that is off in a step."""
        for error in self._errors:
            graph = self._by_number.get(error.graph)
            node = self._graphs.node(graph, error.node) if graph is not None else None
            if graph is None or node is None or error.step != step:
                continue
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
            found[node.name] = min((*before, *own), key=lambda one: order[one.node])
    return found
