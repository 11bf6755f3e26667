"""Integers that stand for numbers: which value of the exported graph each is, and its scale.

A quantised model in QDQ form says so itself: `QuantizeLinear` of a value, with one scale and zero
point. Optimised, convolutions take and give the integers, with channels last and under new names;
the scale that such a node gives by, and what it is computed from, tell which value that is.
"""

from __future__ import annotations

from typing import NamedTuple

from driftline.adapters.onnxruntime.graph import QUANTISED, Graph, Node
from driftline.adapters.onnxruntime.layouts import Stored, needs
from driftline.adapters.onnxruntime.snapshot import TYPES

_MADE = ("QLinear", "QGemm", "NhwcMaxPool", "MaxPool", "QuantizeLinear")


class Code(NamedTuple):
    """What the integers of a value mean: `(integer - zero) * scale` is the value `of`.

    ONNX Runtime may compute with uint8 what the file has as int8, 128 more; `dtype` is the file's.
    """

    of: str
    scale: float
    zero: float
    dtype: str


def codes_of(exported: Graph) -> dict[str, Code]:
    """Quantised value → what it means, where one scale holds for all of it.

    Rows of a quantised table are looked up as integers, and may be used as such.
    """
    found: dict[str, Code] = {}
    for node in exported.nodes:
        if node.op == "QuantizeLinear" and len(node.inputs) > 1 and node.outputs:
            scale = exported.scalars.get(node.inputs[1])
            zero = exported.scalars.get(node.inputs[2]) if len(node.inputs) > 2 else 0.0
            if scale is not None and zero is not None:
                kind = exported.types.get(node.inputs[2], 0) if len(node.inputs) > 2 else 0
                found[node.outputs[0]] = Code(node.inputs[0], scale, zero, TYPES.get(kind, "uint8"))
        elif table := _table(node, exported):
            scale, zero = (exported.scalars.get(table + end) for end in ("_scale", "_zero_point"))
            if scale is not None and zero is not None:
                kind = TYPES.get(exported.types.get(table + QUANTISED, 0), "uint8")
                value = node.outputs[0]
                found[value] = Code(value.removesuffix(QUANTISED), scale, zero, kind)
    return found


def _table(node: Node, exported: Graph) -> str:
    """The weight whose rows a node looks up as integers; empty for any other node."""
    weight = node.inputs[0] if node.op == "Gather" and node.inputs and node.outputs else ""
    is_code = weight in exported.weights and weight.endswith(QUANTISED)
    return weight.removesuffix(QUANTISED) if is_code else ""


def integer_values(exported: Graph, optimised: Graph) -> dict[str, Stored]:
    """Quantised value of the exported graph → the one that holds it in the optimised graph."""
    by_scale: dict[str, list[str]] = {}
    scale_of: dict[str, str] = {}
    for node in exported.nodes:
        if node.op == "QuantizeLinear" and len(node.inputs) > 1 and node.outputs:
            by_scale.setdefault(node.inputs[1], []).append(node.outputs[0])
            scale_of[node.outputs[0]] = node.inputs[1]
    found: dict[str, Stored] = {}
    plain: dict[str, str] = {}
    last: set[str] = set()
    for node in optimised.nodes if by_scale else ():
        token = next(iter(node.outputs), "")
        inputs = optimised.data_inputs(node)
        if not inputs or token in exported.maker:
            continue
        if node.op == "Transpose":
            plain[token] = plain.get(inputs[0], inputs[0])
            if inputs[0] not in last:
                last.add(token)
            continue
        if not node.op.startswith(_MADE):
            continue
        is_last = node.channels_last or node.op.startswith("Nhwc") or not last.isdisjoint(inputs)
        wanted = {plain.get(value, value) for value in inputs}
        value = _which(node, wanted, exported, by_scale, scale_of)
        if value:
            plain[token] = value
            if is_last:
                last.add(token)
            if value not in optimised.maker and value not in found:
                found[value] = Stored(token, channels_last=is_last)
    return found


def _which(
    node: Node,
    wanted: set[str],
    exported: Graph,
    by_scale: dict[str, list[str]],
    scale_of: dict[str, str],
) -> str:
    if not all(exported.known(value) for value in wanted):
        return ""
    named = [name for name in node.inputs if name in by_scale]
    # A pool has no scale of its own: it gives what it was given.
    given = [scale_of[value] for value in wanted if value in scale_of]
    scales = named[-1:] if not node.op.endswith("MaxPool") else given[:1]
    fitting = [
        value
        for scale in scales
        for value in by_scale[scale]
        if value not in wanted and needs(value, wanted, exported) == wanted
    ]
    # A pool shares the scale of what it takes, so that it fits as well: the first one is meant.
    return min(fitting, key=exported.maker.__getitem__, default="")
