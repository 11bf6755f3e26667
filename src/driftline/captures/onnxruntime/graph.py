# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""An ONNX graph as plain values, and the relation between an exported graph and its optimised form.

A graph has nodes, the node that makes each value, and the nodes that read it. Values keep their
names from the file. Optimisers do not change names, so the names show which exported nodes a fused
node replaces. This file knows the protobuf of a model, but nothing about sessions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from driftline.captures.onnxruntime import model_file

_TEXT = 8
_ACTIVATION = "activation"


class Node(NamedTuple):
    """One node.

    Attributes:
        name: Its name in the file, which may be empty and need not be unique.
        op: Its type.
        domain: Domain of the type; empty for ONNX's own.
        inputs: Names of the values that it and its subgraphs read; empty for an omitted input.
        outputs: Names of the values that it makes; empty for an unused output.
        about: Metadata that the exporter wrote.
        subgraphs: Number of its subgraphs: bodies of loops and branches.
        activation: The activation that was fused into it; empty for none.
        channels_last: Whether its images have their channels last.
        ran_as: Its type in the file, if that computes with integers what `op` does with floats.
        integers: Names of its weights that are integers.
        rounds: Whether it rounds its input to integers, with a scale that it computes.
    """

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    about: Mapping[str, str]
    subgraphs: int = 0
    activation: str = ""
    channels_last: bool = False
    ran_as: str = ""
    integers: tuple[str, ...] = ()
    rounds: bool = False

    @property
    def shown_op(self) -> str:
        """Its type in the file."""
        return self.ran_as or self.op


