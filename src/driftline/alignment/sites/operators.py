"""Operators of a run: their calls, dataflow and tensors, step by step.

`OperatorSteps` provides the inputs of operators to rules, and reads each step once. `Operator`
groups the tensors of a compiler's dump; `Match` and `Matching` hold the result of matching two
dumps. No rule is applied here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from driftline.alignment.sites.site_graph import Call, Frame, calls_of, frames_of
from driftline.alignment.sites.values import Dataflow, Dataflows
from driftline.graphs.sources.compiler_text import flat
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


class OperatorSteps:
    """The leaves of each step of a run by their sites, with the dataflow between them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._flows = Dataflows(run)
        self._frames: dict[Frame, list[Record]] | None = None
        self._known: dict[Frame, tuple[dict[str, Call], Dataflow]] = {}
        self._taken: dict[Frame, dict[str, Record]] = {}

    def at(self, record: Record) -> tuple[Mapping[str, Call], Dataflow]:
        """The calls in the step of a record by site, and the dataflow between them."""
        frame = _frame(record)
        if frame not in self._known:
            # Grouping all records takes time, so it is done on first use.
            if self._frames is None:
                self._frames = frames_of(self.run.records)
            calls = calls_of(sorted(self._frames.get(frame, []), key=lambda item: item.order))
            by_site = {call.site: call for call in calls if call.leaf and not call.visit}
            self._known[frame] = by_site, self._flows.of(frame, calls, frame)
        return self._known[frame]

    def taken(self, record: Record) -> Record | None:
        """The operator's input that is the same tensor as a container's input; None if unknown."""
        if record.key.port != "input":
            return None
        calls, flow = self.at(record)
        name = flow.names.get((record.key.site, record.key.slot))
        if not name:
            return None
        frame = _frame(record)
        if frame not in self._taken:
            first: dict[str, Record] = {}
            # Several operators may read one tensor; the first one represents all of them.
            for other in (other for call in calls.values() for other in call.records):
                called = flow.names.get((other.key.site, other.key.slot))
                if called and other.key.port == "input":
                    first.setdefault(called, other)
            self._taken[frame] = first
        return self._taken[frame].get(name)


def _frame(record: Record) -> Frame:
    return Frame(record.key.rank, record.key.process, record.key.step)


# --- operators of a compiler's dump


class Operator(NamedTuple):
    """One dumped call of an operator.

    Attributes:
        name: Name without that of its graph, flattened as in file names.
        class_name: Type of the operator.
        inputs: Inputs, in the order of their slots.
        outputs: Outputs, in the order of their slots.
    """

    name: str
    class_name: str
    inputs: list[Record]
    outputs: list[Record]

    @property
    def records(self) -> list[Record]:
        return [*self.inputs, *self.outputs]


class Match(NamedTuple):
    """Two paired tensors; the caller knows which side each belongs to."""

    record: Record
    partner: Record
    confidence: float = 1.0
    same_name: bool = False

    @property
    def flipped(self) -> Match:
        """The same match with the sides exchanged."""
        return self._replace(record=self.partner, partner=self.record)


class Matching(NamedTuple):
    """The result of matching two dumps.

    Attributes:
        matches: Matches, in the order of the operators.
        reasons: Why tensors of these operators have no partner, if a reason is known.
        partner_reasons: The same for the other side.
    """

    matches: list[Match]
    reasons: dict[TensorKey, str]
    partner_reasons: dict[TensorKey, str]


def operators_of(records: Iterable[Record], prefix: str) -> dict[str, Operator]:
    """Operators by name, in the order of their first tensor."""
    operators: dict[str, Operator] = {}
    for record in records:
        # File names of dumps contain flattened names of operators, so sites are flattened too.
        name = flat(record.key.site.removeprefix(prefix))
        operator = operators.get(name)
        if operator is None:
            operator = operators[name] = Operator(name, record.class_name, [], [])
        if record.key.port == "input":
            operator.inputs.append(record)
        elif record.key.port == "output":
            operator.outputs.append(record)
    for operator in operators.values():
        operator.inputs.sort(key=_slot)
        operator.outputs.sort(key=_slot)
    return operators


def at_slot(records: Iterable[Record], slot: str) -> Record | None:
    return next((record for record in records if record.key.slot == slot), None)


def _slot(record: Record) -> tuple[int, ...]:
    parts = record.key.slot.split(".")
    # Slots such as `0.1` are nested tuples; each level sorts as a number.
    return tuple(int(part) if part.isascii() and part.isdigit() else -1 for part in parts)
