"""The operators of a run, step by step: who was called, who feeds whom, who takes what by name.

What rules about operators' inputs share, read once per step. Draws no conclusions.
"""

from __future__ import annotations

from collections.abc import Mapping

from driftline.alignment.calls import Call, Frame, calls_of, frames_of
from driftline.alignment.dataflow import Dataflow, Dataflows
from driftline.runs.record import Record
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
        """What was called in the step of a record, and the edges."""
        frame = _frame(record)
        if frame not in self._known:
            if self._frames is None:
                self._frames = frames_of(self.run.records)
            calls = calls_of(sorted(self._frames.get(frame, []), key=lambda each: each.order))
            by_site = {call.site: call for call in calls if call.leaf and not call.visit}
            self._known[frame] = by_site, self._flows.of(frame, calls, frame)
        return self._known[frame]

    def taken(self, record: Record) -> Record | None:
        """The input of an operator inside that a container only hands on; None if it is none."""
        if record.key.port != "input":
            return None
        calls, flow = self.at(record)
        name = flow.names.get((record.key.site, record.key.slot))
        if not name:
            return None
        frame = _frame(record)
        if frame not in self._taken:
            first: dict[str, Record] = {}
            for each in (each for call in calls.values() for each in call.records):
                called = flow.names.get((each.key.site, each.key.slot))
                if called and each.key.port == "input":
                    first.setdefault(called, each)
            self._taken[frame] = first
        return self._taken[frame].get(name)


def _frame(record: Record) -> Frame:
    return Frame(record.key.rank, record.key.process, record.key.step)
