"""Choose the values of an optimised graph to record, in execution order, and split them.

An observation is one tensor at one place: an input or output of a node or module. Observations are
split into portions. Each portion is captured by a separate execution, so that only the tensors of
one portion are in memory. This file knows graphs and sizes, but no session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.captures.onnxruntime.graph import Graph, Lineage, Node
from driftline.captures.onnxruntime.scopes import ROOT, ModuleCall, Names, module_calls, root_call
from driftline.captures.onnxruntime.tensors import TYPES
from driftline.captures.selection import Selection
from driftline.numerics.dtypes import DTYPES

_WITH_SUM = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Norms that ONNX Runtime fuses with the sum before them."""
_UNKNOWN = 16 << 20
"""Assumed bytes of a value if no size in the graph is known."""


class Observation(NamedTuple):
    """One tensor at one place.

    Attributes:
        site: Site of the node or module.
        port: input, output or param.
        slot: Name of the tensor in the port.
        value: Name of the tensor in the graph.
        class_name: Operator of the node, or class of the module.
        visit: Index of the module's call.
        alias: Another name of the slot.
    """

    site: str
    port: str
    slot: str
    value: str
    class_name: str
    visit: int = 0
    alias: str = ""


class TracedGraph(NamedTuple):
    """An optimised graph, with everything that is known about its origin."""

    exported: Graph
    optimised: Graph
    names: Names
    lineage: Lineage
    modules: list[ModuleCall]

    @classmethod
    def of(cls, exported: Graph, optimised: Graph, names: Names, where: Lineage) -> TracedGraph:
        return cls(exported, optimised, names, where, module_calls(exported, names))

    def site(self, value: str) -> str:
        return self.names.site(value, self.lineage.near.get(value, ""))

    def is_there(self, value: str) -> bool:
        """Whether a value is still computed in the optimised graph, or is an input of it."""
        return value in self.optimised.maker or value in self.optimised.inputs


def observations_of(traced: TracedGraph, levels: Sequence[str]) -> list[Observation]:
    """All observations at some levels, in execution order."""
    before, after = _module_observations(traced) if "modules" in levels else ({}, {})
    observations: list[Observation] = []
    root = root_call(traced.exported, traced.names)
    if "modules" in levels:
        observations += [
            Observation(ROOT, "input", value, value, root.class_name, alias=str(place))
            for place, value in enumerate(traced.optimised.inputs)
        ]
    for number, node in enumerate(traced.optimised.nodes):
        made = [value for value in node.outputs if value]
        if node.op == "Constant" or not made:
            # Constants are part of the model, not computed values.
            continue
        observations += before.get(number, [])
        site = traced.site(made[0])
        if "params" in levels:
            observations += [
                _parameter(value, site, node.shown_op, number, traced)
                for value in dict.fromkeys(node.inputs)
                if value in traced.optimised.weights
            ]
        if "ops" in levels:
            observations += [
                Observation(site, "input", value, value, node.shown_op)
                for value in traced.optimised.data_inputs(node)
            ]
            observations += [
                Observation(traced.site(value), "output", "0", value, node.shown_op)
                for value in made
            ]
        observations += after.get(number, [])
    if "modules" in levels:
        observations += [
            Observation(ROOT, "output", str(place), value, root.class_name, alias=value)
            for place, value in enumerate(traced.optimised.outputs)
        ]
    return observations


def _parameter(value: str, site: str, op: str, number: int, traced: TracedGraph) -> Observation:
    """The observation of a weight.

    It belongs to the module in its name, if a node of that module reads it; otherwise to the node.
    If an exporter merged modules, weights have their old names but other values.
    """
    path, _, slot = value.rpartition(".")
    for member in traced.lineage.members[number]:
        scope = traced.names.scopes[member]
        if path and scope.module == path and value in traced.exported.weights:
            kind = scope.classes[-1] if scope.classes else ""
            return Observation(path, "param", slot, value, kind)
    return Observation(site, "param", value, value, op)


