"""What modules took and gave before a node made one of them: who lies inside which fusion.

A convolution, the batch norm and the activation after it become one node. What the first two gave
is computed nowhere; what the node gives was computed from it, and is there to be compared at every
module that gives or takes it. Knows graphs and modules; no session, no run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.recorder import Seen, Sight, slot_of
from driftline.captures.onnxruntime.scopes import MERGED, ROOT, ModuleCall, root_call
from driftline.captures.onnxruntime.sessions import SessionPlan
from driftline.captures.onnxruntime.stored_forms import codes_of
from driftline.captures.onnxruntime.torch_calls import count, line_ends, results, works
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.runs.sinks import JSON

_PLUMBING = ("ReorderInput", "ReorderOutput", "Cast", "Transpose")
"""Nodes that only lay out again, or widen, what they take."""
Place = tuple[str, int, str]
"""A module, which call of it, and the port."""
Tensor = tuple[str, int, str, str]
"""A place and the slot there."""


class Fusion(NamedTuple):
    """A node that computes what several nodes of the exported graph did.

    Attributes:
        node: Site of the last value that it stands for.
        op: Its type.
        holds: What modules took and gave that it computes no longer.
        at: Where what it gives is taken and given instead.
    """

    node: str
    op: str
    holds: tuple[Place, ...]
    at: tuple[Tensor, ...]


def fusions(seen: Seen) -> list[Fusion]:
    """Every node in which something lies that modules took or gave."""
    holds: dict[int, dict[Place, None]] = {}
    at: dict[str, dict[Tensor, None]] = {}
    for call in seen.modules:
        for place, number in _folded(call, seen):
            holds.setdefault(number, {}).setdefault(place)
        for value in call.outputs:
            slot = slot_of(value, call)
            at.setdefault(value, {}).setdefault((call.site, call.visit, "output", slot))
        for value in call.inputs:
            at.setdefault(value, {}).setdefault((call.site, call.visit, "input", value))
    for place, value in enumerate(seen.exported.outputs):
        at.setdefault(value, {}).setdefault((ROOT, 0, "output", str(place)))
    return [
        Fusion(
            seen.site(values[-1]),
            seen.optimised.nodes[number].op,
            tuple(held),
            tuple(dict.fromkeys(place for value in values for place in at.get(value, ()))),
        )
        for number, held in sorted(holds.items())
        if (values := seen.placed.gives[number]) and _is_whole(number, seen)
    ]


def _is_whole(number: int, seen: Seen) -> bool:
    """Whether a node takes nothing but values of the exported graph.

    One that takes a value of another name computes less than it seems: who made that did the rest.
    """
    graph = seen.optimised
    for value in graph.data_inputs(graph.nodes[number]):
        while value not in seen.exported.maker and value not in graph.inputs:
            maker = graph.maker.get(value)
            if maker is None or graph.nodes[maker].op not in _PLUMBING:
                return False
            before = graph.data_inputs(graph.nodes[maker])
            if not before:  # a weight that was widened
                break
            value = before[0]
    return True


def _folded(call: ModuleCall, seen: Seen) -> Iterator[tuple[Place, int]]:
    """What of a call is nowhere, with the node that it went into."""
    if not call.outputs:  # merged with its neighbour before any optimiser saw it
        holders = {seen.placed.holder.get(number, -1) for number in call.nodes}
    else:
        holders = {_holder(value, seen) for value in call.outputs}
    if len(holders) == 1 and (number := holders.pop()) >= 0:
        yield (call.site, call.visit, "output"), number
    takers = {_holder(value, seen) for value in call.inputs}
    if len(takers) == 1 and (number := takers.pop()) >= 0:
        yield (call.site, call.visit, "input"), number
    if call.class_name == MERGED:
        # What it handed to the module that it was merged with is inside the same node.
        for number in call.nodes:
            scope = seen.names.scopes[number]
            if scope.module and number in seen.placed.holder:
                yield (scope.module, call.visit, "input"), seen.placed.holder[number]


def _holder(value: str, seen: Seen) -> int:
    """The node that a value went into; -1 for one that is still there, or a constant."""
    maker = seen.exported.maker.get(value)
    if maker is None or seen.optimised.known(value):
        return -1
    return seen.placed.holder.get(maker, -1)


# The topology of a captured ONNX model: its modules as a tree, who feeds whom, what was fused.


def module_tree(seen: Seen) -> ModuleTree:
    """The modules that the exporter names; a model without any has nothing but its root."""
    classes = {call.site: call.class_name for call in seen.modules}
    below: dict[str, list[str]] = {}
    for path in classes:
        parent = path.rpartition(".")[0]
        while parent and parent not in classes:
            parent = parent.rpartition(".")[0]
        below.setdefault(parent, []).append(path)
    root = root_call(seen.exported, seen.names)

    def node(path: str, ids: str) -> ModuleNode:
        children = [
            (
                child[len(path) + 1 :] if path else child,
                node(child, f"{ids}_{at}" if ids else str(at)),
            )
            for at, child in enumerate(below.get(path, ()))
        ]
        return ModuleNode(
            path or ROOT, classes.get(path, root.class_name), ids, (), tuple(children)
        )

    return ModuleTree((node("", ""),))


def ids_of(tree: ModuleTree) -> dict[str, str]:
    """Site → place in the tree."""
    return {node.site: node.ids or "" for node in tree.walk()}


def topology(seen: Seen, tree: ModuleTree, found: Sequence[Sight]) -> dict[str, Any]:
    """The tree with the edges of the optimised graph, and what its nodes stand for."""
    edges: list[list[str]] = []
    nodes: list[dict[str, Any]] = []
    graph = seen.optimised
    inside: dict[str, str] = {}
    told = _Told(seen)
    for number, node in enumerate(graph.nodes):
        made = [value for value in node.outputs if value]
        if node.op == "Constant" or not made:
            continue
        site = seen.site(made[0])
        for value in graph.data_inputs(node):
            if value in graph.maker:
                edges.append([seen.site(value), "0", site, value])
            else:
                edges.append([ROOT, value, site, value])
        members = seen.placed.members[number]
        about: dict[str, Any] = {"site": site, "class": node.op, "name": node.name}
        about["values"] = made
        if node.domain:
            about["domain"] = node.domain
        if len(made) > 1:
            about["outputs"] = [seen.site(value) for value in made]
        about |= told.of(made)
        gone = _gone(members, seen)
        if gone:
            about["replaces"] = gone
            given = seen.placed.gives[number]
            inside |= dict.fromkeys(gone, seen.site(given[-1]) if given else site)
        nodes.append(about)
    together = fusions(seen)
    for fusion in together:
        for place, _, port in fusion.holds:
            if port == "output":
                inside.setdefault(place, fusion.node)
    return {
        **ModuleTree(tree.roots, tuple(dict.fromkeys(sight.site for sight in found))).to_json(),
        "edges": edges,
        "exported": {
            "by": "onnx",
            "nodes": nodes,
            "inside": inside,
            "fusions": [
                {
                    "node": fusion.node,
                    "op": fusion.op,
                    "holds": [list(place) for place in fusion.holds],
                    "at": [list(place) for place in fusion.at],
                }
                for fusion in together
            ],
            "codes": {
                seen.site(value): [code.of, code.scale, code.zero, code.dtype]
                for value, code in codes_of(seen.exported).items()
                if seen.exported.known(value)
            },
            "reworked": {c.site: seen.site(c.reworked) for c in seen.modules if c.reworked},
            "works": works(seen.exported, seen.names),
        },
    }


class _Told:
    """What torch's exporter says of the calls that nodes were made for."""

    def __init__(self, seen: Seen) -> None:
        self._names = names = seen.names
        scopes = names.scopes if names.told else []
        self._calls = count(scopes)
        self._results = results(seen.exported, scopes) if scopes else {}
        self._ends = line_ends(seen.exported, scopes) if scopes else set[str]()

    def of(self, made: Sequence[str]) -> dict[str, Any]:
        """The fields of a node; values that are no result are steps on the way to one."""
        scope = self._names.scope(made[0])
        if not scope.operator or not self._names.told:
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


def _gone(members: Sequence[int], seen: Seen) -> list[str]:
    """Sites of the values that a fused node no longer makes."""
    return [
        seen.names.site(value)
        for number in members
        for value in seen.exported.nodes[number].outputs
        if value
        and not seen.optimised.known(value)
        and seen.exported.nodes[number].op != "Constant"
    ]


# What identifies a run of ONNX Runtime: versions, providers, the optimisation level, the model.


def facts(file: Path, files: Sequence[Path], plan: SessionPlan, seen: Seen) -> dict[str, JSON]:
    """What a run says of itself.

    Args:
        file: The model.
        files: It and what holds its weights.
        plan: How it is run.
        seen: The graph that was made of it.
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
            "nodes": len(seen.optimised.nodes),
            "exported_nodes": len(seen.exported.nodes),
        },
        "devices": [name.removesuffix("ExecutionProvider").lower() for name in plan.providers],
    }
