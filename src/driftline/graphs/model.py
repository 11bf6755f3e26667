"""A graph of operators, nested like its program, and its nodes at one level of depth.

Nodes are listed in execution order and name the tensors that they read and write. An in-place
operator may write the same name again. `at_level` returns the nodes of one level, in which every
name is written once, before it is read. This file knows no files and no frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from driftline.errors import BadFile, BadInput

# Limits for graphs from files: a hostile file must not exhaust memory or the stack.
MOST_NODES = 500_000
DEEPEST = 64
"""Greatest nesting depth that is accepted from a file."""


class TensorInfo(NamedTuple):
    """Known facts about a tensor: torch's name of its type, and its shape."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None


class GraphNode(NamedTuple):
    """An operator, or a part of the model that contains operators.

    Attributes:
        name: Name; should be unique in the graph. Duplicates get a number.
        kind: Type of the operator, or class of the module.
        inputs: Names of the tensors that it reads.
        outputs: Names of the tensors that it writes.
        param: Parameters.
        children: Nodes inside it, in order.
        site: Its site in a run; empty if there is none.
        visit: Number of the call of the site.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    param: Mapping[str, Any] = {}
    children: tuple[GraphNode, ...] = ()
    site: str = ""
    visit: int = 0


class Graph(NamedTuple):
    """A model as nodes.

    Attributes:
        name: The model's name.
        kind: The model's class.
        nodes: The outermost nodes, in order.
        inputs: Names of the model's inputs, including parameters.
        outputs: Names of the model's outputs.
        tensors: Known facts about tensors, by name.
        domain: The library of the operators: `aten`, `atb`, `ge`.
        notes: Sentences about what the graph leaves out.
    """

    name: str
    kind: str = ""
    nodes: tuple[GraphNode, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    tensors: Mapping[str, TensorInfo] = {}
    domain: str = "driftline"
    notes: tuple[str, ...] = ()

    def depth(self) -> int:
        """Number of levels of nodes."""
        return max((_depth(node) for node in self.nodes), default=0)


class LevelNode(NamedTuple):
    """A node at the chosen level; `path` names the nodes that contain it, outermost first."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    param: Mapping[str, Any]
    path: tuple[str, ...]
    site: str
    holds: int
    visit: int = 0


class LevelGraph(NamedTuple):
    """The nodes of one level; each tensor is made by one node, which precedes its readers."""

    name: str
    nodes: tuple[LevelNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    domain: str


def at_level(graph: Graph, level: int | None = None) -> LevelGraph:
    """Return the graph at one level.

    Args:
        graph: The nested graph.
        level: 0 is the whole model as one node, 1 its outermost nodes, and so on. None, or a level
            below the last one, selects the innermost nodes.

    Raises:
        BadInput: The level is not a depth.
        BadFile: The nodes depend on each other in a circle, or there are too many.
    """
    require_level(level)
    names = _SsaNames(graph)
    nodes = names.nodes(graph.nodes)
    outputs = [names.current[name] for name in graph.outputs if name in names.current]
    # Level 0 shows the model as a single node, which its source does not list.
    if level == 0:
        model_node = _SsaNode(graph.name, graph.kind or graph.name, [], outputs, {}, nodes)
        nodes = [model_node]
    return _cut(graph, names, nodes, outputs, level)


def require_level(level: int | None) -> None:
    if level is not None and (isinstance(level, bool) or level < 0):
        raise BadInput(
            f"a level is a depth from 0 upwards, not {level}",
            hint="0 is the whole model as one node; without a level the innermost nodes are shown",
        )


@dataclass(slots=True, eq=False)
class _SsaNode:
    """A node in SSA form: every tensor name is written once."""

    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]
    param: Mapping[str, Any]
    children: list[_SsaNode]
    site: str = ""
    visit: int = 0

    def leaves(self) -> Iterator[_SsaNode]:
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


class _SsaNames:
    """Converts nodes to SSA form: each write of a tensor gets a new name, in execution order."""

    def __init__(self, graph: Graph) -> None:
        self.current: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._infos = graph.tensors
        self._used: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._count = 0
        for name in graph.inputs:
            self._new(name)

    def nodes(self, nodes: Sequence[GraphNode], depth: int = 1) -> list[_SsaNode]:
        if depth > DEEPEST:
            raise BadFile(f"the graph is nested more than {DEEPEST} levels deep")
        return [self._node(node, depth) for node in _in_order(nodes, self.current)]

    def _node(self, node: GraphNode, depth: int) -> _SsaNode:
        self._count += 1
        if self._count > MOST_NODES:
            raise BadFile(f"the graph has more than {MOST_NODES} nodes")
        # Inputs are read before outputs are written: an in-place node reads the value of the old
        # name.
        inputs = [self.current.get(name) or self._new(name) for name in node.inputs]
        children = self.nodes(node.children, depth + 1)
        made = {name for child in children for leaf in child.leaves() for name in leaf.outputs}
        # A container that returns a child's tensor uses that tensor's name; otherwise it wrote a
        # new one.
        outputs = [
            self.current[name] if self.current.get(name) in made else self._new(name)
            for name in node.outputs
        ]
        name = _unique(node.name or node.kind or "node", self._names)
        kind = node.kind or "Operation"
        return _SsaNode(name, kind, inputs, outputs, node.param, children, node.site, node.visit)

    def _new(self, name: str) -> str:
        own = _unique(name or "tensor", self._used)
        self.current[name] = own
        if name in self._infos:
            self.tensors[own] = self._infos[name]
        return own


