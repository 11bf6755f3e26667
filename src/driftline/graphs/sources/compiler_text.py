"""A compiler's graph: operators by name, their edges, and the FX node that each one implements.

It is built from the `graphs` of a topology. The name of a fused operator consists of the names of
its members, joined without a separator; `members` splits such a name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

LONGEST_NAME = 16_384
MOST_WAYS = 64
"""Largest number of ways to split a name that are compared.

Ways with the longest names come first.
"""

_FLAT = re.compile(r"[./\\\s]")
_FX = re.compile(r"([^-]+)-.*\.OUTPUT\.(\d+(?:\.\d+)*)", re.DOTALL)

Tensor = tuple[str, int]
"""An operator's name and the number of one of its outputs."""


class Node(NamedTuple):
    """One operator.

    Attributes:
        name: Name, flattened as in file names.
        class_name: Type of the operator.
        inputs: The sources of its data inputs, in order.
        fx: The FX node and slot that each output implements; None if there is none.
    """

    name: str
    class_name: str
    inputs: tuple[Tensor, ...] = ()
    fx: tuple[tuple[str, str] | None, ...] = ()


class Input(NamedTuple):
    """One data input of an operator: its position and its source."""

    node: str
    position: int
    source: Tensor


def flat(name: str) -> str:
    """A name as it appears in the file names of dumps."""
    return _FLAT.sub("_", name)


