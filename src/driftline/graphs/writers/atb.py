"""ATB's topology files (`layer/*.json` and `model/*.json`): read as graphs, and written from
graphs.

Shapes and types of tensors come from the operation csv, if the file is part of a dump that has one.
Damaged files raise errors with a sentence. The caller reads the text; the path is only for
messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from driftline.errors import BadFile
from driftline.graphs.model import DEEPEST, MOST_NODES, Graph, GraphNode, TensorInfo

# Limits for foreign files: far above what a model needs, and small enough to read.
LARGEST = 64 << 20
_MOST_TENSORS = 4096
_LONGEST_NAME = 4096
Shapes = Mapping[str, tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]]
"""Name of an operation → shapes and types of its inputs and outputs."""


def atb_graph(text: str, where: str, shapes: Shapes | None = None) -> Graph:
    """The graph of a topology file.

    Args:
        text: Content of the file.
        where: Path of the file, for messages.
        shapes: Shapes from an operation csv.

    Raises:
        BadFile: The file is not a topology, or is damaged.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise BadFile(f"{where} is nested more than {DEEPEST} levels deep") from None
    except ValueError as trouble:
        raise BadFile(f"{where} is no JSON: {str(trouble)[:200]}") from None
    if not isinstance(content, dict):
        raise BadFile(f"{where} is no topology: it holds no JSON object")
    top = cast("Mapping[str, Any]", content)
    name = _text(top.get("modelName")) or _text(top.get("opName"))
    if not name or not ("nodes" in top or "inTensors" in top):
        raise BadFile(
            f"{where} is no topology of the ATB library",
            hint="such a file has modelName or opName, inTensors, outTensors and nodes; "
            "`dump --type model layer` writes them",
        )
    reader = _TopologyReader(where, shapes or {})
    model = reader.node(top, 0)
    weights = reader.names(top.get("weightTensors"))
    # A file of a single operation has no nodes; the operation is then its only node.
    nodes = model.children or (model,)
    return Graph(
        name,
        _text(top.get("opType")) or name,
        nodes,
        (*model.inputs, *weights),
        model.outputs,
        reader.tensors,
        "atb",
    )


class _TopologyReader:
    """Reads nodes and tensors of one topology file, within limits."""

    def __init__(self, where: str, shapes: Shapes) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._where = where
        self._shapes = shapes
        self._count = 0

    def node(self, content: Mapping[str, Any], depth: int) -> GraphNode:
        if depth > DEEPEST:
            raise BadFile(f"{self._where} is nested more than {DEEPEST} levels deep")
        self._count += 1
        if self._count > MOST_NODES:
            raise BadFile(f"{self._where} has more than {MOST_NODES} nodes")
        name, kind = _text(content.get("opName")), _text(content.get("opType"))
        inputs, outputs = (self.names(content.get(k)) for k in ("inTensors", "outTensors"))
        infos_of = self._shapes.get(name)
        if infos_of is not None:
            for names, infos in zip((inputs, outputs), infos_of, strict=True):
                # If the numbers of tensors differ, the line belongs to another operation of the
                # same name.
                if len(names) == len(infos):
                    for tensor, info in zip(names, infos, strict=True):
                        self.tensors.setdefault(tensor, info)
        param = content.get("param")
        return GraphNode(
            name or kind,
            kind or name,
            inputs,
            outputs,
            cast("Mapping[str, Any]", param) if isinstance(param, dict) else {},
            tuple(self.node(child, depth + 1) for child in self._nodes(content.get("nodes"))),
        )

    def names(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            raise BadFile(f"{self._where} is damaged: a list of tensors is no list")
        names = cast("list[object]", value)
        # A list of weights is longer than the operands of a node, hence the larger limit.
        if len(names) > _MOST_TENSORS * 16:
            raise BadFile(f"{self._where} lists {len(names)} tensors in one place")
        if not all(isinstance(name, str) for name in names):
            raise BadFile(f"{self._where} is damaged: the name of a tensor is no text")
        return tuple(str(name)[:_LONGEST_NAME] for name in names)

    def _nodes(self, value: object) -> list[Mapping[str, Any]]:
        if value is None:
            return []
        if not isinstance(value, list) or not all(
            isinstance(node, dict) for node in cast("list[object]", value)
        ):
            raise BadFile(f"{self._where} is damaged: nodes is no list of objects")
        return cast("list[Mapping[str, Any]]", value)


def _text(value: object) -> str:
    return value[:_LONGEST_NAME] if isinstance(value, str) else ""


def layers_of(graph: Graph) -> list[GraphNode]:
    """The layers of a model: the outermost members of lists, otherwise its modules, otherwise
    itself.

    A member of a list has a number as its name: `model.layers.3`.
    """
    layers: list[GraphNode] = []

    def look(nodes: tuple[GraphNode, ...], depth: int) -> None:
        for node in nodes:
            if not node.children:
                continue
            if node.site.rpartition(".")[2].isdecimal():
                layers.append(node)
            elif depth < DEEPEST:
                look(node.children, depth + 1)

    look(graph.nodes, 0)
    # Without lists and modules, the model itself is the only layer.
    model = GraphNode(graph.name, graph.kind, graph.inputs, graph.outputs, {}, graph.nodes)
    return layers or [node for node in graph.nodes if node.children] or [model]


def layer_graph(graph: Graph, layer: GraphNode) -> Graph:
    """One layer as a separate graph."""
    return graph._replace(
        name=layer.name,
        kind=layer.kind,
        nodes=layer.children or (layer,),
        inputs=layer.inputs,
        outputs=layer.outputs,
        notes=(),
    )


def model_json(graph: Graph) -> str:
    """A graph in the form of ATB's `model/{pid}/{name}.json`."""
    # Tensors that no node makes and that are not inputs of the model must be weights.
    weights = [name for name in _inputs_of_nodes(graph) if name not in graph.inputs]
    content = {
        "modelName": graph.name,
        "inTensors": list(graph.inputs),
        "outTensors": list(graph.outputs),
        "weightTensors": weights,
        "nodes": [_as_json(node) for node in graph.nodes],
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def layer_json(layer: GraphNode) -> str:
    """A layer in the form of ATB's `layer/{pid}/{name}.json`."""
    return json.dumps(_as_json(layer), separators=(",", ":")) + "\n"


def _as_json(node: GraphNode) -> dict[str, Any]:
    data: dict[str, Any] = {"opName": node.name, "opType": node.kind, "param": dict(node.param)}
    for key, names in (("inTensors", node.inputs), ("outTensors", node.outputs)):
        if names:
            data[key] = list(names)
    if node.children:
        data["nodes"] = [_as_json(child) for child in node.children]
    return data


def _inputs_of_nodes(graph: Graph) -> list[str]:
    """Tensors that nodes read and no node makes."""
    read: dict[str, None] = {}
    made: set[str] = set()
    waiting = list(graph.nodes)
    while waiting:
        node = waiting.pop(0)
        read.update(dict.fromkeys(node.inputs))
        made.update(node.outputs)
        waiting += node.children
    return [name for name in read if name not in made]
