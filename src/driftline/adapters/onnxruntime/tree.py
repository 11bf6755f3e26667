"""The topology of a captured ONNX model: its modules as a tree, who feeds whom, what was fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from driftline.adapters.onnxruntime.calls import count, line_ends, results
from driftline.adapters.onnxruntime.codes import codes_of
from driftline.adapters.onnxruntime.folding import fusions
from driftline.adapters.onnxruntime.modules import root_call
from driftline.adapters.onnxruntime.names import ROOT
from driftline.adapters.onnxruntime.recording import Seen, Sight
from driftline.adapters.onnxruntime.works import works
from driftline.topology.tree import ModuleNode, ModuleTree


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
