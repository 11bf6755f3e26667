"""Write a graph as an ONNX file for viewers: nodes, edges, shapes and parameters, but no weights.

The few protobuf messages are written field by field, so no package is needed. Operators keep their
names, in a domain of their own: the file can be viewed, but not executed. A node's type is the name
of its torch operator without dots; the node's own name keeps the dots.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from driftline.graphs.model import LevelGraph, LevelNode, TensorInfo
from driftline.graphs.overlay import Finding, finding_of
from driftline.numerics.dtypes import DTYPES

PRODUCER = "driftline"
# Sufficient for every element type that is not in the table below.
_IR_VERSION = 8
_IR_VERSIONS = {17: 9, 18: 9, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12}
"""Newer element types → the IR version that introduced them."""
# Nodes have a domain of their own, but the format requires an opset of the default domain.
_OPSET = 17
_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_LONGEST_TEXT = 1 << 16
_LONGEST_LIST = 1 << 16
_INT64 = range(-(1 << 63), 1 << 63)
_FLOAT, _INT, _STRING, _FLOATS, _INTS, _STRINGS = 1, 2, 3, 6, 7, 8

ELEMENT_TYPES = {"string": 8} | {d.name: d.onnx for d in DTYPES.values() if d.onnx}
"""Our names of types → ONNX's numbers; other types are undefined in ONNX."""


def onnx_bytes(
    graph: LevelGraph,
    version: str = "",
    findings: Mapping[str, Finding] | None = None,
    about: Mapping[str, str] | None = None,
) -> bytes:
    """The content of an `.onnx` file.

    Args:
        graph: The graph.
        version: Version of the producer.
        findings: Findings of a comparison by site; they become attributes of the nodes.
        about: Properties of the file.
    """
    types = {ELEMENT_TYPES.get(info.dtype, 0) for info in graph.tensors.values()}
    return b"".join(
        (
            _number(
                1,
                max((_IR_VERSIONS.get(element_type, 0) for element_type in types), default=0)
                or _IR_VERSION,
            ),
            _text(2, PRODUCER),
            _text(3, version) if version else b"",
            _bytes(7, _graph(graph, findings or {})),
            _bytes(8, _text(1, "") + _number(2, _OPSET)),
            _bytes(8, _text(1, graph.domain) + _number(2, 1)),
            *(_bytes(14, _text(1, key) + _text(2, text)) for key, text in (about or {}).items()),
        )
    )


def _graph(graph: LevelGraph, findings: Mapping[str, Finding]) -> bytes:
    inside = [
        name
        for node in graph.nodes
        for name in node.outputs
        if name in graph.tensors and name not in graph.outputs
    ]
    # Names of all tensors, because an added output must not collide with any of them.
    names = {name for node in graph.nodes for name in (*node.inputs, *node.outputs)}
    return b"".join(
        (
            *(
                _bytes(
                    1,
                    _node(_with_edge(node, names), graph.domain, finding_of(node, findings)),
                )
                for node in graph.nodes
            ),
            _text(2, graph.name or "graph"),
            *(_bytes(11, _value(name, graph.tensors.get(name))) for name in graph.inputs),
            *(_bytes(12, _value(name, graph.tensors.get(name))) for name in graph.outputs),
            *(_bytes(13, _value(name, graph.tensors.get(name))) for name in inside),
        )
    )


def _with_edge(node: LevelNode, names: set[str]) -> LevelNode:
    """The node, with an added output if it has no tensor, because the format refuses such nodes."""
    if node.inputs or node.outputs:
        return node
    name = f"{node.name}_done"
    while name in names:
        name += "_"
    names.add(name)
    return node._replace(outputs=(name,))


def _node(node: LevelNode, domain: str, finding: Finding | None) -> bytes:
    about = [f"{finding.status}: {finding.text}"] if finding is not None else []
    about += [f"in {'/'.join(node.path)}"] if node.path else []
    about += [f"site {node.site}"] if node.site else []
    about += [f"holds {node.holds} operators"] if node.holds else []
    return b"".join(
        (
            *(_text(1, name) for name in node.inputs),
            *(_text(2, name) for name in node.outputs),
            _text(3, node.name),
            _text(4, short_kind(node.kind)),
            *(
                _bytes(5, attribute)
                for attribute in _attributes({**_finding_attributes(finding), **node.param})
            ),
            _text(6, "; ".join(about)) if about else b"",
            _text(7, domain),
        )
    )


