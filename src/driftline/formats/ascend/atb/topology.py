"""Combine topology files and folder names of an ATB dump into a module tree with parameters and
edges.

Folders give the operations that ran, and their sites; `layer/*.json` and `model/*.json` add
operations that left no tensor, parameters, and edges. A model file numbers operations by the
model's own count, which an extra operation shifts against the folders; the shift is found by
comparing types. This file knows values, but no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from driftline.formats.ascend.atb.folders import OperationFolder, kind_of, shown
from driftline.runs.sinks import JSON

ROOT = "(root)"
_DEEPEST = 64
# Small shifts first, so that the smaller one is chosen among equal fits.
_SHIFTS = (0, 1, -1, 2, -2, 3, -3, 4, -4)

Object = Mapping[str, Any]
Edge = tuple[str, str, str, str]
"""Site and output slot of the maker, site and input slot of the reader."""


class Node:
    """An operation of the program."""

    __slots__ = ("children", "ids", "inputs", "kind", "outputs", "param", "site")

    def __init__(self, site: str, kind: str, ids: str) -> None:
        self.site = site
        self.kind = kind
        self.ids = ids
        self.param: Object | None = None
        self.inputs: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.children: dict[str, Node] = {}

    def to_json(self, name: str = "") -> dict[str, JSON]:
        data: dict[str, JSON] = {"name": name} if name else {}
        data |= {"site": self.site, "class": self.kind, "ids": self.ids}
        if self.param is not None:
            data["param"] = dict(self.param)
        if self.inputs or self.outputs:
            data["inputs"] = list(self.inputs)
            data["outputs"] = list(self.outputs)
        if self.children:
            data["children"] = [
                child.to_json(key) for key, child in sorted(self.children.items(), key=_by_id)
            ]
        return data


class Topology:
    """The operations of one process, from folders and from topology files."""

    def __init__(self) -> None:
        self._top = Node(ROOT, "", "")
        self._models: dict[str, list[str]] = {}
        # A dictionary keeps the order of insertion and drops repeats.
        self._edges: dict[Edge, None] = {}
        self._sites: dict[str, Node] = {}

    def add_folders(self, top: OperationFolder) -> None:
        """Add the operations of one execution, nested like their folders."""
        self._add_folders(top, self._top)

    def _add_folders(self, folder: OperationFolder, node: Node) -> None:
        for child in folder.children.values():
            self._add_folders(child, self._child(node, child.name, child.site))

    def _child(self, above: Node, name: str, site: str) -> Node:
        node = above.children.get(name)
        if node is None:
            number = name.partition("_")[0]
            own = number if number.isdecimal() else ""
            ids = f"{above.ids}_{own}" if above.ids else own
            node = above.children[name] = self._sites[site] = Node(site, kind_of(name), ids)
        return node

    def add_layer(self, content: Object) -> None:
        """Add a layer file: one outermost operation, numbered like its folder."""
        kind = _text(content.get("opType"))
        number = _last_number(_text(content.get("opName")), kind)
        if kind and number is not None:
            self._add(self._top, content, f"{number}_{kind}", 0)
            self._wire([content], [f"{number}_{kind}"], {})

    def add_model(self, content: Object) -> None:
        """Add a model file: the outermost operations in the model's own order."""
        name = _text(content.get("modelName"))
        nodes = [node for node in _objects(content.get("nodes")) if _text(node.get("opType"))]
        # An operation without a number cannot be matched to a folder and is left out.
        numbered = [(_last_number(_text(n.get("opName")), _text(n["opType"])), n) for n in nodes]
        counted = [(number, node) for number, node in numbered if number is not None]

        def fits(shift: int) -> int:
            return sum(
                f"{c + shift}_{_text(n['opType'])}" in self._top.children for c, n in counted
            )

        # The shift for which most operations have a folder of the same type and number.
        shift = max(_SHIFTS, key=fits) if counted else 0
        names = [f"{number + shift}_{_text(node['opType'])}" for number, node in counted]
        for folder, (_, node) in zip(names, counted, strict=True):
            self._add(self._top, node, folder, 0)
        self._wire([node for _, node in counted], names, {})
        self._models[name] = names

    def _add(self, above: Node, content: Object, name: str, depth: int) -> None:
        site = name if above is self._top else f"{above.site}.{name}"
        node = self._child(above, name, site)
        param = content.get("param")
        # The first file counts, and layer files are read before model files.
        if isinstance(param, dict) and node.param is None:
            node.param = cast("Object", param)
        node.inputs = tuple(_texts(content.get("inTensors")))
        node.outputs = tuple(_texts(content.get("outTensors")))
        # Recursion is limited, because the file is not trusted.
        if depth < _DEEPEST:
            for index, inner in enumerate(_objects(content.get("nodes"))):
                self._add(node, inner, _name_of(inner, index), depth + 1)

    def _wire(self, nodes: Sequence[Object], names: Sequence[str], made: dict[str, Edge]) -> None:
        """Add edges between operations of one container, and between leaves anywhere."""
        for edge in _edges(nodes, names, "", made, 0):
            self._edges[edge] = None

    def node(self, site: str) -> Node | None:
        return self._sites.get(site)

    def nodes(self) -> Iterator[Node]:
        yield from self._sites.values()

    def to_json(self, order: Sequence[str]) -> dict[str, JSON]:
        """The content of `topology.json`, with `param`, tensor names and `edges` added."""
        rest = dict(self._top.children)
        roots: list[dict[str, JSON]] = []
        for model, names in sorted(self._models.items(), key=_by_first):
            # A single model is the root; of several models, each keeps its own name.
            alone = len(self._models) == 1
            root = Node(ROOT if alone else model, model, "")
            members = list(rest) if alone else names
            root.children = {name: rest.pop(name) for name in members if name in rest}
            roots.append(root.to_json())
        if not self._models:
            self._top.children = rest
            roots.append(self._top.to_json())
        else:
            roots += [node.to_json() for _, node in sorted(rest.items(), key=_by_id)]
        edges: list[JSON] = [list(edge) for edge in self._edges]
        return {"schema": 1, "roots": cast("JSON", roots), "order": list(order), "edges": edges}


