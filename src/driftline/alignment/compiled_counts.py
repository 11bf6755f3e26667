"""Calls of operators, counted by piece of the program where a piece was cut into several graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from driftline.runs.graphs import Graph, GraphNode, Origin


def counted_together(graphs: Sequence[Graph]) -> Sequence[Graph]:
    """Graphs whose calls are counted by piece of the program, also where a piece was cut in parts.

    The graph of a distributed model is cut at the buckets of its gradients, and each part is traced
    by itself. Backward parts are executed from the last to the first.
    """
    parts: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for at, graph in enumerate(graphs):
        parts[graph.compile_id, graph.kind, graph.base].append(at)
    found = list(graphs)
    for group in parts.values():
        if len(group) == 1:
            continue
        totals: dict[tuple[str, str, str], int] = defaultdict(int)
        before: dict[int, dict[tuple[str, str, str], int]] = {}
        for at in group:  # backward graphs are listed as they come: the last part first
            before[at] = dict(totals)
            for call, total in _calls_of(found[at]).items():
                totals[call] += total
        for at in group:
            found[at] = _recounted(found[at], before[at], totals)
    return found


def _calls_of(graph: Graph) -> dict[tuple[str, str, str], int]:
    """How often a graph calls each operator, by module and phase."""
    return {
        (node.phase, node.module, origin.name): origin.total
        for node in graph.nodes
        if node.target != "placeholder" and not node.body
        for origin in node.origins
    }


def _recounted(
    graph: Graph,
    before: Mapping[tuple[str, str, str], int],
    totals: Mapping[tuple[str, str, str], int],
) -> Graph:
    def counted(node: GraphNode) -> GraphNode:
        if not node.origins or node.body:
            return node
        phase = "forward" if node.target == "placeholder" else node.phase
        origins: list[Origin] = []
        for one in node.origins:
            call = (phase, node.module, one.name)
            nth = one.nth + before.get(call, 0)
            origins.append(one._replace(nth=nth, total=totals.get(call, one.total)))
        return node._replace(origins=tuple(origins))

    return graph._replace(nodes=tuple(counted(node) for node in graph.nodes))
