"""The graph of a run without a list of calls: sites are nodes, and equal bytes are edges.

If the run's topology has edges (as dumps of ATB, GE and FX do), they are used instead. If a module
returns a tensor made inside it, both have the same name; a tensor that no site made is an input.
Values are read only if a record has no digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from driftline.errors import BadFile, DriftlineError
from driftline.graphs.model import DEEPEST, MOST_NODES, Graph, GraphNode, TensorInfo
from driftline.runs.records import Record
from driftline.runs.run import Run

BETWEEN = "BetweenModules"
"""Kind of the node for computations of a container outside of its modules."""
_LARGEST_READ = 64 << 20
"""Tensors with more bytes are not read to look for equal ones."""


class _Call:
    """One call of a site."""

    __slots__ = ("children", "inputs", "key", "kind", "last", "outputs", "site")

    def __init__(self, site: str, kind: str, key: tuple[str, int]) -> None:
        self.site = site
        self.kind = kind
        self.key = key
        self.last = -1
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.children: list[_Call] = []

    def made(self) -> set[str]:
        return {n for child in self.children for n in (*child.outputs, *child.made())}


def run_graph(run: Run, rank: int = 0, process: int = 0, step: int | None = None) -> Graph | None:
    """The graph of one process and step; None if there are no records and no edges."""
    tree = run.topology(rank, process)
    forward = [
        record
        for record in run.records
        if (record.key.rank, record.key.process) == (rank, process)
        and record.key.phase == "forward"
        and record.key.port in ("input", "output")
    ]
    steps = sorted({record.key.step for record in forward})
    chosen = steps[0] if step is None and steps else step
    records = [record for record in forward if record.key.step == chosen]
    if tree is not None and tree.get("edges"):
        # Recorded edges are certain, unlike equal bytes: two zero tensors are equal.
        return _by_edges(run.name, tree, records, str(run.manifest.get("format", "")))
    if records:
        return _by_bytes(run, records)
    return None


# --- by equal bytes


def _by_bytes(run: Run, records: Sequence[Record]) -> Graph:
    calls: dict[tuple[str, int], _Call] = {}
    for record in records:
        key = (record.key.site, record.key.visit)
        call = calls.get(key)
        if call is None:
            call = calls[key] = _Call(record.key.site, record.class_name, key)
        call.last = max(call.last, record.order)
    tops = _nested(list(calls.values()))
    names: dict[tuple[str, str], str] = {}
    tensors: dict[str, TensorInfo] = {}
    used: set[str] = set()

    def note(name: str, record: Record) -> str:
        used.add(name)
        tensors.setdefault(name, TensorInfo(record.dtype, record.shape))
        return name

    for record in records:
        call = calls[record.key.site, record.key.visit]
        # Equal bytes of different types are different tensors.
        same = (_digest(run, record), record.dtype)
        own = f"{_shown(call)}_{record.key.port}_{record.key.slot}"
        same_bytes = names.get(same) if same[0] else None
        if record.key.port == "input":
            if record.key.moment == "after":
                continue
            name = same_bytes or note(own, record)
            call.inputs.append(name)
        else:
            # A container returns a tensor that something inside it made; any other equal tensor is
            # a coincidence.
            name = (
                same_bytes
                if same_bytes is not None and same_bytes in call.made()
                else note(own, record)
            )
            call.outputs.append(name)
        if same[0]:
            names[same] = name
    # Without values, equal tensors and thus computations between modules cannot be recognised. A
    # compiler's graph has no computations between its nodes.
    if names and "graphs" not in run.manifest:
        made = {name for call in calls.values() for name in call.outputs}
        _connect(tops, None, made)
    nodes = tuple(_node(call) for call in tops)
    name, kind = "program", "Program"
    outputs: tuple[str, ...] = ()
    # A single root adds a level without information.
    if len(nodes) == 1:
        name = kind = nodes[0].kind or nodes[0].name
        outputs = nodes[0].outputs
        nodes = nodes[0].children or nodes
    return Graph(name, kind, nodes, (), outputs, tensors, "torch")


def _connect(calls: list[_Call], holder: _Call | None, made: set[str]) -> None:
    """Add a node wherever a container computes something between its modules.

    A residual sum, for example, is not a module. Its result is an input that no module made, or an
    output of the container that nothing inside made. It becomes one node, which reads the tensors
    that no module has read so far.
    """
    available = set[str]() if holder is None else set(holder.inputs)
    # If operators were captured, every computation is a node already.
    if any("/" in call.site for call in calls):
        for call in calls:
            _connect(call.children, call, made)
        return
    result: list[_Call] = []
    unread: dict[str, None] = {}
    last: list[str] = list(available)

    def between(outputs: list[str]) -> None:
        result.append(_between(holder, result, list(unread) or list(last), outputs))
        unread.clear()

    for call in sorted(calls, key=lambda call: call.last):
        unknown = [name for name in call.inputs if name not in made and name not in available]
        # The first module of a program reads the program's own inputs.
        if unknown and (result or holder is not None) and (unread or last):
            between(unknown)
        for name in call.inputs:
            unread.pop(name, None)
        result.append(call)
        unread.update(dict.fromkeys(call.outputs))
        last = call.outputs or last
        _connect(call.children, call, made)
    if holder is not None and calls and (computed := _computed_by(holder, calls, available)):
        between(computed)
    calls[:] = result


def _computed_by(holder: _Call, calls: Sequence[_Call], available: set[str]) -> list[str]:
    """Outputs of a container that are neither its inputs nor made by a module inside it."""
    inner = {name for call in calls for name in (*call.outputs, *call.made())}
    return [name for name in holder.outputs if name not in inner | available]


def _between(
    holder: _Call | None, before: Sequence[_Call], inputs: list[str], outputs: list[str]
) -> _Call:
    """A node for a container's own computation, numbered among the preceding ones."""
    site = "" if holder is None else holder.site
    number = sum(call.kind == BETWEEN for call in before)
    name = f"{site}.between{number}" if site and site != "(root)" else f"between{number}"
    node = _Call(name, BETWEEN, (name, 0))
    node.inputs, node.outputs = inputs, outputs
    return node


