"""Which call of torch's graph produced a value of an exported file, and which nodes use weights.

torch's exporter writes next to a node which call it was made for: a name (`mul_3`), an operator
and a line of the program. A compiled run of the same model counts its calls in each module, so the
two can be matched. Reads names and edges, never values.
"""

from __future__ import annotations

import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from driftline.captures.onnxruntime.graph import Graph, Node
from driftline.captures.onnxruntime.scopes import PART, Names, Scope

_SUFFIX = re.compile(r"_(\d{1,6})$")


class Call(NamedTuple):
    """One call.

    Attributes:
        nth: Index among the calls of its operator in its module.
        total: How many the file has there.
        sure: No gap in the numbers hints at a call that the exporter left out.
        on_line: Index among those on its line of the program.
        in_line: How many the file has of that line.
    """

    nth: int
    total: int
    sure: bool
    on_line: int = 0
    in_line: int = 0


class Result(NamedTuple):
    """What a value is.

    Attributes:
        call: The call whose result it is.
        slot: Which of its results.
    """

    call: str
    slot: int = 0


def count(scopes: Iterable[Scope]) -> dict[str, Call]:
    """Call of torch's graph → its index among the calls of the same operator in the same module.

    torch numbers calls (`mul`, `mul_1`, ...) as the program makes them; an exporter writes them in
    another order and leaves some out. The latter shows as a gap in the numbers: in a module next to
    a gap, no call of that name is certain. Overloads of an operator count as one.
    """
    places: dict[str, tuple[str, str]] = {}
    lines: dict[str, str] = {}
    modules: dict[str, dict[int, str]] = {}
    for scope in scopes:
        if scope.target and scope.operator not in places:
            places[scope.operator] = scope.module, scope.target.rpartition(".")[0]
            lines[scope.operator] = scope.line
            base, number = _base(scope.operator)
            modules.setdefault(base, {})[number] = scope.module
    doubtful: set[tuple[str, str]] = set()
    for base, module_by_number in modules.items():
        first = int(hasattr(builtins, base))  # torch calls no node `pow`, but `pow_1`
        # A number that is missing belongs to a call that the exporter left out, or merged.
        for number in range(first, max(module_by_number) + 1):
            if number not in module_by_number:
                neighbours = (
                    module_by_number[n]
                    for n in (
                        _next(module_by_number, number, -1),
                        _next(module_by_number, number, 1),
                    )
                    if n in module_by_number
                )
                doubtful.update((module, base) for module in neighbours)
    calls: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, place in places.items():
        calls[place].append(name)
    calls_by_name: dict[str, Call] = {}
    for (module, _), names in calls.items():
        # With one base name torch's own numbers give the order of the program.
        if len({_base(name)[0] for name in names}) == 1:
            names.sort(key=lambda name: _base(name)[1])
        by_line: dict[str, list[str]] = defaultdict(list)
        for nth, name in enumerate(names):
            calls_by_name[name] = Call(nth, len(names), (module, _base(name)[0]) not in doubtful)
            by_line[lines[name]].append(name)
        for same in by_line.values():
            for nth, name in enumerate(same):
                calls_by_name[name] = calls_by_name[name]._replace(on_line=nth, in_line=len(same))
    return calls_by_name


def _next(module_by_number: Mapping[int, str], number: int, step: int) -> int:
    """The nearest number that is there, on one side."""
    while number not in module_by_number and 0 <= number <= max(module_by_number):
        number += step
    return number


def _base(name: str) -> tuple[str, int]:
    match = _SUFFIX.search(name)
    return (name[: match.start()], int(match[1])) if match else (name, 0)


def results(graph: Graph, scopes: Sequence[Scope]) -> dict[str, Result]:
    """Values that calls of torch's graph give; the others are steps on the way to them.

    A value has the name of its call. Of several results each has one that says only that it is a
    part; they are the outputs of one node, in order.
    """
    results_by_value: dict[str, Result] = {}
    parts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for node, scope in zip(graph.nodes, scopes, strict=True):
        if not scope.operator or not scope.target:
            continue
        if scope.operator in node.outputs:
            results_by_value[scope.operator] = Result(scope.operator)
        elif node.outputs and all(not v or PART.fullmatch(v) for v in node.outputs):
            parts[scope.operator].append(node.outputs)
    for call, outputs in parts.items():
        # Several nodes for one call: nothing says which of them holds the parts.
        if call not in results_by_value and len(outputs) == 1:
            results_by_value |= {
                value: Result(call, slot) for slot, value in enumerate(outputs[0]) if value
            }
    return results_by_value


def line_ends(graph: Graph, scopes: Sequence[Scope]) -> set[str]:
    """Values that are the only result of a line of the program, in its module."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    places = [(scope.module, scope.line) for scope in scopes]
    outputs = set(graph.outputs)
    for number, node in enumerate(graph.nodes):
        if not places[number][1]:
            continue
        for value in node.outputs:
            readers = graph.readers.get(value, ())
            if value and (value in outputs or any(places[r] != places[number] for r in readers)):
                groups[places[number]].append(value)
    # A line with a single result can be compared as a whole, however it was decomposed.
    return {values[0] for values in groups.values() if len(values) == 1}


# Nodes with weights: products, convolutions, norms, look-ups.


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


def weighted_nodes(graph: Graph, names: Names) -> list[dict[str, Any]]:
    """Every node with weights: its kind, its input, and the site of its result."""
    constant = _constants(graph)
    weighted_nodes: list[dict[str, Any]] = []
    for node in graph.nodes:
        kind = _KINDS.get(node.op)
        if kind is None or not node.outputs:
            continue
        data_input = _taken(node, constant, graph)
        if not data_input:
            continue
        made = _with_bias(node, constant, graph)
        about: dict[str, Any] = {"kind": kind, "takes": data_input, "makes": names.site(made)}
        shape = graph.shapes.get(made)
        if shape is not None and all(isinstance(size, int) for size in shape):
            about["shape"] = list(shape)
        if any(graph.nodes[n].op == "BatchNormalization" for n in graph.readers.get(made, ())):
            about["norm_after"] = True
        weighted_nodes.append(about)
    return weighted_nodes


def _constants(graph: Graph) -> set[str]:
    """Values that do not depend on any input: weights, and what is computed of them alone."""
    constants = set(graph.constants)
    for node in graph.nodes:
        # A loop or branch may compute something else every time.
        if all(value in constants for value in node.inputs if value) and not node.subgraphs:
            constants.update(value for value in node.outputs if value)
    return constants


def _taken(node: Node, constant: set[str], graph: Graph) -> str:
    """The value that a node works on, if its other operand is a weight; empty if not."""
    operands = [value for value in node.inputs[:2] if value]
    if node.op == "Gather":
        table, ids = (*operands, "", "")[:2]
        shape = graph.shapes.get(table)
        # An embedding table has two axes; other look-ups are indexing.
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
    # A bias has one axis; another sum is a residual connection.
    shape = graph.shapes.get(other[0]) if len(other) == 1 else None
    is_bias = after.op == "Add" and bool(other) and other[0] in constant
    return after.outputs[0] if is_bias and shape is not None and len(shape) == 1 else made
