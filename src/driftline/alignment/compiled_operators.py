"""A run of operators against compiled graphs: the nth call of an operator in a module and phase.

How many calls there are must be the same on both sides; where it is not, nothing is paired, and the
reason says so. What a kernel computed on the way to something else has the fusion as its reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from driftline.alignment.compiled import Found, Graphs, Match, Piece
from driftline.alignment.compiled_modules import NO_NODE, reshaped
from driftline.runs.graphs import Graph, GraphNode, Origin
from driftline.runs.key import TensorKey
from driftline.runs.record import Record

_Calls = Mapping[tuple[int, str, str, str], Mapping[int, Mapping[str, Record]]]


def pair_operators(records: Sequence[Record], graphs: Graphs, found: Found) -> Iterator[Match]:
    """Results of operators, each with the value of the node that stems from its call."""
    calls: dict[tuple[int, str, str, str], dict[int, dict[str, Record]]]
    calls = defaultdict(lambda: defaultdict(dict))
    for record in records:
        module, slash, name = record.key.site.rpartition("/")
        if slash and record.key.port == "output":
            key = (record.key.step, module, name, record.key.phase)
            calls[key][record.key.visit][record.key.slot] = record
            found.ours[record.key] = NO_NODE
    if not calls:
        return
    called = _Called(graphs, calls)
    if graphs.engine != "fx":
        for graph, node, step in called.executed():
            for ours in called.by(graph, node, step):
                found.ours[ours.key] = graphs.why_not_kept(graph, node)
                if whole := graphs.whole(graph, node, step, 0):
                    found.inside[ours.key] = whole.key
    once: set[TensorKey] = set()
    shown = [
        (bool(value.inside), node is not value.node, value, node)
        for value in graphs.values
        for node in graphs.same_elements(value)
    ]
    # Views come last: they stand for an operator of which nothing else was kept. What was computed
    # beside a kernel stands for nothing that a kernel kept.
    for *_, value, node in sorted(shown, key=lambda one: one[:2]):
        key = value.record.key
        for ours in called.by(value.graph, node, key.step, key.visit):
            fits = math.prod(ours.shape) == math.prod(value.record.shape)
            if fits and ours.key not in once:
                once.add(ours.key)
                yield Match(ours, value.record, reshaped(value.record, ours.shape))
                break
        else:
            if why := called.why_unknown(value.graph, node, key.step):
                found.theirs[key] = why


class _Called:
    """Which calls of operators, in a run of operators, the nodes of compiled graphs stem from.

    Args:
        graphs: The compiled graphs.
        calls: Results by step, module, operator and phase; then by call and slot.
    """

    def __init__(self, graphs: Graphs, calls: _Calls) -> None:
        self._graphs = graphs
        self._calls = calls
        self._totals = _totals(graphs)
        self._times = _executions(graphs)

    def executed(self) -> Iterator[tuple[Graph, GraphNode, int]]:
        """Every node of a graph, for each step that executed it."""
        steps: dict[int, list[int]] = defaultdict(list)
        for known, step in self._times:
            steps[known].append(step)
        for graph in self._graphs.graphs:
            for step in steps[id(graph)]:
                for node in graph.nodes:
                    yield graph, node, step

    def by(
        self, graph: Graph, node: GraphNode, step: int, visit: int | None = None
    ) -> Iterator[Record]:
        """What a node's calls gave in one execution of its graph, or in all of a step."""
        for origin, there, each, ran in self._found(graph, node, step):
            if each * ran == max(there) + 1:
                pieces = self._totals[node.module, origin.name, node.phase]
                mine = self._graphs.piece(graph)
                place = sum(n for piece, n in pieces.items() if piece < mine) + origin.nth
                for time in range(ran) if visit is None else (visit,):
                    ours = there.get(time * each + place, {}).get(origin.slot)
                    if ours is not None:
                        yield ours

    def why_unknown(self, graph: Graph, node: GraphNode, step: int) -> str:
        for origin, there, each, ran in self._found(graph, node, step):
            if each * ran != max(there) + 1:
                return (
                    f"{max(there) + 1} calls of {origin.name} in {node.module} there, "
                    f"{each * ran} here: which is which is not known"
                )
        return ""

    def _found(
        self, graph: Graph, node: GraphNode, step: int
    ) -> Iterator[tuple[Origin, Mapping[int, Mapping[str, Record]], int, int]]:
        """Each call of a node: those of its operator there, and how many and how often here."""
        if node.target == "placeholder" or node.body:
            return
        ran = self._times[id(graph), step]
        for origin in node.origins:
            for name in (origin.name, f"{origin.name}_"):
                there = self._calls.get((step, node.module, name, node.phase))
                if there:
                    each = sum(self._totals[node.module, origin.name, node.phase].values())
                    yield origin, there, each, ran
                    break


def _totals(graphs: Graphs) -> dict[tuple[str, str, str], dict[Piece, int]]:
    """By module, operator and phase: how many calls each piece of the program has."""
    found: dict[tuple[str, str, str], dict[Piece, int]] = defaultdict(dict)
    for graph in graphs.graphs:
        for node in graph.nodes:
            if node.target == "placeholder" or node.body:
                continue
            for origin in node.origins:
                key = (node.module, origin.name, node.phase)
                found[key][graphs.piece(graph)] = origin.total
    return found


def _executions(graphs: Graphs) -> dict[tuple[int, int], int]:
    """How often a graph was executed in a step."""
    found: dict[tuple[int, int], int] = {}
    for value in graphs.values:
        at = (id(value.graph), value.record.key.step)
        found[at] = max(found.get(at, 0), value.record.key.visit + 1)
    return found
