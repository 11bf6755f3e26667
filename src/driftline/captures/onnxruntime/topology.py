"""The topology of a captured ONNX model: module tree, edges, fusions; and the facts of its run.

A convolution, the batch norm and the activation after it become one node. The values of the first
two exist nowhere; the node's own value was computed from them, and can be compared at every module
that gives or takes it. Knows graphs and modules; no session, no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.graph import Graph, Node
from driftline.captures.onnxruntime.quantised import plain_name
from driftline.captures.onnxruntime.recorder import Observation, TracedGraph, slot_of
from driftline.captures.onnxruntime.scopes import MERGED, ROOT, ModuleCall, root_call
from driftline.captures.onnxruntime.sessions import SessionPlan
from driftline.captures.onnxruntime.torch_calls import count, line_ends, results, weighted_nodes
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.runs.sinks import JSON

_PLUMBING = ("ReorderInput", "ReorderOutput", "Cast", "Transpose")
"""Nodes that only lay out again, or widen, what they take."""
Place = tuple[str, int, str]
"""A module, which call of it, and the port."""
Tensor = tuple[str, int, str, str]
"""A place and the slot there."""
Meanings = Mapping[Tensor, tuple[float, float]]
"""Where integers were recorded → their scale and zero point."""


class MisreadNode(NamedTuple):
    """A node that reads integers for other numbers than they were made of.

    Attributes:
        site: Of the node.
        module: That it stands in.
        sentence: What it reads, and how.
        modules: Those that first take or give what is made of it.
    """

    site: str
    module: str
    sentence: str
    modules: tuple[str, ...]


class Integers(NamedTuple):
    """What a run computes with integers.

    Attributes:
        meanings: What recorded integers mean.
        rounded: Site → relative error that rounding its weights, or what it is given, explains.
        misread: Nodes that read integers for other numbers than they were made of.
        rectified: What modules give without what is below zero, because integers cut it off.
    """

    meanings: Meanings
    rounded: Mapping[str, float]
    misread: Sequence[MisreadNode] = ()
    rectified: Sequence[Tensor] = ()


class Fusion(NamedTuple):
    """A node that computes what several nodes of the exported graph did.

    Attributes:
        node: Site of the last value that it stands for.
        op: Its type.
        holds: What modules took and gave that it computes no longer.
        delivered: Modules' inputs and outputs at which its value can be compared instead.
    """

    node: str
    op: str
    holds: tuple[Place, ...]
    delivered: tuple[Tensor, ...]


def fusions(traced: TracedGraph) -> list[Fusion]:
    """Every node in which something is that modules took or gave."""
    holds: dict[int, dict[Place, None]] = {}
    deliveries: dict[str, dict[Tensor, None]] = {}
    for call in traced.modules:
        for place, number in _folded(call, traced):
            holds.setdefault(number, {}).setdefault(place)
        for value in call.outputs:
            slot = slot_of(value, call)
            deliveries.setdefault(value, {}).setdefault((call.site, call.visit, "output", slot))
        for value in call.inputs:
            deliveries.setdefault(value, {}).setdefault((call.site, call.visit, "input", value))
    for place, value in enumerate(traced.exported.outputs):
        deliveries.setdefault(value, {}).setdefault((ROOT, 0, "output", str(place)))
    return [
        Fusion(
            traced.site(values[-1]),
            traced.optimised.nodes[number].shown_op,
            tuple(held),
            tuple(dict.fromkeys(place for value in values for place in deliveries.get(value, ()))),
        )
        for number, held in sorted(holds.items())
        # A node that reads values of another name computes only a part of what it seems to hold.
        if (values := traced.lineage.gives[number]) and _is_whole(number, traced)
    ]


def _is_whole(number: int, traced: TracedGraph) -> bool:
    """Whether a node takes nothing but values of the exported graph.

    One that takes a value of another name computes less than it seems: who made that did the rest.
    """
    graph = traced.optimised
    for value in graph.data_inputs(graph.nodes[number]):
        while value not in traced.exported.maker and value not in graph.inputs:
            maker = graph.maker.get(value)
            if maker is None or graph.nodes[maker].op not in _PLUMBING:
                return False
            before = graph.data_inputs(graph.nodes[maker])
            if not before:  # a weight that was widened
                break
            value = before[0]
    return True


def _folded(call: ModuleCall, traced: TracedGraph) -> Iterator[tuple[Place, int]]:
    """What of a call is nowhere, with the node that it went into."""
    if not call.outputs:  # merged with its neighbour before any optimiser saw it
        holders = {traced.lineage.holder.get(number, -1) for number in call.nodes}
    else:
        holders = {_holder(value, traced) for value in call.outputs}
    # A module whose values went into several nodes has no single place to look at.
    if len(holders) == 1 and (number := holders.pop()) >= 0:
        yield (call.site, call.visit, "output"), number
    takers = {_holder(value, traced) for value in call.inputs}
    if len(takers) == 1 and (number := takers.pop()) >= 0:
        yield (call.site, call.visit, "input"), number
    if call.class_name == MERGED:
        # What it handed to the module that it was merged with is inside the same node.
        for number in call.nodes:
            scope = traced.names.scopes[number]
            if scope.module and number in traced.lineage.holder:
                yield (scope.module, call.visit, "input"), traced.lineage.holder[number]


def _holder(value: str, traced: TracedGraph) -> int:
    """The node that a value went into; -1 for one that is still there, or a constant."""
    maker = traced.exported.maker.get(value)
    if maker is None or traced.optimised.has_value(value):
        return -1
    return traced.lineage.holder.get(maker, -1)


# Topology: modules as a tree, edges between values, what was fused.


def module_tree(traced: TracedGraph) -> ModuleTree:
    """The modules that the exporter names; a model without any has nothing but its root."""
    classes = {call.site: call.class_name for call in traced.modules}
    below: dict[str, list[str]] = {}
    for path in classes:
        parent = path.rpartition(".")[0]
        # Modules without nodes of their own are not named by the exporter; children go one higher.
        while parent and parent not in classes:
            parent = parent.rpartition(".")[0]
        below.setdefault(parent, []).append(path)
    root = root_call(traced.exported, traced.names)

    def node(path: str, ids: str) -> ModuleNode:
        children = [
            (
                child[len(path) + 1 :] if path else child,
                node(child, f"{ids}_{index}" if ids else str(index)),
            )
            for index, child in enumerate(below.get(path, ()))
        ]
        return ModuleNode(
            path or ROOT, classes.get(path, root.class_name), ids, (), tuple(children)
        )

    return ModuleTree((node("", ""),))


def ids_of(tree: ModuleTree) -> dict[str, str]:
    """Site → place in the tree."""
    return {node.site: node.ids or "" for node in tree.walk()}


def topology(
    traced: TracedGraph,
    tree: ModuleTree,
    observations: Sequence[Observation],
    integers: Integers,
) -> dict[str, Any]:
    """The tree with the edges of the optimised graph, and what its nodes stand for."""
    nodes: list[dict[str, Any]] = []
    inside: dict[str, str] = {}
    torch_calls = _TorchCalls(traced)
    for number, node in enumerate(traced.optimised.nodes):
        made = [value for value in node.outputs if value]
        if node.op == "Constant" or not made:
            continue
        about = _described(node, made, traced) | torch_calls.of(made)
        gone = _gone(traced.lineage.members[number], traced)
        if gone:
            about["replaces"] = gone
            values = traced.lineage.gives[number]
            # The value that replaces what is gone, for readers who look for it.
            inside |= dict.fromkeys(gone, traced.site(values[-1]) if values else about["site"])
        nodes.append(about)
    fused_nodes = fusions(traced)
    for fusion in fused_nodes:
        for place, _, port in fusion.holds:
            # Inputs of modules are listed with the fusion itself.
            if port == "output":
                inside.setdefault(place, fusion.node)
    return {
        **ModuleTree(
            tree.roots, tuple(dict.fromkeys(observation.site for observation in observations))
        ).to_json(),
        "edges": _edges(traced),
        "exported": {
            "by": "onnx",
            "nodes": nodes,
            "inside": inside,
            "fusions": [
                {
                    "node": fusion.node,
                    "op": fusion.op,
                    "holds": [list(place) for place in fusion.holds],
                    "at": [list(place) for place in fusion.delivered],
                }
                for fusion in fused_nodes
            ],
            "integers": [[*place, *meaning] for place, meaning in integers.meanings.items()],
            "misread": [[*entry[:3], list(entry.modules)] for entry in integers.misread],
            "rounded": [[site, error] for site, error in integers.rounded.items()],
            "rectified": [list(place) for place in integers.rectified],
            "reads": _reads(traced.exported),
            "reworked": {c.site: traced.site(c.reworked) for c in traced.modules if c.reworked},
            "works": weighted_nodes(traced.exported, traced.names),
        },
    }


def _reads(graph: Graph) -> list[list[Any]]:
    """Every node of the exported graph: its name, what it reads, what it makes.

    A node without a name is called after its result.
    """
    return [
        [plain_name(node.name) or made[0], graph.data_inputs(node), made]
        for node in graph.nodes
        if (made := [value for value in node.outputs if value]) and node.op != "Constant"
    ]


def _edges(traced: TracedGraph) -> list[list[str]]:
    """Site and slot that a value comes from, site and slot that it goes to."""
    graph = traced.optimised
    edges: list[list[str]] = []
    for node in graph.nodes:
        made = [value for value in node.outputs if value]
        if node.op == "Constant" or not made:
            continue
        site = traced.site(made[0])
        for value in graph.data_inputs(node):
            # What no node makes comes from the caller, so the edge starts at the root.
            source = [traced.site(value), "0"] if value in graph.maker else [ROOT, value]
            edges.append([*source, site, value])
    return edges


def _described(node: Node, made: Sequence[str], traced: TracedGraph) -> dict[str, Any]:
    about: dict[str, Any] = {
        "site": traced.site(made[0]),
        "class": node.shown_op,
        "name": node.name,
        "values": list(made),
    }
    if node.domain:
        about["domain"] = node.domain
    if len(made) > 1:
        about["outputs"] = [traced.site(value) for value in made]
    return about


class _TorchCalls:
    """What torch's exporter says of the calls that nodes were made for."""

    def __init__(self, traced: TracedGraph) -> None:
        self._names = names = traced.names
        # Only torch's exporter writes calls; others leave the fields out.
        scopes = names.scopes if names.has_scopes else []
        self._calls = count(scopes)
        self._results = results(traced.exported, scopes) if scopes else {}
        self._ends = line_ends(traced.exported, scopes) if scopes else set[str]()

    def of(self, made: Sequence[str]) -> dict[str, Any]:
        """The fields of a node; values that are no result are steps on the way to one."""
        scope = self._names.scope(made[0])
        if not scope.operator or not self._names.has_scopes:
            return {}
        about = {"fx": scope.operator, "target": scope.target, "line": scope.line}
        calls = [self._call(value) for value in made]
        return {**about, "calls": calls} if any(calls) else about

    def _call(self, value: str) -> dict[str, Any]:
        """The call that a value is the result of; nothing for one that is none."""
        result = self._results.get(value)
        call = self._calls.get(result.call) if result is not None else None
        if result is None or call is None:
            return {}
        scope = self._names.scope(value)
        return {
            "target": scope.target,
            "line": scope.line,
            **call._asdict(),
            "slot": result.slot,
            "ends": value in self._ends,
        }


