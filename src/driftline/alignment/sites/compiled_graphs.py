"""Compiled graphs of a run: the node of each recorded tensor, and the kernels that fused it.

Calls of operators are counted by piece of the program, even if a piece was cut into several graphs.
This file describes one run; the rules make pairs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from driftline.alignment.recipe import Recipe
from driftline.graphs.sources.graph_files import (
    INSIDE,
    Graph,
    GraphNode,
    Kept,
    Kernel,
    NodeError,
    Origin,
    read_errors,
    read_graphs,
)
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import GRAPHS


def counted_together(graphs: Sequence[Graph]) -> Sequence[Graph]:
    """Graphs with calls counted by piece of the program, even if a piece was cut into parts.

    The graph of a distributed model is cut at the buckets of its gradients, and each part is traced
    separately. Backward parts are executed from the last to the first.
    """
    parts: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    # Parts of one piece share these three; recompilations have their own compile id.
    for index, graph in enumerate(graphs):
        parts[graph.compile_id, graph.kind, graph.base].append(index)
    recounted = list(graphs)
    for group in parts.values():
        if len(group) == 1:
            continue
        totals: dict[tuple[str, str, str], int] = defaultdict(int)
        before: dict[int, dict[tuple[str, str, str], int]] = {}
        for index in group:  # backward graphs are listed as executed: the last part first
            before[index] = dict(totals)
            for call, total in _calls_of(recounted[index]).items():
                totals[call] += total
        # Counts of earlier parts are added, so that a call has the same number as in the uncut
        # graph.
        for index in group:
            recounted[index] = _recounted(recounted[index], before[index], totals)
    return recounted


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
        # A placeholder of a backward graph stands for a value of the forward pass and keeps its
        # number.
        phase = "forward" if node.target == "placeholder" else node.phase
        origins: list[Origin] = []
        for origin in node.origins:
            call = (phase, node.module, origin.name)
            nth = origin.nth + before.get(call, 0)
            origins.append(origin._replace(nth=nth, total=totals.get(call, origin.total)))
        return node._replace(origins=tuple(origins))

    return graph._replace(nodes=tuple(counted(node) for node in graph.nodes))


# --- values of nodes


SAVED = "saved"
"""Pseudo-phase of values that the forward pass saved for the backward pass."""
SHOWN = 6
"""Number of nodes of a fusion that a reason names."""
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "t"),
        *("transpose", "permute", "expand", "slice", "select", "as_strided", "split", "chunk"),
        *("unbind", "split_with_sizes", "view_as", "lift_fresh_copy"),
    )
)
# Only these views keep all elements in order; the others select, repeat or move them.
RESHAPES = frozenset(
    f"aten.{name}"
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach")
)


# An expand counts only if it repeats nothing, which `same_elements` checks.
_SAME_ELEMENTS = RESHAPES | {"aten.expand", "aten.clone"}
FARTHEST = 8
"""Largest number of views between a value and the memory that holds it."""


class Value(NamedTuple):
    """One recorded tensor of a compiled run.

    Attributes:
        record: The tensor.
        graph: The graph that computed it.
        node: The node whose value it is; None if no node has exactly this value.
        kernel: The kernel that computed it; None in a run that executed nodes.
        kept: The result that this kernel kept.
    """

    record: Record
    graph: Graph
    node: GraphNode | None
    kernel: Kernel | None = None
    kept: Kept | None = None

    @property
    def inside(self) -> str:
        """The fused kernel that contains the node; the value was recomputed outside of it."""
        if self.graph.engine == "fx" or self.kernel is not None:
            return ""
        return self.record.class_name.partition(INSIDE)[2]


class Match(NamedTuple):
    """A tensor of one run and its partner among the compiled values of the other."""

    record: Record
    partner: Record
    recipe: Recipe | None = None
    confidence: float = 1.0


class Matching(NamedTuple):
    """Matches, reasons for unpaired tensors, and the unpaired tensors inside a fused tensor."""

    matches: list[Match]
    reasons: dict[TensorKey, str]
    partner_reasons: dict[TensorKey, str]
    inside: dict[TensorKey, TensorKey]


class Piece(NamedTuple):
    """A piece of the program, in its order, and the module that executed it."""

    number: int
    base: str


class Place(NamedTuple):
    """An operator call, independent of compilation: the nth of `total` in its module and phase."""

    piece: Piece
    phase: str
    module: str
    operator: str
    nth: int
    slot: str
    total: int


class Graphs:
    """The graphs of one process of a run, and the tensors that are values of their nodes."""

    def __init__(
        self, graphs: Sequence[Graph], records: Sequence[Record], errors: Sequence[NodeError] = ()
    ) -> None:
        self.errors = errors
        self.graphs = graphs = counted_together(graphs)
        self.engine = graphs[0].engine if graphs else ""
        self._parts = Counter((graph.compile_id, graph.kind, graph.base) for graph in graphs)
        # Pieces are numbered in program order, however often one of them was compiled.
        order = sorted({graph.piece for graph in graphs}, key=_natural)
        self._order = {piece: index for index, piece in enumerate(order)}
        self._nodes = {id(graph): {n.name: n for n in graph.nodes} for graph in graphs}
        self._slots = {
            id(graph): {node.of: node for node in graph.nodes if node.of} for graph in graphs
        }
        self.values: list[Value] = []
        self.others: list[Record] = []
        sites = self._sites()
        for record in records:
            value = self._value(record, sites.get(record.key.site, []))
            if value is None:
                self.others.append(record)
            else:
                self.values.append(value)

    def _sites(self) -> dict[str, list[tuple[Graph, Kernel | None, Kept | None, GraphNode | None]]]:
        by_site: dict[str, list[tuple[Graph, Kernel | None, Kept | None, GraphNode | None]]]
        by_site = defaultdict(list)
        for graph in self.graphs:
            nodes, keeps = self._nodes[id(graph)], self._kept_nodes[id(graph)]
            # A node whose value a kernel keeps is listed only with its kernel, below.
            for node in graph.nodes:
                if node.name not in keeps:
                    by_site[node.site].append((graph, None, None, node))
            for kernel in graph.kernels:
                for kept in kernel.kept:
                    by_site[kept.site].append((graph, kernel, kept, nodes.get(kept.node)))
        return by_site

    def _value(
        self,
        record: Record,
        entries: list[tuple[Graph, Kernel | None, Kept | None, GraphNode | None]],
    ) -> Value | None:
        if record.key.port != "output" or not entries:
            return None
        backward = record.key.phase != "forward"
        # Forward and backward graphs may use the same site name; the phase of the record decides.
        fitting = [
            entry for entry in entries if (entry[0].kind == "backward") == backward
        ] or entries
        # A site may belong to several compilations of one piece; the shape shows which.
        for graph, kernel, kept, node in fitting:
            part = self._part(graph, node, record.key.slot)
            if part is None or part.shape is None or part.shape == record.shape:
                return Value(record, graph, part, kernel, kept)
        graph, kernel, kept, node = fitting[-1]
        return Value(record, graph, self._part(graph, node, record.key.slot), kernel, kept)

    def _part(self, graph: Graph, node: GraphNode | None, slot: str) -> GraphNode | None:
        """The node of one of several results, including results that are not read."""
        if node is None or node.shape is not None or not slot.isdigit():
            return node
        slots = self._slots[id(graph)]
        result = (node.name, int(slot))
        if result not in slots:
            # Nothing reads this result, so the graph has no node for it; a sibling's origin
            # identifies the call.
            siblings = [
                sibling
                for (name, _), sibling in slots.items()
                if name == node.name and sibling.origins
            ]
            if not siblings:
                return node
            origins = tuple(origin._replace(slot=slot) for origin in siblings[0].origins)
            slots[result] = siblings[0]._replace(of=result, origins=origins, shape=None)
        return slots[result]

    def is_cut(self, graph: Graph) -> bool:
        """Whether a graph is one of several parts of a piece, each with its own inputs."""
        return self._parts[graph.compile_id, graph.kind, graph.base] > 1

    def node(self, graph: Graph, name: str) -> GraphNode | None:
        return self._nodes[id(graph)].get(name)

    def piece(self, graph: Graph) -> Piece:
        return Piece(self._order[graph.piece], graph.base)

    def places(self, graph: Graph, node: GraphNode) -> Iterator[Place]:
        piece = self.piece(graph)
        # A body of control flow counts its own calls; values saved for the backward pass were
        # counted in the forward pass.
        module = f"{node.module}/{node.body}" if node.body else node.module
        phase = SAVED if is_saved(node) else node.phase
        for origin in node.origins:
            yield Place(piece, phase, module, origin.name, origin.nth, origin.slot, origin.total)

    @cached_property
    def by_node(self) -> dict[tuple[int, str, int, int], Value]:
        """Values by graph, node, step and visit; the value of a view also represents its source."""
        own: dict[tuple[int, str, int, int], Value] = {}
        shown: dict[tuple[int, str, int, int], Value] = {}
        inside: dict[tuple[int, str, int, int], Value] = {}
        for value in self.values:
            key = value.record.key
            for node in self.same_elements(value):
                place = (id(value.graph), node.name, key.step, key.visit)
                # A node's own value is preferred to a view of it, and a view to a value that was
                # recomputed for a kernel.
                rank = own if node is value.node else shown
                (inside if value.inside else rank).setdefault(place, value)
        return inside | shown | own

    def same_elements(self, value: Value) -> Iterator[GraphNode]:
        """The node of a value, and the nodes before it that it only reshapes.

        A softmax that is expanded to its own shape is kept as the value of the `expand`.
        """
        node = value.node
        for _ in range(FARTHEST):
            if node is None:
                return
            yield node
            operator = node.target.rpartition(".")[0]
            # Each step must keep all elements; otherwise the value would represent a node that has
            # more.
            same = operator in _SAME_ELEMENTS and bool(node.inputs)
            source = self.node(value.graph, node.inputs[0]) if same else None
            if source is None or (operator == "aten.expand" and not _as_large(source, node)):
                return
            node = source

    @cached_property
    def by_place(self) -> dict[Place, list[tuple[Graph, GraphNode]]]:
        """Every node, recorded or not, by the calls that it comes from."""
        by_place: dict[Place, list[tuple[Graph, GraphNode]]] = defaultdict(list)
        for graph in self.graphs:
            for node in graph.nodes:
                for place in self.places(graph, node):
                    by_place[place].append((graph, node))
        return by_place

    @cached_property
    def _fusions(self) -> dict[tuple[int, str], tuple[Kernel, Kept]]:
        # The results that a kernel keeps explain the nodes on the way to them. Nodes of no kept
        # result are explained by the kernel's last result.
        fusions: dict[tuple[int, str], tuple[Kernel, Kept]] = {}
        for graph in self.graphs:
            for kernel in graph.kernels:
                for kept in kernel.kept:
                    for name in kept.nodes:
                        fusions.setdefault((id(graph), name), (kernel, kept))
            for kernel in graph.kernels:
                for name in kernel.nodes if kernel.kept else ():
                    fusions.setdefault((id(graph), name), (kernel, kernel.kept[-1]))
        return fusions

    @cached_property
    def _by_kept(self) -> dict[tuple[int, str, int, int], Record]:
        """Recorded results of kernels, by graph, buffer, step and visit."""
        return {
            (id(value.graph), value.kept.buffer, value.record.key.step, value.record.key.visit): (
                value.record
            )
            for value in self.values
            if value.kept is not None
        }

    def whole(self, graph: Graph, node: GraphNode, step: int, visit: int) -> Record | None:
        """The recorded result of the fused kernel that computes a node on the way."""
        _, kept = self._fusions.get((id(graph), node.name), (None, None))
        if kept is None or is_view(node):
            return None
        return self._by_kept.get((id(graph), kept.buffer, step, visit))

    def kernel_of(self, graph: Graph, node: GraphNode) -> str:
        """The name of the kernel that computes a node."""
        kernel, _ = self._fusions.get((id(graph), node.name), (None, None))
        return kernel.name if kernel is not None else ""

    def why_not_kept(self, graph: Graph, node: GraphNode) -> str:
        """Why the value of a node is not in memory."""
        if is_view(node) and node.inputs:
            return f"a view of {node.inputs[0]}, which has no memory of its own"
        fused = self._fusions.get((id(graph), node.name))
        if fused is None:
            return "inductor made no kernel of its own for it"
        kernel, kept = fused
        keeps = kept.node or kept.buffer
        return f"inside a fusion: {kernel.name} computes it on the way to {keeps}"

    @cached_property
    def _kept_nodes(self) -> dict[int, set[str]]:
        """By graph: nodes whose value a kernel keeps."""
        return {
            id(graph): {kept.node for kernel in graph.kernels for kept in kernel.kept if kept.node}
            for graph in self.graphs
        }

    def computed_for(self, value: Value) -> list[GraphNode]:
        """The nodes that a kernel computes for a value, in order.

        Inductor's own list continues through results of earlier kernels; these are left out.
        """
        if value.kept is None:
            return []
        graph, kept = value.graph, self._kept_nodes[id(value.graph)]
        went_in = set(value.kept.nodes)
        # If no node has exactly the kept value, everything that the kernel computed is on the way
        # to it.
        waiting = [value.kept.node] if value.kept.node else list(went_in - kept)
        computed = set(waiting)
        while waiting:
            node = self.node(graph, waiting.pop())
            for name in node.inputs if node is not None else ():
                if name in went_in and name not in computed and name not in kept:
                    computed.add(name)
                    waiting.append(name)
        return [node for node in graph.nodes if node.name in computed]

    def uses(self, graph: Graph) -> dict[str, list[GraphNode]]:
        """The readers of each node, by name."""
        readers: dict[str, list[GraphNode]] = defaultdict(list)
        for node in graph.nodes:
            for name in node.inputs:
                readers[name].append(node)
        return readers


def _as_large(node: GraphNode, other: GraphNode) -> bool:
    """Whether two nodes are known to have equally many elements."""
    if node.shape is None or other.shape is None:
        return False
    return math.prod(node.shape) == math.prod(other.shape)


def is_saved(node: GraphNode) -> bool:
    """Whether a node is a backward graph's input that the forward pass computed and saved."""
    # Names given by AOTAutograd: primals are inputs of the program, tangents are its gradients.
    is_input = node.target == "placeholder" and node.phase == "backward"
    return is_input and not node.name.startswith(("primals_", "tangents_"))


