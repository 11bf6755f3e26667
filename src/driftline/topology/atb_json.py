"""ATB's topology files, `layer/*.json` and `model/*.json`, as graphs; hostile ones as sentences.

Shapes and types of tensors come from the operation csv, if the file lies in a dump that has one.
The text is given; which file it came from is known for messages only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from driftline.errors import BadFile
from driftline.topology.graph import DEEPEST, MOST_NODES, Graph, GraphNode, TensorInfo

LARGEST = 256 << 20
_MOST_TENSORS = 4096
_LONGEST_NAME = 4096
Shapes = Mapping[str, tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]]
"""By the name of an operation: what its inputs and outputs are."""


def atb_graph(text: str, where: str, shapes: Shapes | None = None) -> Graph:
    """The graph of a topology file.

    Args:
        text: Its content.
        where: Its name, for messages.
        shapes: What an operation csv says.

    Raises:
        BadFile: It is no such file, or not to be believed.
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
    reading = _Reading(where, shapes or {})
    whole = reading.node(top, 0)
    weights = reading.names(top.get("weightTensors"))
    nodes = whole.children or (whole,)
    return Graph(
        name,
        _text(top.get("opType")) or name,
        nodes,
        (*whole.inputs, *weights),
        whole.outputs,
        reading.tensors,
        "atb",
    )


class _Reading:
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
        known = self._shapes.get(name)
        if known is not None:
            for names, infos in zip((inputs, outputs), known, strict=True):
                # Another number of tensors is another operation of the same name.
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
        given = cast("list[object]", value)
        if len(given) > _MOST_TENSORS * 16:
            raise BadFile(f"{self._where} lists {len(given)} tensors in one place")
        if not all(isinstance(name, str) for name in given):
            raise BadFile(f"{self._where} is damaged: the name of a tensor is no text")
        return tuple(str(name)[:_LONGEST_NAME] for name in given)

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