def short_kind(kind: str) -> str:
    """A node's type without dots, because Netron shows only the part after the last dot.

    >>> [short_kind(kind) for kind in ("aten.mm.default", "aten.add.Tensor", "my.op.default")]
    ['mm', 'add_Tensor', 'my_op']
    """
    parts = kind.split(".")
    if len(parts) == 3 and parts[2] == "default":
        del parts[2]
    if len(parts) > 1 and parts[0] == "aten":
        del parts[0]
    return "_".join(part for part in parts if part) or kind


def _finding_attributes(finding: Finding | None) -> dict[str, Any]:
    """The finding of a node as attributes, which a viewer lists first."""
    if finding is None:
        return {}
    figures = {f"{PRODUCER}_{name}": float(value) for name, value in finding.figures.items()}
    return {f"{PRODUCER}_status": finding.status, **figures}


def _value(name: str, info: TensorInfo | None) -> bytes:
    info = info or TensorInfo()
    tensor = _number(1, ELEMENT_TYPES.get(info.dtype, 0))
    # The format refuses a tensor without a shape, so an unknown shape gets one unknown axis.
    sizes = [_text(2, "unknown")] if info.shape is None else [_number(1, n) for n in info.shape]
    tensor += _bytes(2, b"".join(_bytes(1, size) for size in sizes))
    return _text(1, name) + _bytes(2, _bytes(1, tensor))


def _attributes(param: Mapping[str, Any]) -> Iterable[bytes]:
    seen: set[str] = set()
    for name, value in flat_parameters(param):
        own, number = name, 1
        while own in seen:
            number += 1
            own = f"{name}__{number}"
        seen.add(own)
        yield _text(1, own) + _attribute(value)


def flat_parameters(param: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Parameters without nesting: `normParam.epsilon`; None is omitted.

    >>> list(flat_parameters({"a": 1, "b": {"c": [2.5]}, "d": None}))
    [('a', 1), ('b.c', [2.5])]
    """
    for key, value in param.items():
        name = f"{prefix}{key}" or "_"
        if isinstance(value, Mapping):
            # Nesting is limited because of hostile files.
            if prefix.count(".") < 16:
                yield from flat_parameters(cast("Mapping[str, Any]", value), f"{name}.")
        elif value is not None:
            yield name, value


def in_words(value: object) -> str:
    """A parameter as text: JSON, unless it is a text already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError):
        return f"<{type(value).__name__}>"


def _attribute(value: Any) -> bytes:
    """The value of an attribute, and its type."""
    # Before int, because a bool is an int in Python.
    if isinstance(value, bool):
        return _number(3, int(value)) + _number(20, _INT)
    if isinstance(value, int) and value in _INT64:
        return _number(3, value) + _number(20, _INT)
    if isinstance(value, float):
        return _float(2, value) + _number(20, _FLOAT)
    if isinstance(value, list):
        many = _list_attribute(cast("list[Any]", value)[:_LONGEST_LIST])
        if many is not None:
            return many
    return _text(4, in_words(cast("object", value))) + _number(20, _STRING)


def _list_attribute(values: Sequence[Any]) -> bytes | None:
    # ONNX lists hold one type; mixed lists become text.
    if all(isinstance(item, int) and item in _INT64 for item in values):
        return b"".join(_number(8, int(item)) for item in values) + _number(20, _INTS)
    if all(isinstance(item, (int, float)) for item in values):
        return b"".join(_float(7, float(item)) for item in values) + _number(20, _FLOATS)
    if all(isinstance(item, str) for item in values):
        return b"".join(_text(9, item) for item in values) + _number(20, _STRINGS)
    return None


def _varint(value: int) -> bytes:
    # Negative numbers are written in two's complement of 64 bits, as protobuf requires.
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text[:_LONGEST_TEXT].encode("utf-8", "replace"))


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # too large for the format's 32 bits
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | _FIXED32) + packed