def _edges(
    nodes: Sequence[Object], names: Sequence[str], above: str, leaves: dict[str, Edge], depth: int
) -> Iterator[Edge]:
    siblings: dict[str, Edge] = {}
    for name, node in zip(names, nodes, strict=True):
        site = f"{above}.{name}" if above else name
        inner = _objects(node.get("nodes"))
        for slot, tensor in enumerate(_texts(node.get("inTensors"))):
            # A container reads from its neighbours; a leaf may also read from a leaf in another
            # container.
            makers = (siblings, leaves) if not inner else (siblings,)
            for maker in makers:
                if tensor in maker:
                    yield (*maker[tensor][:2], site, str(slot))
        if inner and depth < _DEEPEST:
            inside = [_name_of(child, index) for index, child in enumerate(inner)]
            yield from _edges(inner, inside, site, leaves, depth + 1)
        for slot, tensor in enumerate(_texts(node.get("outTensors"))):
            # Set after the inputs are read: an operation that overwrites its input does not feed
            # itself.
            siblings[tensor] = (site, str(slot), "", "")
            if not inner:
                leaves[tensor] = siblings[tensor]


def _name_of(node: Object, index: int) -> str:
    kind = _text(node.get("opType")) or "operation"
    number = _last_number(_text(node.get("opName")), kind)
    return f"{index if number is None else number}_{kind}"


def _last_number(name: str, kind: str) -> int | None:
    """The last id in an operation's name: 3 in `RmsNormOperation_1_3`."""
    last = name.rpartition("_")[2]
    return (
        int(last) if name.startswith(f"{kind}_") and last.isdecimal() and len(last) < 10 else None
    )


def _by_id(item: tuple[str, Node]) -> tuple[int, str]:
    return (_first_number(item[0]), item[0])


def _by_first(model: tuple[str, list[str]]) -> int:
    """Sort key: operations are numbered in the order in which they were first set up."""
    return _first_number(model[1][0] if model[1] else "")


def _first_number(name: str) -> int:
    number = name.partition("_")[0]
    return int(number) if number.isdecimal() and len(number) < 10 else 1 << 30


def _text(value: object) -> str:
    return shown(value) if isinstance(value, str) else ""


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        return []
    return [item for item in cast("list[object]", value) if isinstance(item, str)]


def _objects(value: object) -> list[Object]:
    if not isinstance(value, list):
        return []
    return [cast("Object", item) for item in cast("list[object]", value) if isinstance(item, dict)]