class OperatorGraph:
    """One graph of a run."""

    def __init__(self, kind: str, name: str, prefix: str, nodes: Iterable[Node] = ()) -> None:
        """Store the nodes in the order of the graph.

        Args:
            kind: `ge` or `fx`.
            name: Name of the graph in the dump.
            prefix: Prefix of the sites of its operators.
            nodes: Operators; empty if the dump has no graph text.
        """
        self.kind = kind
        self.name = name
        self.prefix = prefix
        self.nodes = {node.name: node for node in nodes}
        self.readers: dict[Tensor, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for tensor in node.inputs:
                self.readers[tensor].append(node.name)
        # Both are computed on first use: many dumps are matched by name and never need them.
        self._owners: dict[str, str] | None = None
        self._vocabulary: tuple[Collection[str], Vocabulary, dict[str, list[str]]] | None = None

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> OperatorGraph:
        """Read a graph from a topology.

        Raises:
            KeyError, TypeError, ValueError: The entry is damaged.
        """
        nodes = [
            Node(
                flat(str(node["name"])),
                str(node["class"]),
                tuple((flat(str(source)), int(output)) for source, output in node["inputs"]),
                tuple(_fx_of(str(name)) for name in node["fx"]),
            )
            for node in shown["nodes"]
        ]
        return cls(str(shown["kind"]), str(shown["name"]), str(shown["prefix"]), nodes)

    def fx_tensor(self, tensor: Tensor) -> tuple[str, str] | None:
        """The FX node and slot that an output implements."""
        # Texts may list fewer FX names than an operator has outputs.
        node = self.nodes.get(tensor[0])
        return node.fx[tensor[1]] if node is not None and 0 <= tensor[1] < len(node.fx) else None

    def owner(self, name: str) -> str:
        """The FX node of an operator: its own, or the only one that its outputs lead to."""
        if self._owners is None:
            self._owners = self._find_owners()
        return self._owners.get(name, "")

    def _find_owners(self) -> dict[str, str]:
        owners: dict[str, str] = {}
        # A graph lists producers before readers, so one pass from its end is enough.
        for node in reversed(self.nodes.values()):
            own = next((fx[0] for fx in node.fx if fx is not None), "")
            if not own:
                served = {
                    owners.get(reader, "")
                    for output in range(max(len(node.fx), 1))
                    for reader in self.readers.get((node.name, output), ())
                }
                own = served.pop() if len(served) == 1 else ""
            owners[node.name] = own
        return owners

    def is_inner(self, source: Tensor, owner: str) -> bool:
        """Whether a tensor is an intermediate of an FX node, which FX does not have."""
        node = self.nodes.get(source[0])
        return (
            node is not None
            and bool(node.inputs)
            and self.fx_tensor(source) is None
            and self.owner(source[0]) == owner
        )

    def inputs_of(self, members: Sequence[str], shown: int) -> list[Input]:
        """The inputs of several operators that none of them made, in order.

        Args:
            members: Names of the operators.
            shown: Number of inputs in the dump. If several members read the same tensor, the fused
                operator may read it only once.
        """
        # Tensors between members are internal to the fused operator.
        inside = set(members)
        read = [
            Input(name, position, source)
            for name in members
            if name in self.nodes
            for position, source in enumerate(self.nodes[name].inputs)
            if source[0] not in inside
        ]
        if len(read) != shown:
            # The order of first reading is kept, because operands are matched by position.
            once = list({operand.source: operand for operand in reversed(read)}.values())[::-1]
            read = once if len(once) == shown else read
        return read

    def outputs_of(self, members: Sequence[str]) -> list[Tensor]:
        """The outputs of several operators that others read, or that none reads, in order."""
        inside = set(members)
        outputs: list[Tensor] = []
        for name in members:
            node = self.nodes.get(name)
            for output in range(max(len(node.fx), 1) if node is not None else 0):
                readers = self.readers.get((name, output), ())
                if not readers or not inside.issuperset(readers):
                    outputs.append((name, output))
        return outputs

    def members(self, name: str, also: Collection[str] = ()) -> list[str]:
        """The operators that a name stands for: itself, or the fused ones.

        If there are several ways to split a name, the way whose operators are most connected in the
        graph is chosen; among equals, the one with the longest names first.

        Args:
            name: Name of a dumped operator.
            also: Additional names. Must be the same object for every call.

        Returns:
            Empty if the name is unknown.
        """
        name = flat(name)
        # Keyed by identity, because the caller passes the same collection for every name of a dump.
        if self._vocabulary is None or self._vocabulary[0] is not also:
            self._vocabulary = (also, Vocabulary({*self.nodes, *also}), {})
        _, words, members_of = self._vocabulary
        if name not in members_of:
            members_of[name] = self._members(name, also, words)
        return members_of[name]

    def _members(self, name: str, also: Collection[str], words: Vocabulary) -> list[str]:
        own = self.nodes.get(name)
        # An operator with its own FX names was not fused.
        if name in also or (own is not None and any(own.fx)):
            return [name]
        ways = [way for way in words.ways(name) if way != [name]]
        if own is not None:
            # A text written after optimisation lists the fused operator itself; only splits with FX
            # names add information.
            ways = [way for way in ways if any(any(self.nodes[part].fx) for part in way)]
        if ways:
            return max(ways, key=self._linked)
        return [name] if own is not None else []

    def _linked(self, members: list[str]) -> float:
        """Fraction of operators, without the first, that read from another member."""
        inside = set(members)
        nodes = [self.nodes[name] for name in members[1:] if name in self.nodes]
        linked = sum(any(source[0] in inside for source in node.inputs) for node in nodes)
        return linked / (len(members) - 1) if len(members) > 1 else 0.0


class Vocabulary:
    """Known names, and the ways to split a longer name into them."""

    def __init__(self, words: Collection[str]) -> None:
        # An empty name would match everywhere, without end.
        self.words = frozenset(words) - {""}
        self._lengths = sorted({len(word) for word in self.words}, reverse=True)

    def ways(self, name: str) -> Iterator[list[str]]:
        """Ways to write a name as a sequence of known names, longest first names first.

        >>> list(Vocabulary({"Add_1", "Add_12", "2Relu", "Relu"}).ways("Add_12Relu"))
        [['Add_12', 'Relu'], ['Add_1', '2Relu']]
        """
        # Names come from files, so the length and the number of ways are limited.
        end, words = len(name), self.words
        if end > LONGEST_NAME:
            return
        lengths = [length for length in self._lengths if length <= end]
        # Positions from which the rest can be split; without them the search is exponential.
        alive = bytearray(end + 1)
        alive[end] = 1
        for start in range(end - 1, -1, -1):
            for length in lengths:
                stop = start + length
                if stop <= end and alive[stop] and name[start:stop] in words:
                    alive[start] = 1
                    break
        ways = 0
        stack: list[tuple[int, list[str]]] = [(0, [])] if alive[0] else []
        while stack and ways < MOST_WAYS:
            start, parts = stack.pop()
            if start == end:
                ways += 1
                yield parts
                continue
            for length in reversed(lengths):  # the longest is pushed last and popped first
                stop = start + length
                if stop <= end and alive[stop] and name[start:stop] in words:
                    stack.append((stop, [*parts, name[start:stop]]))


def _fx_of(name: str) -> tuple[str, str] | None:
    """Split `add_2-aten.add.Tensor.OUTPUT.0` into node and slot."""
    match = _FX.fullmatch(name)
    return (flat(match[1]), match[2]) if match else None


def graphs_in(topology: Mapping[str, Any] | None) -> list[OperatorGraph]:
    """The graphs of a topology; empty if it has none or is damaged."""
    shown = (topology or {}).get("graphs")
    if not isinstance(shown, list | tuple):
        return []
    try:
        return [OperatorGraph.from_json(graph) for graph in cast("Sequence[Any]", shown)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return []
