"""Modules against compiled graphs: a module gives what its nodes hand to others.

A module that was called by itself has an output; in a graph it is a set of nodes, and its output
is the one value of the right shape that somebody outside of the set takes. Where several fit, or
the nodes lie in several graphs, nothing is paired, and the reason says so. Inductor keeps no memory
for views: what a module gives may be seen through a few of them, which becomes a recipe.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from driftline.alignment.compiled import RESHAPES, Found, Graphs, Match
from driftline.alignment.recipe import Recipe, Step, start
from driftline.runs.graphs import Graph, GraphNode
from driftline.runs.record import Record

NO_NODE = "no node of the compiled graphs stems from it"
OF_A_MODULE = 0.95
_FARTHEST = 8
"""So many views may lie between a module's output and the memory that holds it."""


def pair_modules(records: Sequence[Record], graphs: Graphs, found: Found) -> Iterator[Match]:
    wanted = [r for r in records if r.key.port == "output" and "/" not in r.key.site]
    if not wanted:
        return
    leaving = {
        id(graph): _leaving(graphs, graph) for graph in graphs.graphs if graph.kind != "backward"
    }
    for record in wanted:
        key = record.key
        found.ours[key] = NO_NODE
        holders = [
            graph
            for graph in graphs.graphs
            if graph.kind != "backward" and key.site in leaving[id(graph)]
        ]
        if len({graph.piece for graph in holders}) > 1:
            found.ours[key] = "its nodes lie in several graphs: none of them is the module"
            continue
        for graph in holders:
            calls = leaving[id(graph)][key.site]
            visit, which = divmod(key.visit, len(calls))
            left = [node for node in calls[which] if node.shape in (record.shape, None)]
            fitting = [node for node in left if node.shape == record.shape] or left
            if len(fitting) != 1:
                found.ours[key] = (
                    f"{len(fitting)} values of its shape leave its nodes: which is its output is "
                    "not known"
                )
                continue
            reached = _reached(graphs, graph, fitting[0], key.step, visit, record.shape)
            if reached is not None:
                yield Match(record, *reached, confidence=OF_A_MODULE)
                break
            if graphs.engine != "fx":
                found.ours[key] = graphs.why_not_kept(
                    graph, _behind_views(graphs, graph, fitting[0])
                )


def _leaving(graphs: Graphs, graph: Graph) -> dict[str, list[list[GraphNode]]]:
    """By module, call by call: the nodes whose value is used outside of it."""
    uses = graphs.uses(graph)
    calls: dict[str, dict[str, list[GraphNode]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if node.target == "placeholder" or (node.shape is None and not node.dtype):
            continue
        for label in node.calls:
            held = calls[label.partition("@")[0]][label]
            if node.leaves or any(label not in user.calls for user in _users(uses, node)):
                held.append(node)
    return {
        module: [labels[label] for label in sorted(labels, key=_call_number)]
        for module, labels in calls.items()
    }


def _users(uses: Mapping[str, list[GraphNode]], node: GraphNode) -> list[GraphNode]:
    return uses.get(node.name, [])


def _call_number(label: str) -> int:
    number = label.partition("@")[2]
    return int(number) if number.isdigit() else 0


def _reached(
    graphs: Graphs, graph: Graph, node: GraphNode, step: int, visit: int, shape: tuple[int, ...]
) -> tuple[Record, Recipe | None] | None:
    """The tensor that holds a node's value, directly or seen through views."""
    steps: list[Step] = []
    wanted = shape
    for _ in range(_FARTHEST):
        value = graphs.by_node.get((id(graph), node.name, step, visit))
        if value is not None:
            return value.record, _seen_through(value.record, steps, shape)
        source = graphs.node(graph, node.inputs[0]) if len(node.inputs) == 1 else None
        if source is None:
            return None
        if node.axes is not None:
            steps.insert(0, Step("transpose", numbers=node.axes))
        elif node.target.rpartition(".")[0] in RESHAPES:
            steps.insert(0, Step("reshape", numbers=wanted))
        else:
            return None
        node = source
        if node.shape is None:
            if any(step.kind == "transpose" for step in steps):
                return None
        else:
            wanted = node.shape
    return None


def _seen_through(record: Record, steps: Sequence[Step], shape: tuple[int, ...]) -> Recipe | None:
    if math.prod(record.shape) != math.prod(shape):
        return None
    if all(step.kind == "reshape" for step in steps):
        return reshaped(record, shape, anyhow=bool(steps))
    return start(record).then(*steps, shape=shape)


def _behind_views(graphs: Graphs, graph: Graph, node: GraphNode) -> GraphNode:
    for _ in range(_FARTHEST):
        source = graphs.node(graph, node.inputs[0]) if len(node.inputs) == 1 else None
        looks = node.axes is not None or node.target.rpartition(".")[0] in RESHAPES
        if source is None or not looks:
            return node
        node = source
    return node


def reshaped(record: Record, shape: tuple[int, ...], *, anyhow: bool = False) -> Recipe | None:
    """Another shape of as many elements, where only axes of one come or go, or a view says so."""
    if record.shape == shape or math.prod(record.shape) != math.prod(shape):
        return None
    alike = [size for size in record.shape if size != 1] == [size for size in shape if size != 1]
    if not alike and not anyhow:
        return None
    return start(record).then(Step("reshape", numbers=shape), shape=shape)
