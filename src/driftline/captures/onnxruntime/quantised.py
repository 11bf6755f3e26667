"""Quantised graphs as the float graphs they stand for, and what their integers mean.

A quantiser writes a tensor in two ways. QDQ keeps the float nodes and puts a `QuantizeLinear` and a
`DequantizeLinear` between them; QOperator (and ONNX Runtime, of QDQ) has nodes that compute with
integers and take scales and zero points beside each operand. Both are read as the same graph of
float nodes here, so that everything that follows (modules, fusions, alignment) knows one form.
Integers are then one more form in which a value is stored. Knows graphs; no session, no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from driftline.captures.onnxruntime.graph import Graph, Node
from driftline.captures.onnxruntime.tensors import TYPES

# How onnxruntime.quantization calls the integers of a tensor, and the tensor before and after it
# was rounded.
_GENERATED = re.compile(
    r"(_quantized|_QuantizeLinear_Output|_DequantizeLinear_Output|_QuantizeLinear_Input)$"
)
_REWRITTEN = re.compile(r"(_token_\d+|_quant|/MatMulAddFusion(_MatMul)?)$")
"""What a quantiser and ONNX Runtime append to the name of a node that they replace."""
_PRODUCT = re.compile(r"(?P<product>.+/MatMulAddFusion)(_MatMul)?$")
"""A product that ONNX Runtime joined with the sum behind it; `_MatMul` if it was parted again."""
_FLATTENS, _RESTORES = "gemm_input_reshape", "gemm_output_reshape"
"""How ONNX Runtime calls the reshapes around it."""
_OFTEN = 16
"""So often a constant is rounded and made a float again at most."""
_SMALLEST = {"uint8": 0.0, "int8": -128.0, "uint16": 0.0, "int16": -32768.0, "uint4": 0.0}
# Operators that may give numbers below zero, so that integers without a sign clip them.
_SIGNED = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "BatchNormalization"}
)
# Operators that only choose or move elements, and do so with integers as well.
_MOVES = frozenset(
    {"MaxPool", "NhwcMaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice"}
    | {"Gather", "Expand", "Identity", "Split", "Tile", "DepthToSpace", "SpaceToDepth"}
)


class IntegerOperator(NamedTuple):
    """An operator that computes with integers.

    Attributes:
        op: What it is called among floats.
        operands: Positions of its integers; a scale and a zero point follow each of them.
        result: Position of the result's scale, which its zero point follows; -1 if it gives floats.
        others: Positions of what else it reads that is no scale: a bias.
    """

    op: str
    operands: tuple[int, ...]
    result: int
    others: tuple[int, ...] = ()


_UNARY = ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool", "ReduceMean")
_OPERATORS = {
    "QLinearConv": IntegerOperator("Conv", (0, 3), 6, (8,)),
    "QLinearMatMul": IntegerOperator("MatMul", (0, 3), 6),
    "QGemm": IntegerOperator("Gemm", (0, 3), 7, (6,)),
    "QLinearAdd": IntegerOperator("Add", (0, 3), 6),
    "QLinearMul": IntegerOperator("Mul", (0, 3), 6),
    **{f"QLinear{op}": IntegerOperator(op, (0,), 3) for op in _UNARY},
}
_CONCAT = "QLinearConcat"
"""Takes as many tensors as there are; the result's scale comes first."""
# Products of floats that are rounded on the way: positions of the operands and of the bias.
_ROUNDING_PRODUCTS = {"DynamicQuantizeMatMul": (0, 1, 4), "MatMulIntegerToFloat": (0, 1, 6)}
# Products whose int32 sums a `Cast` and a `Mul` with the scales make floats of.
_SUMS_OF_INTEGERS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


def _integer_operator(node: Node) -> IntegerOperator | None:
    if node.op == _CONCAT:
        return IntegerOperator("Concat", tuple(range(2, len(node.inputs), 3)), 0)
    return _OPERATORS.get(node.op)


class Code(NamedTuple):
    """What integers mean: `(integer - zero) * scale`.

    Attributes:
        scale: One number for all of them.
        zero: The integer that stands for zero.
        scale_name: Name of the scale in the graph.
        unsigned: No number below zero can be written with them.
    """

    scale: float
    zero: float
    scale_name: str
    unsigned: bool


class CodedWeight(NamedTuple):
    """A weight that is stored as integers: names of them, of their scale and zero point."""

    integers: str
    scale: str
    zero: str


