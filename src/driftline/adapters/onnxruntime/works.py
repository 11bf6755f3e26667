"""What a graph does with its weights, node by node: products, convolutions, norms, look-ups.

For graphs whose exporter names no modules: these nodes, in order, are what a model's layers are
told by. Read from the exported file, where nothing is fused yet.
"""

from __future__ import annotations

from typing import Any

from driftline.adapters.onnxruntime.graph import Graph, Node
from driftline.adapters.onnxruntime.names import Names

_KINDS = {
    "Conv": "conv",
    "ConvTranspose": "conv",
    "Gemm": "linear",
    "MatMul": "linear",
    "Gather": "embedding",
    "LayerNormalization": "norm.layer",
    "SimplifiedLayerNormalization": "norm.rms",
    "RMSNormalization": "norm.rms",
    "BatchNormalization": "norm.batch",
    "InstanceNormalization": "norm.batch",
    "GroupNormalization": "norm.batch",
}


def works(graph: Graph, names: Names) -> list[dict[str, Any]]:
    """Every node with weights: its kind, the value it takes, the site of what it makes."""
    constant = _constants(graph)
    found: list[dict[str, Any]] = []
    for node in graph.nodes:
        kind = _KINDS.get(node.op)
        if kind is None or not node.outputs:
            continue
        taken = _taken(node, constant, graph)
        if not taken:
            continue
        made = _with_bias(node, constant, graph)
        about: dict[str, Any] = {"kind": kind, "takes": taken, "makes": names.site(made)}
        shape = graph.shapes.get(made)
        if shape is not None and all(isinstance(size, int) for size in shape):
            about["shape"] = list(shape)
        if any(graph.nodes[n].op == "BatchNormalization" for n in graph.readers.get(made, ())):
            about["norm_after"] = True
        found.append(about)
    return found


def _constants(graph: Graph) -> set[str]:
    """Values that do not depend on any input: weights, and what is computed of them alone."""
    known = set(graph.constants)
    for node in graph.nodes:
        if all(value in known for value in node.inputs if value) and not node.subgraphs:
            known.update(value for value in node.outputs if value)
    return known


def _taken(node: Node, constant: set[str], graph: Graph) -> str:
    """The value that a node works on, if its other operand is a weight; empty if not."""
    operands = [value for value in node.inputs[:2] if value]
    if node.op == "Gather":
        table, ids = (*operands, "", "")[:2]
        shape = graph.shapes.get(table)
        is_table = table in constant and (shape is None or len(shape) == 2)
        return ids if is_table and ids not in constant else ""
    if node.op == "MatMul":
        free = [value for value in operands if value not in constant]
        return free[0] if len(operands) == 2 and len(free) == 1 else ""
    rest = [value for value in node.inputs[1:2] if value]
    return operands[0] if operands and rest and rest[0] in constant else ""


def _with_bias(node: Node, constant: set[str], graph: Graph) -> str:
    """What a node makes, with the bias that the next one adds to it."""
    made = node.outputs[0]
    readers = graph.readers.get(made, [])
    if node.op != "MatMul" or len(readers) != 1 or made in graph.outputs:
        return made
    after = graph.nodes[readers[0]]
    other = [value for value in after.inputs if value and value != made]
    shape = graph.shapes.get(other[0]) if len(other) == 1 else None
    is_bias = after.op == "Add" and bool(other) and other[0] in constant
    return after.outputs[0] if is_bias and shape is not None and len(shape) == 1 else made