def _nested(calls: Sequence[_Call]) -> list[_Call]:
    """Nest the calls: a call belongs to the enclosing module's call that ended next."""
    by_site: dict[str, list[_Call]] = {}
    for call in calls:
        by_site.setdefault(call.site, []).append(call)
    # Calls end after everything inside them, so the next one to end contains the call.
    for those in by_site.values():
        those.sort(key=lambda call: call.last)
    tops: list[_Call] = []
    for call in calls:
        around = None
        for site in _around(call.site):
            around = next((c for c in by_site.get(site, ()) if c.last >= call.last), None)
            if around is not None and around is not call:
                break
        (around.children if around is not None and around is not call else tops).append(call)
    return tops


def _around(site: str) -> Iterable[str]:
    """Sites that may contain a site, innermost first.

    >>> list(_around("a.b/aten.mm"))
    ['a.b', 'a', '(root)']
    """
    if site.count(".") + site.count("/") > DEEPEST - 2:
        return  # deeper than a graph can be
    while True:
        before, sign, _ = site.rpartition("/" if "/" in site else ".")
        if not sign:
            break
        yield before
        site = before
    if site != "(root)":
        yield "(root)"


def _node(call: _Call) -> GraphNode:
    return GraphNode(
        _shown(call),
        call.kind or call.site,
        tuple(dict.fromkeys(call.inputs)),
        tuple(dict.fromkeys(call.outputs)),
        {},
        tuple(_node(child) for child in call.children),
        call.site,
        call.key[1],
    )


def _shown(call: _Call) -> str:
    return f"{call.site}#{call.key[1]}" if call.key[1] else call.site


def _digest(run: Run, record: Record) -> str:
    # Values are read only if the record has no digest.
    if record.digest or record.kept != "full" or run.lost(record):
        return record.digest
    try:
        raw = run.raw(record)
    except (DriftlineError, OSError):
        return ""
    if raw.nbytes > _LARGEST_READ:
        return ""
    from driftline.numerics.kernel import digest

    return digest(cast("Any", raw).view("uint8"))


# --- by the edges of a dump


def _by_edges(
    name: str, tree: Mapping[str, Any], records: Sequence[Record], format_name: str
) -> Graph:
    builder = _EdgeGraphBuilder(name, tree["edges"], records)
    roots = [builder.node(root, 0) for root in _with_operators(tree, builder.feeding)]
    nodes = tuple(child for root in roots for child in (root.children or (root,)))
    title = roots[0].kind if len(roots) == 1 and roots[0].kind != "Operation" else ""
    domain = "atb" if format_name.startswith("atb") else "graph"
    return Graph(title or "program", title or "Program", nodes, (), (), builder.tensors, domain)