class FloatView(NamedTuple):
    """A quantised graph, seen as a graph of floats.

    Attributes:
        graph: Float nodes only. A graph that is not quantised is itself.
        names: Value of the file → value here, where they differ.
        holders: Value here → the one of the file that holds it, where they differ.
        codes: Value here → meaning of its integers, if its holder has integers.
        weights: Weight here → how the file stores it.
        misread: Value here → how the node that makes it reads integers for other numbers than they
            were made of.
    """

    graph: Graph
    names: dict[str, str]
    holders: dict[str, str]
    codes: dict[str, Code]
    weights: dict[str, CodedWeight]
    misread: dict[str, str]


def plain_name(node_name: str) -> str:
    """The name that a node had before it was rewritten.

    >>> plain_name("/conv/Conv_quant_token_1")
    '/conv/Conv'
    """
    while (shorter := _REWRITTEN.sub("", node_name)) != node_name:
        node_name = shorter
    return node_name


def float_view(graph: Graph, file_names: dict[str, str] | None = None) -> FloatView:
    """A graph as the float graph that it stands for.

    Args:
        graph: As its file has it.
        file_names: Names that an earlier form of the same graph has given to values.
    """
    rewriter = _Rewriter(graph, file_names or {})
    if not rewriter.is_quantised:
        return FloatView(_unflattened(graph), {}, {}, {}, {}, {})
    view = rewriter.view()
    unflattened = _unflattened(view.graph)
    misread = _carried(view.misread, view.graph, unflattened)
    view = view._replace(graph=unflattened, misread=misread)
    view.graph.clipped = _clipped(view.graph, view.codes)
    # An operator that is not known here may read the integers for what they are: then nothing is
    # rewritten, and integers stay integers.
    made = view.graph
    is_closed = all(made.has_value(v) for node in made.nodes for v in node.inputs if v)
    is_closed = is_closed and all(made.has_value(v) for v in made.outputs)
    return view if is_closed else FloatView(graph, {}, {}, {}, {}, {})


def _clipped(graph: Graph, codes: Mapping[str, Code]) -> frozenset[str]:
    """Values whose rounding cuts off what is below zero: a rectifier may be worked into it."""
    return frozenset(
        value
        for node in graph.nodes
        if node.op in _SIGNED
        for value in node.outputs
        if value in codes and codes[value].unsigned
    )


def _unflattened(graph: Graph) -> Graph:
    """A graph without the reshapes that ONNX Runtime puts around a product and its bias.

    It makes one Gemm of them, which takes matrices only. What goes in and comes out has its axes
    before and after the reshapes, under the names of the exporter.
    """
    products = {node.name for node in graph.nodes if _PRODUCT.match(plain_token(node.name))}
    if not products:
        return graph
    gone: set[int] = set()
    replaced: dict[int, Node] = {}
    for number, node in enumerate(graph.nodes):
        match = _PRODUCT.match(plain_token(node.name))
        maker = graph.maker.get(node.inputs[0], -1) if node.inputs else -1
        if match is None or maker < 0 or plain_token(graph.nodes[maker].name) != _FLATTENS:
            continue
        inputs = (graph.nodes[maker].inputs[0], *node.inputs[1:])
        end, bias = _with_sum(number, f"{match['product']}_Add", graph)
        last = _only_reader(end, graph)
        if last is not None and plain_token(graph.nodes[last].name) == _RESTORES:
            outputs = graph.nodes[last].outputs
            # In the place of the last one: what it reads has been made by then.
            replaced[last] = node._replace(inputs=(*inputs, *bias), outputs=outputs)
            gone |= {number, end}
        else:
            replaced[number] = node._replace(inputs=inputs)
        if all(graph.nodes[n].name in products for n in graph.behind(graph.nodes[maker])):
            gone.add(maker)
    nodes = [replaced.get(n, node) for n, node in enumerate(graph.nodes) if n not in gone]
    made = graph.rewritten(nodes, {})
    is_closed = all(made.has_value(v) for node in nodes for v in node.inputs if v)
    return made if is_closed and all(map(made.has_value, made.outputs)) else graph


def _carried(sentences: Mapping[str, str], before: Graph, after: Graph) -> dict[str, str]:
    """Sentences about values of a graph, for one in which some nodes are gone: a node that was
    joined with others gives the value of the last one, and of a node that is gone its reader tells.
    """
    results = {node.name: node.outputs[0] for node in after.nodes if node.name and node.outputs}
    carried: dict[str, str] = {}
    for value, sentence in sentences.items():
        while value not in after.maker and value in before.maker:
            joined = results.get(before.nodes[before.maker[value]].name)
            readers = before.readers.get(value, [])
            if joined is None and not readers:
                break
            value = joined or before.nodes[readers[0]].outputs[0]
        carried[value] = sentence
    return carried


