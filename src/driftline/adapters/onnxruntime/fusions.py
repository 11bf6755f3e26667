"""What an optimiser did to a graph: which nodes of the exported one each of its nodes stands for.

Values keep their names where they are still computed. Walking back from a node's outputs through
the exported graph, as far as the next value that both have, gives what it replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from driftline.adapters.onnxruntime.graph import Graph

_LAYOUTS = ("ReorderOutput", "ReorderInput", "Cast")


class Placed(NamedTuple):
    """The nodes of an optimised graph, seen from the exported one.

    Attributes:
        members: For each node of the optimised graph the numbers of those it stands for.
        holder: Number of an exported node → that of the optimised one it went into. One that became
            a constant, or was found to be useless, has none.
        near: Value that only the optimised graph has → the next one after it that both have.
        gives: For each node of the optimised graph the values of the exported one that it computes,
            though another node may lay them out.
    """

    members: list[tuple[int, ...]]
    holder: dict[int, int]
    near: dict[str, str]
    gives: list[tuple[str, ...]]


def placed(exported: Graph, optimised: Graph) -> Placed:
    """Say what each node of an optimised graph stands for."""
    members: list[tuple[int, ...]] = []
    holder: dict[int, int] = {}
    near = _near(exported, optimised)
    worker = {
        number: _worker(number, exported, optimised) for number in range(len(optimised.nodes))
    }
    # In two rounds: a node of the exported graph belongs to the one that makes its own output.
    owned: dict[int, set[int]] = {}
    gives: dict[int, list[str]] = {}
    for number, node in enumerate(optimised.nodes):
        for value in node.outputs:
            if value in exported.maker:
                holder[exported.maker[value]] = worker[number]
                owned.setdefault(worker[number], set()).add(exported.maker[value])
                gives.setdefault(worker[number], []).append(value)
    for number in range(len(optimised.nodes)):
        found = _replaced(owned.get(number, set()), exported, optimised)
        for one in found:
            holder.setdefault(one, number)
        members.append(tuple(sorted(found)))
    return Placed(
        members, holder, near, [tuple(gives.get(n, ())) for n in range(len(optimised.nodes))]
    )


def _worker(number: int, exported: Graph, optimised: Graph) -> int:
    """The node that does the work of one that only lays out again what was made in a device's own
    layout.
    """
    node = optimised.nodes[number]
    while node.op in _LAYOUTS and node.inputs:
        maker = optimised.maker.get(node.inputs[0])
        if maker is None or node.inputs[0] in exported.maker:
            break
        number, node = maker, optimised.nodes[maker]
    return number


def _replaced(own: set[int], exported: Graph, optimised: Graph) -> set[int]:
    found = set(own)
    waiting = list(own)
    while waiting:
        for value in exported.nodes[waiting.pop()].inputs:
            maker = exported.maker.get(value)
            if maker is None or maker in found or optimised.known(value):
                continue
            found.add(maker)
            waiting.append(maker)
    return found


def _near(exported: Graph, optimised: Graph) -> dict[str, str]:
    """For values of the optimiser's own, from the graph's end: where they lead."""
    near: dict[str, str] = {}
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
