"""The tensors of a dump put together by the operator they belong to, and what matching finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from driftline.alignment.operator_graph import flat
from driftline.runs.key import TensorKey
from driftline.runs.record import Record


class Operator(NamedTuple):
    """One dumped call of an operator.

    Attributes:
        name: Without its graph's name, flattened as file names are.
        class_name: Its type.
        inputs: In the order of their slots.
        outputs: The same.
    """

    name: str
    class_name: str
    inputs: list[Record]
    outputs: list[Record]

    @property
    def records(self) -> list[Record]:
        return [*self.inputs, *self.outputs]


class Match(NamedTuple):
    """Two tensors that belong together; whose side is which, the caller knows."""

    ours: Record
    theirs: Record
    confidence: float = 1.0
    same_name: bool = False

    @property
    def turned(self) -> Match:
        """The same, seen from the other side."""
        return self._replace(ours=self.theirs, theirs=self.ours)


class Found(NamedTuple):
    """What comparing two graphs gave.

    Attributes:
        matches: In the order of our operators.
        ours: Why tensors of our side are alone, where there is something to say.
        theirs: The same for the other side.
    """

    matches: list[Match]
    ours: dict[TensorKey, str]
    theirs: dict[TensorKey, str]


def operators_of(records: Iterable[Record], prefix: str) -> dict[str, Operator]:
    """Operators by name, in the order of their first tensor."""
    found: dict[str, Operator] = {}
    for record in records:
        name = flat(record.key.site.removeprefix(prefix))
        operator = found.get(name)
        if operator is None:
            operator = found[name] = Operator(name, record.class_name, [], [])
        if record.key.port == "input":
            operator.inputs.append(record)
        elif record.key.port == "output":
            operator.outputs.append(record)
    for operator in found.values():
        operator.inputs.sort(key=_slot)
        operator.outputs.sort(key=_slot)
    return found


def at_slot(records: Iterable[Record], slot: str) -> Record | None:
    return next((record for record in records if record.key.slot == slot), None)


def _slot(record: Record) -> tuple[int, ...]:
    parts = record.key.slot.split(".")
    return tuple(int(part) if part.isascii() and part.isdigit() else -1 for part in parts)
