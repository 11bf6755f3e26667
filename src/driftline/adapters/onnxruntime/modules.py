"""Modules of an exported graph: what goes into each call of one, and what comes out.

A module is the nodes that stand in its scope. What leaves them is its output, what enters is its
input. A module that an exporter merged into its neighbour (a convolution and the batch norm after
it) is known by its weights only: its input is there, its output is computed nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from driftline.adapters.onnxruntime.graph import QUANTISED, Graph, Node
from driftline.adapters.onnxruntime.names import NOWHERE, ROOT, Names, Scope

MERGED = "merged"
"""Class of a module that the exporter merged into another one."""

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_DEQUANTISED = "_DequantizeLinear_Output"
"""How onnxruntime.quantization calls what integers are as numbers again."""
_ANONYMOUS = "onnx::"
"""How torch's older exporter calls weights that it computed: with a batch norm worked in, say."""


class ModuleCall(NamedTuple):
    """One call of one module.

    Attributes:
        site: The module's path.
        visit: Which call of it.
        class_name: Its class; empty where the exporter does not say.
        nodes: Numbers of its nodes in the exported graph.
        inputs: Values that enter, in the order in which they are first read.
        outputs: Values that leave, in the order in which they are made.
        reworked: What leaves it with the batch norm after it worked in, which is no longer its own.
    """

    site: str
    visit: int
    class_name: str
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reworked: str = ""


def module_calls(graph: Graph, names: Names) -> list[ModuleCall]:
    """Every call of every module but the root, inner ones after those around them."""
    members: dict[str, list[int]] = {}
    classes: dict[str, str] = {}
    for number, scope in enumerate(names.scopes):
        for depth, path in enumerate(scope.modules):
            members.setdefault(path, []).append(number)
            if len(scope.classes) == len(scope.modules) + 1:
                classes.setdefault(path, scope.classes[depth + 1])
    found: list[ModuleCall] = []
    for path, numbers in members.items():
        for visit, part in enumerate(_calls(numbers, names.scopes)):
            found.append(_call(path, visit, classes.get(path, ""), part, graph, names))
    merged = list(_merged(graph, members))
    taken = {
        (names.scopes[number].module, value)
        for call in merged
        for number in call.nodes
        for value in call.inputs
    }
    # What the first of merged modules is given is not what the other one is given.
    found = [
        call._replace(inputs=tuple(v for v in call.inputs if (call.site, v) not in taken))
        for call in found
    ]
    return [*found, *merged]


def _calls(numbers: Sequence[int], scopes: Sequence[Scope]) -> list[list[int]]:
    """Stretches of a module's nodes, if each makes the same calls, or makes them several times;
    else all of them as one.
    """
    stretches = [[numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    unit = min(stretches, key=len)
    called = [scopes[number].target for number in unit]
    pieces = [
        stretch[at : at + len(unit)]
        for stretch in stretches
        for at in range(0, len(stretch), len(unit))
    ]
    alike = all([scopes[number].target for number in piece] == called for piece in pieces)
    return pieces if len(stretches) > 1 and all(called) and alike else [list(numbers)]


def _call(
    path: str, visit: int, class_name: str, numbers: list[int], graph: Graph, names: Names
) -> ModuleCall:
    inside = set(numbers)
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for number in numbers:
        node = graph.nodes[number]
        for value in graph.data_inputs(node):
            if graph.maker.get(value, -1) not in inside:
                inputs.setdefault(value)
        for value in node.outputs:
            readers = graph.readers.get(value, ())
            leaves = value in graph.outputs or not inside.issuperset(readers)
            if value and leaves and value not in graph.constants:
                outputs.setdefault(_as_numbers(value, graph, names))
    reworked = ""
    if not names.told and any(_reworked(graph.nodes[number]) for number in numbers):
        last = graph.nodes[numbers[-1]]
        reworked = last.outputs[0] if len(outputs) == 1 and _reworked(last) else ""
        if reworked:  # a container may end with it too: what it gives is right
            inner = names.scopes[numbers[-1]].module == path
            outputs = {} if inner else outputs
            reworked = reworked if inner else ""
    return ModuleCall(
        path, visit, class_name, tuple(numbers), tuple(inputs), tuple(outputs), reworked
    )


def _as_numbers(value: str, graph: Graph, names: Names) -> str:
    """What integers are as numbers, where a quantiser put just that behind a module."""
    for reader in graph.readers.get(value, ()) if value not in graph.outputs else ():
        node = graph.nodes[reader]
        if node.op == "DequantizeLinear" and names.scopes[reader] is NOWHERE:
            return node.outputs[0]
    return value


def _reworked(node: Node) -> bool:
    """A convolution whose weights torch's older exporter has computed: a batch norm is in them."""
    weights = node.inputs[1:2]
    return node.op in _CONVOLUTIONS and bool(weights) and weights[0].startswith(_ANONYMOUS)


def _merged(graph: Graph, members: dict[str, list[int]]) -> Iterator[ModuleCall]:
    """Modules without nodes whose weights a node of another module reads."""
    seen: set[str] = set()
    for number, node in enumerate(graph.nodes):
        for value in node.inputs[1:]:
            path, _, name = _weight(value, graph).rpartition(".")
            if name != "weight" or path in members or not path:
                continue
            if path not in seen and node.op not in ("Gather", "Transpose"):
                seen.add(path)
                inputs = tuple(graph.data_inputs(node)[:1])
                yield ModuleCall(path, 0, MERGED, (number,), inputs, ())


def _weight(value: str, graph: Graph) -> str:
    """The weight that a value is, or was before it was quantised; empty if it is none."""
    if value in graph.weights:
        return value.removesuffix(QUANTISED)
    plain = value.removesuffix(_DEQUANTISED)
    return plain if f"{plain}{QUANTISED}" in graph.weights else ""


def root_call(graph: Graph, names: Names) -> ModuleCall:
    """The model as a whole."""
    kinds = next((scope.classes[0] for scope in names.scopes if scope.classes), "")
    nodes = tuple(range(len(graph.nodes)))
    return ModuleCall(ROOT, 0, kinds, nodes, tuple(graph.inputs), tuple(graph.outputs))
