"""What is recorded of an optimised graph, in the order of its execution, and in which portions.

A sight is one tensor at one place: a node's input, its output, a module's. Portions of sights are
captured one after the other, each by an execution of its own, so that no more than one portion's
tensors are in memory. Knows graphs and sizes; no session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.captures.onnxruntime.graph import QUANTISED, Graph, Placed
from driftline.captures.onnxruntime.scopes import ROOT, ModuleCall, Names, module_calls, root_call
from driftline.captures.onnxruntime.tensors import TYPES
from driftline.captures.selection import Selection
from driftline.numerics.dtypes import DTYPES

_UNKNOWN = 16 << 20
"""Bytes that a value is taken for where no size of the graph is known."""


class Sight(NamedTuple):
    """One tensor at one place.

    Attributes:
        site: The place.
        port: input, output or param.
        slot: Which tensor of it.
        value: The name it has in the graph.
        class_name: Of the place.
        visit: Which call of a module.
        alias: Another name of the slot.
    """

    site: str
    port: str
    slot: str
    value: str
    class_name: str
    visit: int = 0
    alias: str = ""


class Seen(NamedTuple):
    """An optimised graph and everything that is known of where it comes from."""

    exported: Graph
    optimised: Graph
    names: Names
    placed: Placed
    modules: list[ModuleCall]

    @classmethod
    def of(cls, exported: Graph, optimised: Graph, names: Names, where: Placed) -> Seen:
        return cls(exported, optimised, names, where, module_calls(exported, names))

    def site(self, value: str) -> str:
        return self.names.site(value, self.placed.near.get(value, ""))

    def is_there(self, value: str) -> bool:
        """Whether the optimised graph still has a value as a tensor that is computed or given."""
        return value in self.optimised.maker or value in self.optimised.inputs


def sights(seen: Seen, levels: Sequence[str]) -> list[Sight]:
    """Everything that can be recorded, in order."""
    before, after = _module_sights(seen) if "modules" in levels else ({}, {})
    found: list[Sight] = []
    root = root_call(seen.exported, seen.names)
    if "modules" in levels:
        found += [
            Sight(ROOT, "input", value, value, root.class_name, alias=str(place))
            for place, value in enumerate(seen.optimised.inputs)
        ]
    for number, node in enumerate(seen.optimised.nodes):
        made = [value for value in node.outputs if value]
        if node.op == "Constant" or not made:
            continue
        found += before.get(number, [])
        site = seen.site(made[0])
        if "params" in levels:
            found += [
                _parameter(value, site, node.op, number, seen)
                for value in dict.fromkeys(node.inputs)
                if value in seen.optimised.weights
            ]
        if "ops" in levels:
            found += [
                Sight(site, "input", value, value, node.op)
                for value in seen.optimised.data_inputs(node)
            ]
            found += [Sight(seen.site(value), "output", "0", value, node.op) for value in made]
        found += after.get(number, [])
    if "modules" in levels:
        found += [
            Sight(ROOT, "output", str(place), value, root.class_name, alias=value)
            for place, value in enumerate(seen.optimised.outputs)
        ]
    return found


def _parameter(value: str, site: str, op: str, number: int, seen: Seen) -> Sight:
    """A weight at the module whose name it has, if that is the one that reads it; else at the node.

    Where an exporter merged modules the weights have their old names and other values.
    """
    path, _, slot = value.rpartition(".")
    for one in seen.placed.members[number]:
        scope = seen.names.scopes[one]
        if path and scope.module == path and value in seen.exported.weights:
            kind = scope.classes[-1] if scope.classes else ""
            return Sight(path, "param", slot, value, kind)
    return Sight(site, "param", value, value, op)


def _module_sights(seen: Seen) -> tuple[dict[int, list[Sight]], dict[int, list[Sight]]]:
    """What modules are given, before their first node, and what they give, after the one that
    makes it.
    """
    before: dict[int, list[Sight]] = {}
    after: dict[int, list[Sight]] = {}
    for call in seen.modules:
        held = [seen.placed.holder[n] for n in call.nodes if n in seen.placed.holder]
        if not held:
            continue
        there = [value for value in call.inputs if seen.is_there(value)]
        before.setdefault(min(held), []).extend(
            Sight(call.site, "input", value, value, call.class_name, call.visit) for value in there
        )
        # Of integers only the nodes know what they mean.
        left = [
            value
            for value in call.outputs
            if value in seen.optimised.maker and not value.endswith(QUANTISED)
        ]
        for value in left:
            slot = slot_of(value, call)
            after.setdefault(seen.optimised.maker[value], []).insert(
                0, Sight(call.site, "output", slot, value, call.class_name, call.visit)
            )
    return before, after


def slot_of(value: str, call: ModuleCall) -> str:
    """The slot of an output: one that leaves is what the module gives; of several nothing says
    which is which.
    """
    return "0" if len(call.outputs) == 1 else value


def wanted(found: Iterable[Sight], selection: Selection, ids: Mapping[str, str]) -> list[Sight]:
    """The sights that a selection takes."""
    return [
        sight
        for sight in found
        if selection.takes_port(sight.port)
        and selection.takes_place(sight.site, sight.class_name, ids.get(sight.site))
    ]


def portions(
    found: Sequence[Sight], sizes: Mapping[str, int], memory: int, most: int
) -> list[list[Sight]]:
    """Consecutive sights whose distinct values take no more than some bytes.

    Args:
        found: All of them.
        sizes: Bytes of every value; those that are given or constant take none.
        memory: The bytes.
        most: How many values a portion may have at most; 0 is no limit.
    """
    parts: list[list[Sight]] = [[]] if found else []
    inside: set[str] = set()
    total = 0
    for sight in found:
        if sight.value in sizes and sight.value not in inside:
            size = sizes[sight.value]
            if inside and (total + size > memory or (most and len(inside) >= most)):
                parts.append([])
                inside = set[str]()
                total = 0
            inside.add(sight.value)
            total += size
        parts[-1].append(sight)
    return parts


def sizes_of(graph: Graph, given: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """How many bytes every computed value takes, as far as the graph says; a guess where not.

    Args:
        graph: The optimised one, with the shapes that ONNX Runtime inferred.
        given: Shapes of the inputs, which say what named sizes are.
    """
    named: dict[str, int] = {}
    for name, shape in given.items():
        for size, actual in zip(graph.shapes.get(name, ()), shape, strict=False):
            if isinstance(size, str):
                named[size] = actual
    known: dict[str, int] = {}
    for value in graph.maker:
        shape, dtype = graph.shapes.get(value), TYPES.get(graph.types.get(value, 0), "")
        if shape is None or not dtype:
            continue
        sizes = [named.get(size) if isinstance(size, str) else size for size in shape]
        if None not in sizes:
            known[value] = DTYPES[dtype].byte_count(math.prod(s for s in sizes if s is not None))
    guess = max(known.values(), default=_UNKNOWN)
    return {value: known.get(value, guess) for value in graph.maker}