def _module_observations(
    traced: TracedGraph,
) -> tuple[dict[int, list[Observation]], dict[int, list[Observation]]]:
    """Observations of modules: inputs by the node before which they are recorded, and outputs.

    Inputs are recorded before the module's first node, an output after the node that makes it.
    """
    before: dict[int, list[Observation]] = {}
    after: dict[int, list[Observation]] = {}
    for call in traced.modules:
        held = [traced.lineage.holder[n] for n in call.nodes if n in traced.lineage.holder]
        if not held:
            continue
        # An input that was fused away is not computed.
        present = [value for value in call.inputs if traced.is_there(value)]
        if call.inputs and not present:
            present = _terms(traced.optimised.nodes[min(held)], traced)
        before.setdefault(min(held), []).extend(
            Observation(call.site, "input", value, value, call.class_name, call.visit)
            for value in present
        )
        left = [value for value in call.outputs if value in traced.optimised.maker]
        for value in left:
            slot = slot_of(value, call)
            # Inserted at the front, because calls are listed outermost first but inner modules end
            # first.
            after.setdefault(traced.optimised.maker[value], []).insert(
                0, Observation(call.site, "output", slot, value, call.class_name, call.visit)
            )
    return before, after


def _terms(node: Node, traced: TracedGraph) -> list[str]:
    """The terms of a sum that was fused into a norm; they are the inputs, instead of the sum."""
    terms = node.inputs[:2] if node.op in _WITH_SUM else ()
    return [value for value in terms if traced.is_there(value)]


def slot_of(value: str, call: ModuleCall) -> str:
    """The slot of a module's output: `0` for a single one, otherwise the value's name.

    The order of several outputs is unknown.
    """
    return "0" if len(call.outputs) == 1 else value


def wanted(
    observations: Iterable[Observation], selection: Selection, ids: Mapping[str, str]
) -> list[Observation]:
    """The observations that are selected."""
    return [
        observation
        for observation in observations
        if selection.takes_port(observation.port)
        and selection.takes_place(
            observation.site, observation.class_name, ids.get(observation.site)
        )
    ]


def portions(
    observations: Sequence[Observation], sizes: Mapping[str, int], memory: int, max_values: int
) -> list[list[Observation]]:
    """Split observations into portions whose distinct values fit into memory.

    Args:
        observations: All observations, in order.
        sizes: Bytes of every computed value; inputs and constants are not counted.
        memory: Largest number of bytes of a portion.
        max_values: Largest number of values in a portion; 0 means no limit.
    """
    parts: list[list[Observation]] = [[]] if observations else []
    in_portion: set[str] = set()
    total = 0
    for observation in observations:
        # A value that several observations share is in memory once.
        if observation.value in sizes and observation.value not in in_portion:
            size = sizes[observation.value]
            # A portion has at least one value, however large it is.
            if in_portion and (
                total + size > memory or (max_values and len(in_portion) >= max_values)
            ):
                parts.append([])
                in_portion = set[str]()
                total = 0
            in_portion.add(observation.value)
            total += size
        parts[-1].append(observation)
    return parts


def sizes_of(graph: Graph, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of every computed value; an estimate if its shape or dtype is unknown.

    Args:
        graph: The optimised graph, with the shapes that ONNX Runtime inferred.
        input_shapes: Shapes of the inputs, from which named sizes are known.
    """
    named: dict[str, int] = {}
    for name, shape in input_shapes.items():
        # Named sizes such as `batch` get their number from the inputs of this step.
        for size, actual in zip(graph.shapes.get(name, ()), shape, strict=False):
            if isinstance(size, str):
                named[size] = actual
    byte_counts: dict[str, int] = {}
    for value in graph.maker:
        shape, dtype = graph.shapes.get(value), TYPES.get(graph.types.get(value, 0), "")
        if shape is None or not dtype:
            continue
        sizes = [named.get(size) if isinstance(size, str) else size for size in shape]
        if None not in sizes:
            byte_counts[value] = DTYPES[dtype].byte_count(
                math.prod(s for s in sizes if s is not None)
            )
    # The largest known size is a safe estimate for a value of unknown shape.
    guess = max(byte_counts.values(), default=_UNKNOWN)
    return {value: byte_counts.get(value, guess) for value in graph.maker}
