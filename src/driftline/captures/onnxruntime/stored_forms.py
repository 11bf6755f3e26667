# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Values that ONNX Runtime stores in its own form, and what they are in the exported graph.

Four forms: channels in blocks (NCHWc, at the highest level on a CPU, where 8 or 16 channels are
together and the last block is padded), 16-bit values computed in 32 bits, products stored as plain
matrices, and quantised integers. Each gets a new name from ONNX Runtime; which exported value it is
follows from the node's name together with its inputs. A value that fits nothing keeps its own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.graph import Graph, Node
from driftline.captures.onnxruntime.quantised import FloatView, plain_name
from driftline.captures.onnxruntime.tensors import AnyArray, HostTensor

_DOMAIN = "com.microsoft.nchwc"
_SUFFIX = "_nchwc"
_NORM = "_bn"
"""Prefix of the name of a convolution that was a batch norm."""
_WIDENED = "InsertedPrecisionFreeCast_"
"""How ONNX Runtime names values that it computes in 32 bits because it has no kernel for 16."""
_SUMS = ("Add", "Sum")
_BIASED = "/MatMulAddFusion"
"""How ONNX Runtime names a product with its bias."""
# A sum and an activation are the most that ONNX Runtime fuses into a convolution.
_FUSED_MOST = 3
# Axes of a batch of images, the only kind that is stored with channels last.
_IMAGES = 4


class Stored(NamedTuple):
    """How a value is stored in a form of its own.

    Attributes:
        name: Its name in the optimised graph.
        channels: How many of its channels are real, if it is in blocks; 0 if it is not.
        channels_last: Its channels are its last axis, not its second.
        like: If it is stored as a matrix: a value that has all its axes, and its sizes but the
            last.
    """

    name: str
    channels: int = 0
    channels_last: bool = False
    like: str = ""


def blocked_values(exported: Graph, optimised: Graph) -> dict[str, Stored]:
    """Value of the exported graph → the one that holds it in blocks."""
    stored_by_value: dict[str, Stored] = {}
    plain: dict[str, str] = {}
    tokens: set[str] = set()
    by_name: dict[str, list[int]] = {}
    for number, node in enumerate(exported.nodes):
        by_name.setdefault(node.name, []).append(number)
    for node in optimised.nodes:
        # Nodes of the block domain, and ordinary ones that were left to work on blocks.
        own = node.domain == _DOMAIN and node.op != "ReorderOutput"
        kept = node.op != "ReorderOutput" and any(value in tokens for value in node.inputs)
        if not (own or kept) or not node.outputs or node.outputs[0] in exported.maker:
            continue
        # A reordering only changes the layout: the value before it is the plain one.
        if node.op == "ReorderInput":
            tokens.add(node.outputs[0])
            plain[node.outputs[0]] = plain.get(node.inputs[0], node.inputs[0])
            continue
        token = node.outputs[0]
        tokens.add(token)
        start = _named(node, exported) if own else _made_by(node, by_name, exported)
        value = _value_by_name(start, node, exported, optimised, plain)
        if value:
            plain[token] = value
        channels = _channels(value, exported) if value else 0
        # The first holder is kept; a later one would be a copy.
        if channels and value not in optimised.maker and value not in stored_by_value:
            stored_by_value[value] = Stored(token, channels)
    return stored_by_value


def without_reorders(graph: Graph, exported: Graph) -> Graph:
    """A graph without the nodes that lay a value of the exported graph into blocks, or out of them.

    Such a value is there in its usual order, and its blocks are no other value.
    """
    usual_names: dict[str, str] = {}
    gone: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if node.domain != _DOMAIN or node.op not in ("ReorderInput", "ReorderOutput"):
            continue
        before, after = node.inputs[0], node.outputs[0]
        if node.op == "ReorderOutput" and after in exported.maker and before not in exported.maker:
            usual_names[before] = after
            gone.add(number)
        elif node.op == "ReorderInput" and exported.has_value(before):
            usual_names[after] = before
            gone.add(number)
    nodes = [
        node._replace(
            inputs=tuple(usual_names.get(value, value) for value in node.inputs),
            outputs=tuple(usual_names.get(value, value) for value in node.outputs),
        )
        for number, node in enumerate(graph.nodes)
        if number not in gone
    ]
    return graph.rewritten(nodes, usual_names) if gone else graph


def widened_values(exported: Graph, optimised: Graph) -> dict[str, Stored]:
    """Value of the exported graph → the one that holds it with more bits."""
    stored_by_value: dict[str, Stored] = {}
    for name in optimised.maker:
        value = name.removeprefix(_WIDENED)
        if value != name and value in exported.maker and value not in optimised.maker:
            stored_by_value[value] = Stored(name)
    return stored_by_value