def plain_token(node_name: str) -> str:
    """The name of a node without what makes it the only one of its name."""
    return re.sub(r"(_quant|_token_\d+)+$", "", node_name)


def _with_sum(number: int, name: str, graph: Graph) -> tuple[int, tuple[str, ...]]:
    """The node that adds the bias of a product, and the bias; the product itself if it does."""
    reader = _only_reader(number, graph)
    if reader is None or graph.nodes[reader].name != name:
        return number, ()
    made = graph.nodes[number].outputs[0]
    return reader, tuple(value for value in graph.nodes[reader].inputs if value != made)


def _only_reader(number: int, graph: Graph) -> int | None:
    made = graph.nodes[number].outputs[0]
    readers = graph.readers.get(made, [])
    return readers[0] if len(readers) == 1 and made not in graph.outputs else None


class _Rewriter:
    """One graph on its way to floats."""

    def __init__(self, graph: Graph, file_names: dict[str, str]) -> None:
        self._graph = graph
        self._names: dict[str, str] = {}
        # Integers → what was rounded, and the floats that are made of them again.
        self._before: dict[str, str] = {}
        self._after: dict[str, list[str]] = {}
        self._scale_of: dict[str, tuple[str, str]] = {}
        # Node, integers, scale and zero point, as nodes read them.
        self._read: list[tuple[int, str, str, str]] = []
        self._made_with: dict[str, tuple[str, str]] = {}
        self._read_triples()
        self._integers_of = {float_: q for q, floats in self._after.items() for float_ in floats}
        self.is_quantised = bool(self._scale_of) or any(
            node.op in ("DynamicQuantizeLinear", *_SUMS_OF_INTEGERS) for node in graph.nodes
        )
        if self.is_quantised:
            self._name_values(file_names)

    def _read_triples(self) -> None:
        """Integers, scale and zero point, as nodes name them; who made the integers knows best."""
        for number, node in enumerate(self._graph.nodes):
            inputs = (*node.inputs, "", "")
            if node.op == "QuantizeLinear" and len(node.inputs) > 1 and node.outputs:
                self._before[node.outputs[0]] = node.inputs[0]
                self._scale_of[node.outputs[0]] = (inputs[1], inputs[2])
            elif node.op == "DequantizeLinear" and len(node.inputs) > 1 and node.outputs:
                self._after.setdefault(node.inputs[0], []).append(node.outputs[0])
                self._read.append((number, inputs[0], inputs[1], inputs[2]))
            elif (about := _integer_operator(node)) is not None:
                self._read += [
                    (number, inputs[place], inputs[place + 1], inputs[place + 2])
                    for place in about.operands
                    if place + 2 < len(inputs)
                ]
                if -1 < about.result < len(node.inputs) and node.inputs[about.result]:
                    scale = (inputs[about.result], inputs[about.result + 1])
                    self._scale_of[node.outputs[0]] = scale
        self._pass_on()
        self._made_with = dict(self._scale_of)
        for _, integers, scale, zero in self._read:
            self._scale_of.setdefault(integers, (scale, zero))
        for value in self._graph.weights:
            # The rows of a table may be read as integers, by nodes that take no scale.
            name = value.removesuffix("_quantized")
            if name != value and f"{name}_scale" in self._graph.weights:
                self._scale_of.setdefault(value, (f"{name}_scale", f"{name}_zero_point"))
        self._pass_on()

    def _pass_on(self) -> None:
        """A pool gives integers of the scale that it was given."""
        for node in self._graph.nodes:
            if node.op in _MOVES and node.inputs and node.inputs[0] in self._scale_of:
                for value in node.outputs:
                    self._scale_of.setdefault(value, self._scale_of[node.inputs[0]])

    def _misread(self) -> dict[str, str]:
        misread: dict[str, str] = {}
        scalars = self._graph.scalars
        for number, integers, scale, zero in self._read:
            made_scale, made_zero = self._made_with.get(integers, (scale, zero))
            for word, made, read in (("scale", made_scale, scale), ("zero point", made_zero, zero)):
                numbers = scalars.get(made), scalars.get(read)
                if None in numbers or numbers[0] == numbers[1]:
                    continue
                sentence = (
                    f"reads '{self._plain(integers)}' with the {word} {numbers[1]:.6g}, "
                    f"and it was made with {numbers[0]:.6g}"
                )
                node = self._graph.nodes[number]
                after = self._graph.behind(node) if node.op == "DequantizeLinear" else []
                takers = [self._graph.nodes[reader] for reader in after] or [node]
                misread |= {self._plain(taker.outputs[0]): sentence for taker in takers}
        return misread

    def _name_values(self, file_names: dict[str, str]) -> None:
        """One name for a tensor before it is rounded, as integers, and as floats again."""
        integers = dict.fromkeys((*self._before, *self._after, *self._scale_of))
        for value in integers:
            before = self._before.get(value, "")
            after = self._after.get(value, [])
            members = [member for member in (before, value, *after) if member]
            known = next((file_names[m] for m in members if m in file_names), "")
            # A value that is rounded twice, to other integers, is one value.
            name = self._names.get(before, "") or known or self._name(before, value, after)
            self._names |= dict.fromkeys(members, name)
        for value, name in file_names.items():
            if value in self._graph.maker:
                self._names.setdefault(value, name)

    def _name(self, before: str, value: str, after: list[str]) -> str:
        given_back = [name for name in after if name in self._graph.outputs]
        own = [name for name in (before, *after) if name and not _GENERATED.search(name)]
        # What a caller gets keeps its name; else the name that the exporter gave.
        return next(iter((*given_back, *own)), "") or _GENERATED.sub("", before or value)

    def _plain(self, value: str) -> str:
        return self._names.get(value, value)

    def view(self) -> FloatView:
        """The float graph, and how its values are stored."""
        nodes = list(self._nodes())
        holders: dict[str, str] = {}
        codes: dict[str, Code] = {}
        weights: dict[str, CodedWeight] = {}
        for integers, (scale, zero) in self._scale_of.items():
            value = self._plain(integers)
            if integers in self._graph.constants:
                weights[value] = CodedWeight(integers, scale, zero)
                continue
            code = self._code(integers, scale, zero)
            if value in self._graph.outputs or integers not in self._graph.maker:
                continue
            if code is not None and value not in codes:
                holders[value], codes[value] = integers, code
            elif code is None:
                # A scale for every channel: what was made floats of them is taken instead.
                floats = [*self._after.get(integers, ()), self._before.get(integers, "")]
                holders.setdefault(value, next(name for name in (*floats, integers) if name))
        names = {old: new for old, new in self._names.items() if old != new}
        graph = self._graph.rewritten(nodes, names)
        # A constant that is rounded while the model runs is a constant under any of its names.
        graph.constants |= {self._plain(q) for q in self._before if self._is_constant(q)}
        return FloatView(graph, names, holders, codes, weights, self._misread())

    def _is_constant(self, value: str) -> bool:
        """Whether a value is a constant, rounded and made a float again however often."""
        # Bounded: a damaged file may have a value that is made of itself.
        for _ in range(_OFTEN):
            if value in self._graph.constants:
                return True
            value = self._before.get(value, "") or self._integers_of.get(value, "")
        return False

    def _code(self, integers: str, scale_name: str, zero_name: str) -> Code | None:
        graph = self._graph
        scale = graph.scalars.get(scale_name)
        zero = graph.scalars.get(zero_name) if zero_name else 0.0
        if scale is None or zero is None:
            return None
        kind = graph.types.get(zero_name) or graph.types.get(integers) or 2
        return Code(scale, zero, scale_name, zero == _SMALLEST.get(TYPES.get(kind, "")))

    def _nodes(self) -> Iterator[Node]:
        sums: dict[str, Node] = {}
        scales = {scale for scale, _ in self._scale_of.values()}
        # Sums of a convolution become its result only when its bias was added, by another node.
        biased: dict[str, Node] = {}
        shaped = self._shaped_constants()
        for node in self._graph.nodes:
            if node.op in ("QuantizeLinear", "DequantizeLinear") or self._shapes_bias(node, shaped):
                continue
            if node.op == "DynamicQuantizeLinear":
                self._names[node.outputs[0]] = self._plain(node.inputs[0])
                scales.update(node.outputs[1:])
            elif node.op in _ROUNDING_PRODUCTS:
                yield self._rounding_product(node)
            elif node.op in _SUMS_OF_INTEGERS:
                sums[node.outputs[0]] = self._sum_of_integers(node)
            elif node.op == "Cast" and node.inputs[0] in sums:
                sums[node.outputs[0]] = sums[node.inputs[0]]
            elif node.op == "Mul" and any(value in sums for value in node.inputs):
                made = self._scaled_sum(node, sums)
                if made.op == "Conv" and self._is_biased(node.outputs[0], shaped):
                    biased[node.outputs[0]] = made
                else:
                    yield made
            elif node.op == "Add" and any(value in biased for value in node.inputs):
                yield self._with_bias(node, biased, shaped)
            elif node.op == "Mul" and self._multiplies_scales(node, scales):
                scales.update(node.outputs)
            else:
                yield self._float_node(node)

    def _shaped_constants(self) -> dict[str, str]:
        """Constants that a node only gives another shape: what it makes, and of what."""
        return {
            node.outputs[0]: node.inputs[0]
            for node in self._graph.nodes
            if node.op == "Reshape" and set(node.inputs) <= self._graph.constants
        }

    def _sum_of_integers(self, node: Node) -> Node:
        """The float operator whose sums of integer products a node makes."""
        self._name_weights(node.inputs[:2])
        return node._replace(
            name=plain_token(node.name),
            op=_SUMS_OF_INTEGERS[node.op],
            inputs=tuple(map(self._plain, node.inputs[:2])),
            ran_as=node.op,
            integers=tuple(v for v in node.inputs[:2] if v in self._graph.constants),
            rounds=True,
        )

    def _scaled_sum(self, node: Node, sums: dict[str, Node]) -> Node:
        """Sums of integers that a node multiplies by their scale: the operator with its result."""
        made = next(sums[value] for value in node.inputs if value in sums)
        return made._replace(outputs=tuple(map(self._plain, node.outputs)))

    def _with_bias(self, node: Node, biased: dict[str, Node], shaped: dict[str, str]) -> Node:
        """A convolution with the bias that another node adds to it."""
        made = next(biased[value] for value in node.inputs if value in biased)
        bias = next(shaped.get(v, v) for v in node.inputs if v not in biased)
        return made._replace(
            inputs=(*made.inputs, bias), outputs=tuple(map(self._plain, node.outputs))
        )

    def _rounding_product(self, node: Node) -> Node:
        places = [p for p in _ROUNDING_PRODUCTS[node.op] if p < len(node.inputs)]
        inputs = tuple(node.inputs[place] for place in places)
        self._name_weights(inputs)
        return node._replace(
            name=plain_token(node.name),
            op="MatMul",
            inputs=tuple(map(self._plain, inputs)),
            outputs=tuple(map(self._plain, node.outputs)),
            ran_as=node.op,
            rounds=True,
        )

    def _shapes_bias(self, node: Node, shaped: Mapping[str, str]) -> bool:
        """Whether a node only shapes the bias that is added to a convolution's sums."""
        readers = self._graph.behind(node) if node.outputs and node.outputs[0] in shaped else []
        sums = [self._graph.nodes[number] for number in readers]
        return bool(sums) and all(
            after.op == "Add" and any(self._is_biased(value, shaped) for value in after.inputs)
            for after in sums
        )

    def _is_biased(self, value: str, shaped: Mapping[str, str]) -> bool:
        """Whether all that reads a value is the node that adds a bias of one axis to it."""
        readers = [self._graph.nodes[number] for number in self._graph.readers.get(value, ())]
        return (
            len(readers) == 1
            and readers[0].op == "Add"
            and any(
                other in shaped or other in self._graph.constants
                for other in readers[0].inputs
                if other != value
            )
        )

    def _multiplies_scales(self, node: Node, scales: set[str]) -> bool:
        constants = self._graph.constants
        is_scale = [value in scales for value in node.inputs]
        return any(is_scale) and constants.issuperset(v for v in node.inputs if v not in scales)

    def _name_weights(self, values: Iterable[str]) -> None:
        for value in values:
            if value in self._graph.constants and _GENERATED.search(value):
                # One that several nodes make numbers of has its name already.
                self._names.setdefault(value, _GENERATED.sub("", value))

    def _float_node(self, node: Node) -> Node:
        about = _integer_operator(node)
        inputs = node.inputs
        if about is not None:
            places = [p for p in (*about.operands, *about.others) if p < len(node.inputs)]
            inputs = tuple(node.inputs[place] for place in places)
            node = node._replace(name=plain_token(node.name), op=about.op, ran_as=node.op)
        self._name_weights(inputs)
        integers = tuple(
            stored
            for value in inputs
            if (stored := self._integers_of.get(value, value)) in self._graph.constants
            and stored in self._scale_of
        )
        return node._replace(
            inputs=tuple(self._plain(value) for value in inputs),
            outputs=tuple(self._plain(value) for value in node.outputs),
            integers=integers,
        )
