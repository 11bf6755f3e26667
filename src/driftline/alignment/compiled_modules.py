"""Modules against compiled graphs: a module gives what its nodes hand to others.

A module that was called by itself has an output; in a graph it is a set of nodes, and its output
is the one value of the right shape that somebody outside of the set takes. Where several fit, or
the nodes lie in several graphs, nothing is paired, and the reason says so. Inductor keeps no memory
for views: what a module gives may be seen through a few of them, which becomes a recipe.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from driftline.alignment.compiled import FARTHEST, RESHAPES, Found, Graphs, Match
from driftline.alignment.recipe import Recipe, Step, start
from driftline.runs.graphs import Graph, GraphNode
from driftline.runs.record import Record

NO_NODE = "no node of the compiled graphs stems from it"
OF_A_MODULE = 0.95
_Side = tuple[int, int, int, str, int, str, tuple[int, ...]]
"""One side of one call of a module, and a shape there."""


def pair_modules(records: Sequence[Record], graphs: Graphs, found: Found) -> Iterator[Match]:
    """Inputs and outputs of modules, each with the value that enters or leaves its nodes."""
    wanted = [r for r in records if r.key.port in ("input", "output") and "/" not in r.key.site]
    if not wanted:
        return
    forward = [graph for graph in graphs.graphs if graph.kind != "backward"]
    borders = {id(graph): _borders(graphs, graph) for graph in forward}
    held: dict[_Side, set[str]] = defaultdict(set)
    for record in wanted:
        held[_side(record)].add(record.digest)
    for record in wanted:
        key = record.key
        found.ours[key] = NO_NODE
        if len(held[_side(record)]) > 1:
            found.ours[key] = "one of several of its shape here: which is which is not known"
            continue
        holders = [graph for graph in forward if key.site in borders[id(graph)][key.port]]
        if len({graphs.piece(graph) for graph in holders}) > 1:
            found.ours[key] = "its nodes lie in several graphs: none of them is the module"
            continue
        for graph in holders:
            calls = borders[id(graph)][key.port][key.site]
            visit, which = divmod(key.visit, len(calls))
            fitting = _of_shape(calls[which], record.shape)
            if len(fitting) != 1:
                verb = "leave" if key.port == "output" else "enter"
                found.ours[key] = (
                    f"{len(fitting)} values of its shape {verb} its nodes: which is its {key.port} "
                    "is not known"
                )
                continue
            reached = _reached(graphs, graph, fitting[0], key.step, visit, record.shape)
            if reached is not None:
                yield Match(record, *reached, confidence=OF_A_MODULE)
                break
            behind = _behind_views(graphs, graph, fitting[0])
            if behind.target == "placeholder":
                found.ours[key] = "an input of the graph, which no kernel gives"
            elif graphs.engine != "fx":
                found.ours[key] = graphs.why_not_kept(graph, behind)
                if whole := graphs.whole(graph, behind, key.step, visit):
                    found.inside[key] = whole.key


def _side(record: Record) -> _Side:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit, key.port, record.shape)


def _of_shape(nodes: Sequence[GraphNode], shape: tuple[int, ...]) -> list[GraphNode]:
    """Nodes of one shape; those whose shape varies only where no other fits."""
    fitting = [node for node in nodes if node.shape == shape]
    return fitting or [node for node in nodes if node.shape is None]


def _borders(graphs: Graphs, graph: Graph) -> dict[str, dict[str, list[list[GraphNode]]]]:
    """By port and module, call by call: the nodes whose value enters it, and leaves it."""
    uses = graphs.uses(graph)
    leaving: dict[str, dict[str, dict[str, GraphNode]]] = defaultdict(lambda: defaultdict(dict))
    entering: dict[str, dict[str, dict[str, GraphNode]]] = defaultdict(lambda: defaultdict(dict))
    for node in graph.nodes:
        valued = node.shape is not None or bool(node.dtype)
        for label in node.calls if node.target != "placeholder" else ():
            module = label.partition("@")[0]
            given = leaving[module][label]
            taken = entering[module][label]
            if valued and (node.leaves or any(label not in one.calls for one in uses[node.name])):
                given[node.name] = node
            for name in node.inputs:
                source = graphs.node(graph, name)
                outside = source is not None and label not in source.calls
                if source is not None and outside and (source.shape is not None or source.dtype):
                    taken[name] = source
    return {
        port: {
            module: [list(labels[one].values()) for one in sorted(labels, key=_call_number)]
            for module, labels in sides.items()
        }
        for port, sides in (("output", leaving), ("input", entering))
    }


def _call_number(label: str) -> int:
    number = label.partition("@")[2]
    return int(number) if number.isdigit() else 0


def _reached(
    graphs: Graphs, graph: Graph, node: GraphNode, step: int, visit: int, shape: tuple[int, ...]
) -> tuple[Record, Recipe | None] | None:
    """The tensor that holds a node's value, directly or seen through views."""
    steps: list[Step] = []
    wanted = shape
    for _ in range(FARTHEST):
        value = graphs.by_node.get((id(graph), node.name, step, visit))
        if value is not None:
            return value.record, _seen_through(value.record, steps, shape)
        source = graphs.node(graph, node.inputs[0]) if node.inputs else None
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
    for _ in range(FARTHEST):
        source = graphs.node(graph, node.inputs[0]) if node.inputs else None
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
