"""Files for Google's Model Explorer: the graph as JSON, and numbers or statuses of its nodes.

The graph file is a collection of one graph; the data files map nodes to errors or statuses. This
file does not know how a comparison is made; the caller passes a finding for each site.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from driftline.graphs.model import LevelGraph, LevelNode, TensorInfo
from driftline.graphs.overlay import Finding, finding_of
from driftline.graphs.writers.onnx import flat_parameters, in_words

_INPUTS = "inputs"
# Longer values would fill the viewer's panel of attributes.
_LONGEST = 400
_COLOURS = {"fail": "#d93025", "incomparable": "#f9ab00", "pass": "#34a853"}


def model_explorer(graph: LevelGraph, findings: Mapping[str, Finding] | None = None) -> str:
    """Return the graph as JSON text.

    Args:
        graph: The graph.
        findings: Findings by site; a node without one gets the worst finding inside it.
    """
    makers = {name: (node.name, str(i)) for node in graph.nodes for i, name in _numbered(node)}
    nodes = [
        {
            "id": name,
            "label": name,
            "namespace": _INPUTS,
            "attrs": [],
            "incomingEdges": [],
            "outputsMetadata": [_metadata("0", name, graph.tensors.get(name))],
        }
        for name in graph.inputs
    ]
    used_ids = {str(node["id"]) for node in nodes}
    # Ids are unique over nodes and inputs, because edges refer to both.
    ids = {node.name: _unused_id(node.name, used_ids) for node in graph.nodes}
    for node in graph.nodes:
        finding = finding_of(node, findings or {})
        shown: dict[str, Any] = {
            "id": ids[node.name],
            "label": node.kind,
            # A slash separates levels in the viewer, so slashes in names are replaced.
            "namespace": "/".join(part.replace("/", "_") for part in node.path),
            "attrs": [_pair(key, value) for key, value in flat_parameters(node.param)],
            "incomingEdges": [
                {
                    "sourceNodeId": ids[makers[name][0]] if name in makers else name,
                    "sourceNodeOutputId": makers[name][1] if name in makers else "0",
                    "targetNodeInputId": str(index),
                }
                for index, name in enumerate(node.inputs)
            ],
            "inputsMetadata": [
                {"id": str(index), "attrs": [_pair("__tensor_tag", name)]}
                for index, name in enumerate(node.inputs)
            ],
            "outputsMetadata": [
                _metadata(str(index), name, graph.tensors.get(name))
                for index, name in _numbered(node)
            ],
        }
        if node.site:
            shown["attrs"].append(_pair("site", node.site))
        if node.holds:
            shown["attrs"].append(_pair("operators inside", node.holds))
        if finding is not None:
            shown["attrs"].append(_pair("status", finding.status))
            shown["attrs"] += [_pair(key, _number(value)) for key, value in finding.figures.items()]
            shown["attrs"].append(_pair("comparison", f"{finding.status}: {finding.text}"))
            if finding.status in _COLOURS:
                shown["style"] = {"backgroundColor": _COLOURS[finding.status]}
        nodes.append(shown)
    content = {"label": graph.name, "graphs": [{"id": graph.name, "nodes": nodes}]}
    return json.dumps(content, allow_nan=False) + "\n"


def node_data(graph: LevelGraph, findings: Mapping[str, Finding], name: str = "") -> str:
    """Numbers for the nodes, in Model Explorer's format for node data.

    Infinity becomes the largest finite number, because the format allows only finite numbers.

    Args:
        graph: The graph.
        findings: Findings by site, as for the graph.
        name: Name of the data.
    """
    results: dict[str, Any] = {}
    for own, finding in _findings_of(graph, findings):
        if not math.isnan(finding.value):
            # JSON has no infinity.
            value = max(-sys.float_info.max, min(sys.float_info.max, finding.value))
            results[own] = {"value": value, **_coloured(finding)}
    return _data(graph, {"name": name, "results": results} if name else {"results": results})


def status_data(graph: LevelGraph, findings: Mapping[str, Finding]) -> str:
    """Statuses of the nodes as words; the viewer counts them for groups of nodes."""
    results = {
        own: {"value": finding.status, **_coloured(finding)}
        for own, finding in _findings_of(graph, findings)
    }
    content = {"name": "status", "results": results, "showExpandedSummaryOnGroupNode": True}
    return _data(graph, content)


def _findings_of(
    graph: LevelGraph, findings: Mapping[str, Finding]
) -> Iterator[tuple[str, Finding]]:
    # Ids must be assigned in the order of the graph file; otherwise colours get wrong nodes.
    used_ids = set(graph.inputs)
    for node in graph.nodes:
        own = _unused_id(node.name, used_ids)
        finding = finding_of(node, findings)
        if finding is not None:
            yield own, finding


def _coloured(finding: Finding) -> dict[str, str]:
    colour = _COLOURS.get(finding.status)
    return {} if colour is None else {"bgColor": colour}


def _data(graph: LevelGraph, content: dict[str, Any]) -> str:
    return json.dumps({graph.name: content}, allow_nan=False) + "\n"


def _numbered(node: LevelNode) -> list[tuple[int, str]]:
    return list(enumerate(node.outputs))


def _unused_id(name: str, used_ids: set[str]) -> str:
    """An unused id for a node, because a node and an input may have the same name."""
    own = name
    while own in used_ids:
        own += "_"
    used_ids.add(own)
    return own


def _metadata(number: str, name: str, info: TensorInfo | None) -> dict[str, Any]:
    attrs = [_pair("tensor_name", name)]
    if info is not None and info.dtype:
        sizes = "" if info.shape is None else "x".join(map(str, info.shape))
        attrs.append(_pair("tensor_shape", f"{info.dtype}[{sizes}]"))
    return {"id": number, "attrs": attrs}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _pair(key: str, value: object) -> dict[str, str]:
    return {"key": key, "value": in_words(value)[:_LONGEST]}