def _gone(members: Sequence[int], traced: TracedGraph) -> list[str]:
    """Sites of the values that a fused node no longer makes."""
    return [
        traced.names.site(value)
        for number in members
        for value in traced.exported.nodes[number].outputs
        if value
        and not traced.optimised.has_value(value)
        and traced.exported.nodes[number].op != "Constant"
    ]


# Facts of a run: versions, providers, the optimisation level, the model.


def facts(
    file: Path, files: Sequence[Path], plan: SessionPlan, traced: TracedGraph
) -> dict[str, JSON]:
    """What a run says of itself.

    Args:
        file: The model.
        files: It and what holds its weights.
        plan: How it is run.
        traced: The graph that was made of it.
    """
    return {
        "framework": "onnxruntime",
        "engine": {
            "name": "onnxruntime",
            "version": str(model_file.engine().__version__),
            "onnx": str(model_file.protobuf().__version__),
            "model": file.name,
            "model_digest": model_file.digest_of(list(files)),
            "optimize": plan.level,
            "providers": list(plan.providers),
            "threads": plan.threads,
            "parallel_nodes": plan.parallel_nodes,
            "session_config": dict(plan.config),
            "nodes": len(traced.optimised.nodes),
            "exported_nodes": len(traced.exported.nodes),
        },
        "devices": [name.removesuffix("ExecutionProvider").lower() for name in plan.providers],
    }
