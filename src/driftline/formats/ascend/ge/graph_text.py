"""The graph text of a GE dump (`dynamo_original_graph_*.txt`): operators, edges, FX names.

It is a `GraphDef` in protobuf text form, of which only the fields for alignment are kept. A text
that cannot be read raises `NotText`; the dump can be read without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.formats.ascend.protobuf import NotText, unquoted, walk

LONGEST = 256 << 20
FX_NAME = "_fx_tensor_name"

_FILE = re.compile(r"dynamo_(original|optimi[sz]ed)_.*\.txt", re.ASCII)
_ID = re.compile(r"graph_(\d+)", re.ASCII)
_RANK = re.compile(r"_rank_(\d+)", re.ASCII)
_STAMP = re.compile(r"(\d{14,20})\.txt$", re.ASCII)


class GraphNode(NamedTuple):
    """One operator of a graph.

    Attributes:
        name: Name of the operator.
        class_name: Type of the operator.
        inputs: Producer and output number of each data input, in order, without control edges.
        fx: The FX tensor of each output (`add_2-aten.add.Tensor.OUTPUT.0`), or "".
    """

    name: str
    class_name: str
    inputs: tuple[tuple[str, int], ...] = ()
    fx: tuple[str, ...] = ()


class GraphText(NamedTuple):
    """The name of a graph text, parsed.

    Attributes:
        file: Path of the file, relative to the dump.
        original: Whether the graph is that of the program, rather than after optimisation.
        graph_id: Number of the graph; None if the name has none.
        rank: Rank; None if the name has none.
        stamp: Time of writing, as digits.
    """

    file: str
    original: bool
    graph_id: int | None
    rank: int | None
    stamp: str


def graph_text_of(file: str) -> GraphText | None:
    """Parse the name of a file; None if it is not that of a graph text."""
    name = file.rpartition("/")[2]
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    # Each of the three may be missing, depending on the writer.
    number, rank, stamp = _ID.search(name), _RANK.search(name), _STAMP.search(name)
    return GraphText(
        file,
        match[1] == "original",
        int(number[1][:18]) if number else None,
        int(rank[1][:18]) if rank else None,
        stamp[1] if stamp else "",
    )


_ATTRIBUTE_KEY = ("op", "output_desc", "attr", "key")
_ATTRIBUTE_TEXT = ("op", "output_desc", "attr", "value", "s")


def parse_graph(text: str) -> list[GraphNode]:
    """The operators of a graph, in order.

    Raises:
        NotText: The text is not a protobuf text, or has no operators.
    """
    nodes: list[GraphNode] = []
    path: list[str] = []
    name = class_name = key = value = ""
    inputs: list[tuple[str, int]] = []
    fx: list[str] = []
    for kind, field, token in walk(text):
        # Events instead of a tree: the text of a large graph is read in one pass, without objects
        # for the parts that are not needed.
        if kind == "open":
            path.append(field)
            if path == ["op"]:
                name = class_name = ""
                inputs, fx = [], []
            # One entry per output, so that its position in the list is the output's number.
            elif path == ["op", "output_desc"]:
                fx.append("")
            elif path == ["op", "output_desc", "attr"]:
                key = value = ""
        elif kind == "close":
            if path == ["op"]:
                nodes.append(GraphNode(name, class_name, tuple(inputs), tuple(fx)))
            elif path == ["op", "output_desc", "attr"] and key == FX_NAME:
                fx[-1] = value
            path.pop()
        elif path == ["op"]:
            if field == "name":
                name = unquoted(token)
            elif field == "type":
                class_name = unquoted(token)
            elif field == "input" and (edge := _edge(unquoted(token))) is not None:
                inputs.append(edge)
        elif (*path, field) == _ATTRIBUTE_KEY:
            key = unquoted(token)
        elif (*path, field) == _ATTRIBUTE_TEXT:
            value = unquoted(token)
    # A valid text without operators is another kind of message.
    if not nodes:
        raise NotText("it holds no operator")
    return nodes


def _edge(written: str) -> tuple[str, int] | None:
    """Parse `Add_2:0` as producer and output number; None for a control edge (`Add_2:-1`)."""
    source, colon, number = written.rpartition(":")
    if not colon:
        # Without a number, the first output is meant; `^` marks control edges in this spelling.
        return (written, 0) if written and not written.startswith("^") else None
    if not number.isascii() or not number.isdigit():
        return None
    return source, int(number[:9])


def as_json(
    name: str, prefix: str, source: str, kind: str, nodes: Sequence[GraphNode]
) -> dict[str, Any]:
    """A graph as it is stored in a topology, under `graphs`."""
    return {
        "kind": kind,
        "name": name,
        "prefix": prefix,
        "source": source,
        "nodes": [
            {"name": n.name, "class": n.class_name, "inputs": list(map(list, n.inputs)), "fx": n.fx}
            for n in nodes
        ],
    }


def topology(graphs: Sequence[Mapping[str, Any]], classes: Mapping[str, str]) -> dict[str, Any]:
    """Graphs in the form of `topology.json`: a root for each graph, its operators, their edges.

    Args:
        graphs: Graphs made by `as_json`.
        classes: Site → class for all dumped operators, in execution order.
    """
    roots: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    listed: set[str] = set()
    for graph in graphs:
        prefix = cast("str", graph["prefix"])
        children: list[dict[str, Any]] = []
        for node in graph["nodes"]:
            site = prefix + node["name"]
            listed.add(site)
            children.append(_child(node["name"], site, node["class"]))
            edges += [
                {"from": prefix + source, "output": output, "to": site, "input": position}
                for position, (source, output) in enumerate(node["inputs"])
            ]
        # Dumped operators that are missing in the text still belong to the graph.
        for site, class_name in classes.items():
            if site.startswith(prefix) and site not in listed:
                listed.add(site)
                children.append(_child(site[len(prefix) :], site, class_name))
        root = {"site": prefix.rstrip(".") or graph["name"] or "graph", "class": "Graph"}
        roots.append({**root, "ids": None, "children": children})
    return {
        "schema": 1,
        "roots": roots,
        "order": list(classes),
        "edges": edges,
        "graphs": list(graphs),
    }


def _child(name: str, site: str, class_name: str) -> dict[str, Any]:
    return {"name": name, "site": site, "class": class_name, "ids": None}