def flat_values(exported: Graph, optimised: Graph) -> dict[str, Stored]:
    """Value of the exported graph → the matrix that holds it.

    A product and the sum with a bias after it become one Gemm, which knows matrices only; the
    reshape behind it may have been merged with another one.
    """
    products = {node.name: node for node in exported.nodes if node.op == "MatMul" and node.name}
    stored_by_value: dict[str, Stored] = {}
    for node in optimised.nodes:
        product = products.get(node.name.removesuffix(_BIASED))
        if node.op != "Gemm" or not node.name.endswith(_BIASED) or product is None:
            continue
        after = exported.readers.get(product.outputs[0], [])
        sums = [exported.nodes[n].outputs[0] for n in after if exported.nodes[n].op in _SUMS]
        # If other nodes read the product without its bias, it was not merged.
        if len(after) != 1 or not sums or sums[0] in optimised.maker:
            continue
        # Its input has all its axes: reshapes around products are left out of the graph.
        like = node.inputs[0]
        if like in exported.maker and node.outputs[0] not in exported.maker:
            stored_by_value[sums[0]] = Stored(node.outputs[0], like=like)
    return stored_by_value


def _named(node: Node, exported: Graph) -> str:
    """The value after which a node of the block domain is named."""
    name = node.name.removesuffix(_SUFFIX).removeprefix(_WIDENED)
    return name if name in exported.maker else name.removesuffix(_NORM)


def _made_by(node: Node, by_name: dict[str, list[int]], exported: Graph) -> str:
    """The result, in the exported graph, of a node that was kept."""
    same = by_name.get(node.name, [])
    return exported.nodes[same[0]].outputs[0] if node.name and len(same) == 1 else ""


def _value_by_name(
    start: str, node: Node, exported: Graph, optimised: Graph, plain: dict[str, str]
) -> str:
    """The result of a node, among the values that its name leads to; empty if none is certain.

    A sum and an activation may have been fused into it after it got its name. Its inputs must be
    just what the exported graph needs to compute the value.
    """
    wanted: set[str] = set()
    for value in optimised.data_inputs(node):
        # A cast that ONNX Runtime inserted stands for the value it widens.
        exported_name = plain.get(value, value).removeprefix(_WIDENED)
        if not exported.has_value(exported_name):
            return ""
        wanted.add(exported_name)
    for value in _led_to(start, node.activation, exported):
        maker = exported.nodes[exported.maker[value]].op
        fused = not node.activation or maker == node.activation
        if fused and needs(value, wanted, exported) == wanted:
            return value
    return ""


def _led_to(start: str, activation: str, exported: Graph) -> Iterator[str]:
    value = start
    for _ in range(_FUSED_MOST):
        if value not in exported.maker:
            return
        yield value
        readers = exported.readers.get(value, [])
        # A value that other nodes or the caller read cannot have been fused into the next node.
        if len(readers) != 1 or value in exported.outputs:
            return
        reader = exported.nodes[readers[0]]
        if reader.op not in (*_SUMS, activation) or not reader.outputs:
            return
        value = reader.outputs[0]


def needs(value: str, stop: set[str], exported: Graph) -> set[str]:
    """What a value is computed from, back to the values at which to stop, or to the graph's end."""
    sources: set[str] = set()
    waiting, seen = [value], {value}
    while waiting:
        number = exported.maker.get(waiting.pop())
        for source in exported.data_inputs(exported.nodes[number]) if number is not None else ():
            if source in seen:
                continue
            seen.add(source)
            if source in stop or source not in exported.maker:
                sources.add(source)
            else:
                waiting.append(source)
    return sources


def _channels(value: str, exported: Graph) -> int:
    """Channels of a value: by its shape, else by the weights of the convolution that made it."""
    # Bounded: activations and sums between a value and its convolution are few.
    for _ in range(4 * _FUSED_MOST):
        shape = exported.shapes.get(value, ())
        if len(shape) > 1 and isinstance(shape[1], int):
            return shape[1]
        number = exported.maker.get(value)
        if number is None:
            return 0
        node = exported.nodes[number]
        if node.op == "Conv" and len(node.inputs) > 1:
            weight = exported.shapes.get(node.inputs[1], ())
            return weight[0] if weight and isinstance(weight[0], int) else 0
        before = exported.data_inputs(node)
        if node.op == "Concat":  # along the channels, or the blocks would not have been kept
            parts = [_channels(part, exported) for part in before]
            return sum(parts) if all(parts) else 0
        if not before:
            return 0
        value = before[0]
    return 0