class Graph:
    """A graph of nodes in the order of its file, which is an order of execution.

    Attributes:
        nodes: All nodes.
        maker: Value → number of the node that makes it.
        readers: Value → numbers of the nodes that read it.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs.
        weights: Names of the initializers.
        constants: Names of initializers and of outputs of Constant nodes.
        shapes: Value → sizes, names of sizes or None, as far as they are in the file.
        types: Value → ONNX's number of its element type.
        scalars: Constants of one element: scales, zero points, epsilons.
        clipped: Values that are stored as unsigned integers although their node may have negative
            results, because a ReLU may have been fused into the rounding.
    """

    clipped: frozenset[str] = frozenset()

    def __init__(self, model: Any) -> None:
        graph = model.graph
        self.nodes = [_node(node) for node in graph.node]
        # Older exporters also list initializers as inputs, which a caller does not supply.
        weights = {tensor.name for tensor in graph.initializer}
        weights |= {sparse.values.name for sparse in graph.sparse_initializer}
        self.inputs = [info.name for info in graph.input if info.name not in weights]
        self.outputs = [info.name for info in graph.output]
        # Outputs of Constant nodes are constants, as initializers are.
        constant = {n.outputs[0] for n in self.nodes if n.op == "Constant" and n.outputs}
        self.weights: frozenset[str] = frozenset(weights)
        self.constants: frozenset[str] = frozenset(weights | constant)
        self._wire()
        self.shapes: dict[str, tuple[int | str | None, ...]] = {}
        self.types: dict[str, int] = {}
        for info in (*graph.value_info, *graph.input, *graph.output):
            self._learn(info)
        for tensor in graph.initializer:
            self.shapes[tensor.name] = tuple(tensor.dims)
            self.types[tensor.name] = tensor.data_type
        self.scalars = {
            tensor.name: number
            for tensor in graph.initializer
            if (number := _scalar(tensor)) is not None
        }

    def _wire(self) -> None:
        self.maker: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for value in node.outputs:
                # An unused output has an empty name.
                if value:
                    self.maker[value] = number
            for value in dict.fromkeys(node.inputs):
                if value:
                    self.readers.setdefault(value, []).append(number)

    def rewritten(self, nodes: list[Node], names: Mapping[str, str]) -> Graph:
        """A copy of the graph with other nodes, in which some values have new names."""
        graph = copy.copy(self)
        graph.nodes = nodes
        graph.weights = frozenset(names.get(value, value) for value in self.weights)
        graph.constants = frozenset(names.get(value, value) for value in self.constants)
        graph.shapes, graph.types = dict(self.shapes), dict(self.types)
        for old, new in names.items():
            # The shape of the old value also holds for the new one, but its type does not.
            if old in self.shapes:
                graph.shapes.setdefault(new, self.shapes[old])
        graph._wire()
        return graph

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename values."""
        self.nodes = [
            node._replace(
                inputs=tuple(names.get(value, value) for value in node.inputs),
                outputs=tuple(names.get(value, value) for value in node.outputs),
            )
            for node in self.nodes
        ]
        self._wire()
        for old, new in names.items():
            if old in self.shapes:
                self.shapes[new] = self.shapes[old]
                self.types[new] = self.types.get(old, 0)

    def _learn(self, info: Any) -> None:
        if info.type.WhichOneof("value") == "tensor_type":
            tensor_type = info.type.tensor_type
            self.types[info.name] = tensor_type.elem_type
            if tensor_type.HasField("shape"):
                self.shapes[info.name] = tuple(sizes_in(tensor_type.shape))

    def has_value(self, value: str) -> bool:
        """Whether the graph has a value of this name: computed, an input or a constant."""
        return value in self.maker or value in self.constants or value in self.inputs

    def data_inputs(self, node: Node) -> list[str]:
        """The inputs of a node that are not constants, in order, each once."""
        return [v for v in dict.fromkeys(node.inputs) if v and v not in self.constants]

    def before(self, node: Node) -> list[int]:
        """Numbers of the nodes that make the inputs of a node."""
        makers = (self.maker.get(value) for value in node.inputs)
        return [number for number in dict.fromkeys(makers) if number is not None]

    def behind(self, node: Node) -> list[int]:
        """Numbers of the nodes that read the outputs of a node."""
        read = (number for value in node.outputs for number in self.readers.get(value, ()))
        return list(dict.fromkeys(read))


def _scalar(tensor: Any) -> float | None:
    """The number in a tensor of one element; None if it has several or is in another file."""
    if math.prod(tensor.dims) != 1 or tensor.external_data or tensor.data_type == _TEXT:
        return None
    try:
        return float(model_file.protobuf().numpy_helper.to_array(tensor).reshape(-1)[0])
    except (TypeError, ValueError):
        return None


def sizes_in(shape: Any) -> Iterable[int | str | None]:
    """The sizes of a declared shape: a number, the name of a size, or None."""
    for size in shape.dim:
        yield size.dim_value if size.HasField("dim_value") else size.dim_param or None


def _node(node: Any) -> Node:
    inner = [*_subgraphs(node.attribute)]
    inputs = list(node.input)
    if inner:
        inputs += [value for graph in inner for value in _outer(graph)]
    return Node(
        node.name,
        node.op_type,
        node.domain if node.domain != "ai.onnx" else "",
        tuple(inputs),
        tuple(node.output),
        {prop.key: prop.value for prop in node.metadata_props},
        len(inner),
        next((a.s.decode("ascii", "replace") for a in node.attribute if a.name == _ACTIVATION), ""),
        any(a.name == "channels_last" and a.i for a in node.attribute),
    )


def _subgraphs(attributes: Iterable[Any]) -> Iterable[Any]:
    for attribute in attributes:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _outer(graph: Any) -> list[str]:
    """The values of the surrounding graph that the body of a loop or branch reads."""
    own = {info.name for info in graph.input} | {info.name for info in graph.initializer}
    own.update(value for node in graph.node for value in node.output)
    read = [value for node in graph.node for value in node.input]
    # Bodies may contain further bodies.
    read += [v for n in graph.node for inner in _subgraphs(n.attribute) for v in _outer(inner)]
    read += [info.name for info in graph.output]
    return [value for value in dict.fromkeys(read) if value and value not in own]


# Lineage: the exported nodes that each node of an optimised graph replaces.


# Nodes that only change the layout or the element type of another node's result.
_LAYOUTS = ("ReorderOutput", "ReorderInput", "Cast", "Transpose")


class Lineage(NamedTuple):
    """The relation between the nodes of an optimised graph and those of the exported graph.

    Attributes:
        members: For each node of the optimised graph, the numbers of the exported nodes that it
            replaces.
        holder: Number of an exported node → number of the optimised node that replaces it. Nodes
            that became constants or were removed are not in it.
        near: Value that exists only in the optimised graph → the next value after it that exists in
            both graphs.
        gives: For each node of the optimised graph, the values of the exported graph that it
            computes, even if another node changes their layout.
    """

    members: list[tuple[int, ...]]
    holder: dict[int, int]
    near: dict[str, str]
    gives: list[tuple[str, ...]]


def lineage_of(exported: Graph, optimised: Graph) -> Lineage:
    """Find the exported nodes that each node of an optimised graph replaces."""
    members: list[tuple[int, ...]] = []
    holder: dict[int, int] = {}
    near = _near(exported, optimised)
    worker = {
        number: _worker(number, exported, optimised) for number in range(len(optimised.nodes))
    }
    # There are two rounds. In the first, an exported node belongs to the node that makes its
    # output.
    owned: dict[int, set[int]] = {}
    gives: dict[int, list[str]] = {}
    for number, node in enumerate(optimised.nodes):
        for value in node.outputs:
            if value in exported.maker:
                holder[exported.maker[value]] = worker[number]
                owned.setdefault(worker[number], set()).add(exported.maker[value])
                gives.setdefault(worker[number], []).append(value)
    for number in range(len(optimised.nodes)):
        replaced = _replaced(owned.get(number, set()), exported, optimised)
        for member in replaced:
            holder.setdefault(member, number)
        members.append(tuple(sorted(replaced)))
    return Lineage(
        members, holder, near, [tuple(gives.get(n, ())) for n in range(len(optimised.nodes))]
    )


def _worker(number: int, exported: Graph, optimised: Graph) -> int:
    """The node that computes the result of a node, if that only changes layout or element type."""
    node = optimised.nodes[number]
    while node.op in _LAYOUTS and node.inputs:
        maker = optimised.maker.get(node.inputs[0])
        if maker is None or node.inputs[0] in exported.maker:
            break
        number, node = maker, optimised.nodes[maker]
    return number


def _replaced(own: set[int], exported: Graph, optimised: Graph) -> set[int]:
    replaced = set(own)
    waiting = list(own)
    while waiting:
        for value in exported.nodes[waiting.pop()].inputs:
            maker = exported.maker.get(value)
            # A value that still exists in the optimised graph is not computed inside this node.
            if maker is None or maker in replaced or optimised.has_value(value):
                continue
            replaced.add(maker)
            waiting.append(maker)
    return replaced


def _near(exported: Graph, optimised: Graph) -> dict[str, str]:
    """For each value that only the optimised graph has, the next value that both graphs have."""
    near: dict[str, str] = {}
    # Nodes are visited backwards, so that the readers of a value come before it.
    for node in reversed(optimised.nodes):
        for value in node.outputs:
            if value and value not in exported.maker:
                near[value] = _led(value, optimised, exported, near)
    return near


def _led(value: str, optimised: Graph, exported: Graph, near: dict[str, str]) -> str:
    for reader in optimised.readers.get(value, ()):
        outputs: Sequence[str] = optimised.nodes[reader].outputs
        for output in outputs:
            if output in exported.maker:
                return output
            if near.get(output):
                return near[output]
    return ""