class _EdgeGraphBuilder:
    """Makes nodes from the entries of a topology.

    Attributes:
        tensors: Shapes and types of the tensors of the nodes made so far, by name.
        feeding: Site → slot of an input → name of the tensor that feeds it.
    """

    def __init__(self, name: str, edges: Sequence[Any], records: Sequence[Record]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.feeding: dict[str, dict[str, str]] = {}
        self._name = name
        self._count = 0
        self._infos = {
            (r.key.site, r.key.port, r.key.slot): TensorInfo(r.dtype, r.shape) for r in records
        }
        self._outputs: dict[str, dict[str, None]] = {}
        # Both forms of edges are reduced to names of tensors.
        for edge in edges:
            source, out, to, slot = _edge(edge)
            self._outputs.setdefault(source, {})[out] = None
            self.feeding.setdefault(to, {})[slot] = f"{source}:{out}"
        for site, port, slot in self._infos:
            if port == "output":
                self._outputs.setdefault(site, {})[slot] = None

    def node(self, data: Mapping[str, Any], depth: int) -> GraphNode:
        """The node of an entry, with its children.

        Raises:
            BadFile: The topology is too deep or too large.
        """
        self._count += 1
        if depth > DEEPEST or self._count > MOST_NODES:
            raise BadFile(f"the topology of {self._name} is too deep or too large for a graph")
        site = str(data.get("site", ""))
        inputs, outputs = self._tensor_names(data, site)
        param = data.get("param")
        return GraphNode(
            site or str(data.get("class", "node")),
            str(data.get("class") or "Operation"),
            tuple(inputs),
            tuple(outputs),
            cast("Mapping[str, Any]", param) if isinstance(param, dict) else {},
            tuple(self.node(child, depth + 1) for child in data.get("children") or ()),
            site,
        )

    def _tensor_names(self, data: Mapping[str, Any], site: str) -> tuple[list[str], list[str]]:
        """Names of an entry's inputs and outputs; also stores their shapes and types."""
        named = bool(data.get("inputs") or data.get("outputs"))
        inputs = [str(tensor) for tensor in data.get("inputs") or ()]
        outputs = [str(tensor) for tensor in data.get("outputs") or ()]
        # In files without names of tensors, a tensor is named after its producer and slot.
        if not named:
            slots = self.feeding.get(site, {})
            inputs = [slots[slot] for slot in sorted(slots, key=_slot)]
            outputs = [f"{site}:{slot}" for slot in sorted(self._outputs.get(site, {}), key=_slot)]
        for port, names in (("input", inputs), ("output", outputs)):
            for index, tensor in enumerate(names):
                slot = str(index) if named or port == "input" else tensor.rpartition(":")[2]
                if (site, port, slot) in self._infos:
                    self.tensors.setdefault(tensor, self._infos[site, port, slot])
        return inputs, outputs


def _with_operators(
    tree: Mapping[str, Any], feeding: Mapping[str, Mapping[str, str]]
) -> list[Mapping[str, Any]]:
    """The roots of a tree, with the nodes of an exported graph inside their modules."""
    roots = [dict(root) for root in tree.get("roots") or ()]
    exported = tree.get("exported")
    if not isinstance(exported, Mapping) or not roots:
        return cast("list[Mapping[str, Any]]", roots)
    # The first module of a name holds the nodes; repeated calls share it.
    holders: dict[str, list[Any]] = {}
    below: list[dict[str, Any]] = list(roots)
    while below:
        holder = below.pop()
        children = [dict(child) for child in holder.get("children") or ()]
        holder["children"] = children
        holders.setdefault(str(holder.get("site", "")), children)
        below += children
    order: dict[int, int] = {}
    outermost = cast("list[Any]", roots[0]["children"])
    listed = cast("list[dict[str, Any]]", cast("Mapping[str, Any]", exported).get("nodes") or [])
    for number, node in enumerate(listed):
        site = str(node.get("site", ""))
        made = [f"{output}:0" for output in node.get("outputs") or (site,)]
        own = {"site": site, "class": node.get("class"), "outputs": made}
        # In the order of the feeding table, which is that of the file.
        own["inputs"] = list(feeding.get(site, {}).values())
        holders.get(site.rpartition("/")[0], outermost).append(own)
        order[id(own)] = number

    def first(data: Mapping[str, Any]) -> int:
        """Position of a part's first node; also sorts children by execution order."""
        number = order.get(id(data))
        if number is None:
            children = cast("list[Any]", data.get("children") or [])
            children.sort(key=first)
            number = order[id(data)] = min(map(first, children), default=-1)
        return number

    for root in roots:
        first(root)
    return cast("list[Mapping[str, Any]]", roots)


def _edge(edge: Any) -> tuple[str, str, str, str]:
    """The four texts of an edge: ATB stores edges as lists, graphs as objects."""
    if isinstance(edge, Mapping):
        data = cast("Mapping[str, Any]", edge)
        words = (data.get("from"), data.get("output"), data.get("to"), data.get("input"))
    else:
        words = tuple(cast("Sequence[Any]", edge))[:4]
    source, out, to, slot = (str(word) for word in words)
    return source, out, to, slot


def _slot(slot: str) -> tuple[int, str]:
    return (int(slot), slot) if slot.isdecimal() and len(slot) < 10 else (1 << 30, slot)


# Edges between sites, so that a page can show the producers and consumers of a site. Only sites are
# connected; tensors between them have no names here.


_MOST_READERS = 24
"""A tensor with more readers, such as a mask of all layers, says nothing about the flow."""
_MOST_EDGES = 200_000
_MOST_READ_FOR_SITES = 128 << 20
"""Most elements of tensors without digest: they must all be read to find equal ones."""


def site_edges(run: Run, rank: int = 0, process: int = 0, step: int | None = None) -> Any:
    """Edges between sites of one step; None if they are not known."""
    try:
        topology = run.topology(rank, process)
        # Without recorded edges the flow is found by equal bytes, which means reading everything.
        if _unread(run) > _MOST_READ_FOR_SITES and not (topology or {}).get("edges"):
            return None
        graph = run_graph(run, rank, process, step)
    except (DriftlineError, OSError, RecursionError):
        return None  # a page without arrows is better than none
    if graph is None:
        return None
    edges = _edges(graph.nodes)
    if not edges:
        return None
    sites = list(dict.fromkeys(site for edge in edges for site in edge))
    place = {site: index for index, site in enumerate(sites)}
    return {
        "source": "edges" if topology is not None and topology.get("edges") else "bytes",
        "sites": sites,
        "from": np.asarray([place[maker] for maker, _ in edges], np.uint32),
        "to": np.asarray([place[reader] for _, reader in edges], np.uint32),
    }


def _edges(nodes: tuple[GraphNode, ...]) -> list[tuple[str, str]]:
    """Pairs of sites (producer, consumer) that share a tensor, in order of execution."""
    makers: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for node in _walk(nodes):
        for name in node.outputs:
            makers.setdefault(name, []).append(node.site)
        for name in node.inputs:
            readers.setdefault(name, []).append(node.site)
    # A dict keeps the order of execution and drops repeated edges.
    edges: dict[tuple[str, str], None] = {}
    for name, makes in makers.items():
        reads = readers.get(name, [])
        if len(reads) > _MOST_READERS:
            continue
        for maker in makes:
            for reader in reads:
                if not _is_nested(maker, reader):
                    edges[maker, reader] = None
        # More arrows than this cannot be read, and a page must stay small.
        if len(edges) > _MOST_EDGES:
            break
    return list(edges)


def _unread(run: Run) -> int:
    return sum(
        math.prod(record.shape)
        for record in run.records
        if not record.digest and record.kept == "full"
    )


def _walk(nodes: tuple[GraphNode, ...]) -> Iterator[GraphNode]:
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if node.site:
            yield node
        waiting += reversed(node.children)


def _is_nested(site: str, other_site: str) -> bool:
    """Whether one site contains the other or is the same: a module does not feed its own parts."""
    if site == other_site or "(root)" in (site, other_site):
        return True
    # `layers.1` is not in `layers.10`: the next character must be a separator.
    longer, shorter = (site, other_site) if len(site) > len(other_site) else (other_site, site)
    return longer.startswith(shorter) and longer[len(shorter)] in "./"