def block_size() -> int:
    """Channels of one block on this machine, as ONNX Runtime itself chooses them."""
    onnx, ort = model_file.protobuf(), model_file.engine()
    # Divisible by every block size in use, 8 and 16, so that no padding disturbs the answer.
    size = 48
    node = onnx.helper.make_node(
        "ReorderOutput", ["x"], ["y"], domain=_DOMAIN, channels=size, channels_last=0
    )
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, size, 1, 2]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([node], "blocks", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(_DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    channels_input = np.arange(2 * size, dtype=np.float32).reshape(1, size, 1, 2)
    # The second pixel of the first channel is one block after the first.
    return int(session.run(None, {"x": channels_input})[0][0, 0, 0, 1])


def usual(value: Any, stored: Stored, block: int, like: tuple[int, ...] = ()) -> Any:
    """A value as the exported graph has it; itself where it is stored so already.

    Args:
        value: As ONNX Runtime gave it.
        stored: How it is stored.
        block: Channels of one block on this machine.
        like: Shape of the value that `stored.like` names.
    """
    if not stored.channels and not stored.channels_last and not stored.like:
        return value
    # Only values in another form are copied; the others stay in the session's memory.
    array: AnyArray = value.numpy()
    if stored.like:
        turned = array.reshape(*like[:-1], array.shape[-1])
    elif stored.channels_last:
        turned = np.moveaxis(array, -1, 1) if array.ndim == _IMAGES else array
    else:
        batch, padded, *rest = array.shape
        blocks = array.reshape(batch, padded // block, *rest, block)
        turned = np.moveaxis(blocks, -1, 2).reshape(batch, padded, *rest)[:, : stored.channels]
    return HostTensor(np.ascontiguousarray(turned), array.dtype.name, turned.shape)


# Integers that ONNX Runtime computes with under a name of its own.


def integer_values(exported: FloatView, optimised: FloatView) -> dict[str, Stored]:
    """Value of the exported graph → the one that holds its integers in the optimised graph.

    Both graphs as graphs of floats. A node keeps its name, or the name of its result's scale; and
    it must read just what the exported graph needs to compute the value.
    """
    graph, plain_graph = optimised.graph, exported.graph
    by_node = {plain_name(node.name): node for node in plain_graph.nodes if node.name}
    by_scale: dict[str, list[str]] = {}
    for value, code in exported.codes.items():
        by_scale.setdefault(code.scale_name, []).append(value)
    stored_by_value: dict[str, Stored] = {}
    plain: dict[str, str] = {}
    # Steps of an operator that ONNX Runtime took apart are no value of the exported graph; here is
    # of which of its values they are made.
    between: dict[str, set[str]] = {}
    last: set[str] = set()
    for node in graph.nodes if exported.codes else ():
        token = next(iter(node.outputs), "")
        inputs = graph.data_inputs(node)
        if not inputs:
            continue
        same_name = by_node.get(plain_name(node.name))
        if node.op == "Transpose" and same_name is None:
            # Layout changes around integer nodes are followed, not compared.
            plain.setdefault(token, plain.get(inputs[0], inputs[0]))
            if inputs[0] not in last and token not in plain_graph.maker:
                last.add(token)
            continue
        # Once channels are last they stay last until a transpose turns them back.
        is_last = node.channels_last or node.op.startswith("Nhwc") or not last.isdisjoint(inputs)
        wanted = set[str]().union(*(between.get(v, {plain.get(v, v)}) for v in inputs))
        for place, token in enumerate(node.outputs):
            if token in plain_graph.maker:
                continue
            if is_last:
                last.add(token)
            own = same_name.outputs[place : place + 1] if same_name is not None else ()
            code = optimised.codes.get(token)
            # Of several results with one scale only the place says which is which.
            alike = by_scale.get(code.scale_name, ()) if code and len(node.outputs) == 1 else ()
            value = _made_of(wanted, (*own, *alike), plain_graph)
            if not value:
                between[token] = wanted
                continue
            plain[token] = value
            if value not in graph.maker:
                stored_by_value.setdefault(value, Stored(token, channels_last=is_last))
    return stored_by_value


def _made_of(wanted: set[str], candidates: Iterable[str], exported: Graph) -> str:
    """The first of some values that is computed from just these; empty if none is."""
    fitting = (v for v in candidates if v not in wanted and needs(v, wanted, exported) == wanted)
    return next(fitting, "")


def weight_rounding(weight: HostTensor | None) -> float:
    """Relative error that rounding a weight to its integers explains.

    One step of any scale is 1 among the integers, and rounding to it is off by the root of a
    twelfth; so the integers alone say how much that is of the weight.
    """
    if weight is None or not weight.data.size or weight.dtype not in ("int8", "uint8"):
        return 0.0
    integers = weight.data.view(weight.dtype).astype(np.float64)
    if weight.dtype == "uint8":
        integers -= np.median(integers)  # their zero point is in the middle of a weight
    size = float(np.sqrt(np.mean(np.square(integers))))
    return 1.0 / (math.sqrt(12.0) * size) if size else 0.0