def is_view(node: GraphNode) -> bool:
    return node.target.rpartition(".")[0] in VIEWS or node.target == "getitem"


def why_unpaired(value: Value) -> str:
    """Why a value cannot have a partner; empty if it can."""
    if value.node is not None and is_saved(value.node):
        return "saved by the forward pass, where it is compared"
    if value.kernel is None or value.kept is None:
        return ""
    if value.node is None:
        names = value.kept.nodes
        shown = ", ".join(names[-SHOWN:]) + (" and more" if len(names) > SHOWN else "")
        return f"inside a fusion: no node has exactly this value ({value.kernel.name}: {shown})"
    if value.record.key.phase == "recompute":
        return "computed again in the backward pass"
    if not value.node.origins:
        operator = value.node.operator or "an operator"
        return f"part of {operator}, which was taken apart ({value.kernel.name})"
    return ""


def graphs_of(run: Run) -> dict[tuple[int, int], Graphs]:
    """The graphs of every process of a run; empty for a run that has none."""
    owners: dict[tuple[int, int], list[Record]] = {}
    for record in run.records:
        owners.setdefault((record.key.rank, record.key.process), []).append(record)
    graphs_by_owner: dict[tuple[int, int], Graphs] = {}
    for owner, records in owners.items():
        if GRAPHS in run.sheets(*owner):
            text = run.sheet(GRAPHS, *owner)
            graphs = list(read_graphs(text))
            if graphs:
                graphs_by_owner[owner] = Graphs(graphs, records, tuple(read_errors(text)))
    return graphs_by_owner


def _natural(text: str) -> tuple[int, str]:
    # Numbers sort as numbers, so that piece 10 comes after piece 2; names come last.
    return (int(text), "") if text.isdigit() else (1 << 30, text)