def _unique(name: str, used: dict[str, int]) -> str:
    """An unused name: the name itself, or the name with a number."""
    own, number = name, used.get(name, 0)
    # The counter makes a thousand equal names linear instead of quadratic.
    while own in used:
        number += 1
        own = f"{name}__{number + 1}"
    used[own] = 0
    used[name] = number
    return own


def _in_order(nodes: Sequence[GraphNode], available: Mapping[str, str]) -> Sequence[GraphNode]:
    """The nodes with makers before readers; usually the order of the file.

    Raises:
        BadFile: The nodes depend on each other in a circle.
    """
    makers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.outputs:
            makers.setdefault(name, index)

    def waits_for(index: int) -> set[int]:
        node = nodes[index]
        return {
            makers[name]
            for name in node.inputs
            if makers.get(name, index) > index
            and name not in available
            and name not in node.outputs
        }

    # The usual case is checked first, because files are nearly always in order.
    if not any(waits_for(index) for index in range(len(nodes))):
        return nodes
    # The first writer of each name must precede its readers; otherwise the order stays.
    before = [
        {makers[name] for name in node.inputs if name in makers and makers[name] != index}
        for index, node in enumerate(nodes)
    ]
    readers: dict[int, list[int]] = {}
    for index, waits in enumerate(before):
        for maker in waits:
            readers.setdefault(maker, []).append(index)
    # A heap keeps the file's order among nodes that are ready, so that graphs stay recognisable.
    import heapq

    ready = [index for index, waits in enumerate(before) if not waits]
    ordered: list[GraphNode] = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(nodes[index])
        for reader in readers.get(index, ()):
            before[reader].discard(index)
            if not before[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(nodes):
        stuck = [nodes[index].name for index, waits in enumerate(before) if waits][:2]
        raise BadFile(f"the nodes feed each other in a circle: {' and '.join(map(repr, stuck))}")
    return ordered


def _cut(
    graph: Graph,
    names: _SsaNames,
    nodes: Sequence[_SsaNode],
    outputs: Sequence[str],
    level: int | None,
) -> LevelGraph:
    chosen = list(_chosen(nodes, level, ()))
    reads, makes = _border_tensors([node for node, _ in chosen], outputs)
    level_nodes = tuple(
        LevelNode(
            node.name,
            node.kind,
            tuple(wanted),
            tuple(made),
            node.param,
            path,
            node.site,
            sum(1 for _ in node.leaves()) if node.children else 0,
            node.visit,
        )
        for (node, path), wanted, made in zip(chosen, reads, makes, strict=True)
    )
    made = {name for node in level_nodes for name in node.outputs}
    read = dict.fromkeys(name for node in level_nodes for name in node.inputs)
    # If the source lists no outputs, tensors that no node reads are the outputs.
    last = [name for name in outputs if name in made] or [
        name for node in level_nodes for name in node.outputs if name not in read
    ]
    return LevelGraph(
        graph.name,
        level_nodes,
        tuple(name for name in read if name not in made),
        tuple(dict.fromkeys(last)),
        names.tensors,
        graph.domain,
    )


def _chosen(
    nodes: Sequence[_SsaNode], level: int | None, path: tuple[str, ...]
) -> Iterator[tuple[_SsaNode, tuple[str, ...]]]:
    """The nodes of a level, each with the names of the nodes that contain it."""
    for node in nodes:
        if not node.children or (level is not None and len(path) + 1 >= max(level, 1)):
            yield node, path
        else:
            yield from _chosen(node.children, level, (*path, node.name))


def _border_tensors(
    nodes: Sequence[_SsaNode], outputs: Sequence[str]
) -> tuple[list[dict[str, None]], list[dict[str, None]]]:
    """The tensors that each node reads from others, and those that it makes for others.

    Tensors between two leaves of one node are invisible; only tensors that cross its border count.
    """
    reads: list[dict[str, None]] = []
    makes: list[dict[str, None]] = []
    owner: dict[str, int] = {}
    for index, node in enumerate(nodes):
        leaves = list(node.leaves())
        inside = dict.fromkeys(name for leaf in leaves for name in leaf.outputs)
        read = (*node.inputs, *(name for leaf in leaves for name in leaf.inputs))
        reads.append(dict.fromkeys(name for name in read if name not in inside))
        makes.append(dict.fromkeys(n for n in node.outputs if n in inside or not node.children))
        for name in inside:
            owner.setdefault(name, index)
    # A tensor that another node reads must be an output of its maker, even if the source did not
    # list it; the same holds for the outputs of the graph.
    for index, wanted in enumerate(reads):
        for name in wanted:
            maker = owner.get(name)
            if maker is not None and maker != index:
                makes[maker].setdefault(name)
    for name in outputs:
        if name in owner:
            makes[owner[name]].setdefault(name)
    return reads, makes


def _depth(node: GraphNode) -> int:
    deepest, waiting = 1, [(node, 1)]
    while waiting:
        current, depth = waiting.pop()
        deepest = max(deepest, depth)
        if depth > DEEPEST:
            raise BadFile(f"the graph is nested more than {DEEPEST} levels deep")
        waiting += [(child, depth + 1) for child in current.children]
    return deepest
