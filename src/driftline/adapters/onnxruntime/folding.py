"""What modules took and gave before a node made one of them: who lies inside which fusion.

A convolution, the batch norm and the activation after it become one node. What the first two gave
is computed nowhere; what the node gives was computed from it, and is there to be compared at every
module that gives or takes it. Knows graphs and modules; no session, no run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from driftline.adapters.onnxruntime.modules import MERGED, ModuleCall
from driftline.adapters.onnxruntime.names import ROOT
from driftline.adapters.onnxruntime.recording import Seen, slot_of

_PLUMBING = ("ReorderInput", "ReorderOutput", "Cast", "Transpose")
"""Nodes that only lay out again, or widen, what they take."""
Place = tuple[str, int, str]
"""A module, which call of it, and the port."""
Tensor = tuple[str, int, str, str]
"""A place and the slot there."""


class Fusion(NamedTuple):
    """A node that computes what several nodes of the exported graph did.

    Attributes:
        node: Site of the last value that it stands for.
        op: Its type.
        holds: What modules took and gave that it computes no longer.
        at: Where what it gives is taken and given instead.
    """

    node: str
    op: str
    holds: tuple[Place, ...]
    at: tuple[Tensor, ...]


def fusions(seen: Seen) -> list[Fusion]:
    """Every node in which something lies that modules took or gave."""
    holds: dict[int, dict[Place, None]] = {}
    at: dict[str, dict[Tensor, None]] = {}
    for call in seen.modules:
        for place, number in _folded(call, seen):
            holds.setdefault(number, {}).setdefault(place)
        for value in call.outputs:
            slot = slot_of(value, call)
            at.setdefault(value, {}).setdefault((call.site, call.visit, "output", slot))
        for value in call.inputs:
            at.setdefault(value, {}).setdefault((call.site, call.visit, "input", value))
    for place, value in enumerate(seen.exported.outputs):
        at.setdefault(value, {}).setdefault((ROOT, 0, "output", str(place)))
    return [
        Fusion(
            seen.site(values[-1]),
            seen.optimised.nodes[number].op,
            tuple(held),
            tuple(dict.fromkeys(place for value in values for place in at.get(value, ()))),
        )
        for number, held in sorted(holds.items())
        if (values := seen.placed.gives[number]) and _is_whole(number, seen)
    ]


def _is_whole(number: int, seen: Seen) -> bool:
    """Whether a node takes nothing but values of the exported graph.

    One that takes a value of another name computes less than it seems: who made that did the rest.
    """
    graph = seen.optimised
    for value in graph.data_inputs(graph.nodes[number]):
        while value not in seen.exported.maker and value not in graph.inputs:
            maker = graph.maker.get(value)
            if maker is None or graph.nodes[maker].op not in _PLUMBING:
                return False
            before = graph.data_inputs(graph.nodes[maker])
            if not before:  # a weight that was widened
                break
            value = before[0]
    return True


def _folded(call: ModuleCall, seen: Seen) -> Iterator[tuple[Place, int]]:
    """What of a call is nowhere, with the node that it went into."""
    if not call.outputs:  # merged with its neighbour before any optimiser saw it
        holders = {seen.placed.holder.get(number, -1) for number in call.nodes}
    else:
        holders = {_holder(value, seen) for value in call.outputs}
    if len(holders) == 1 and (number := holders.pop()) >= 0:
        yield (call.site, call.visit, "output"), number
    takers = {_holder(value, seen) for value in call.inputs}
    if len(takers) == 1 and (number := takers.pop()) >= 0:
        yield (call.site, call.visit, "input"), number
    if call.class_name == MERGED:
        # What it handed to the module that it was merged with is inside the same node.
        for number in call.nodes:
            scope = seen.names.scopes[number]
            if scope.module and number in seen.placed.holder:
                yield (scope.module, call.visit, "input"), seen.placed.holder[number]


def _holder(value: str, seen: Seen) -> int:
    """The node that a value went into; -1 for one that is still there, or a constant."""
    maker = seen.exported.maker.get(value)
    if maker is None or seen.optimised.known(value):
        return -1
    return seen.placed.holder.get(maker, -1)
