"""How a matrix lies that an operator library takes as an input of a product: its operator says it.

By its sizes; of a square one by the operator's parameter (`transposeB`, which ATB has on unless it
is turned off). Never asks the values.
"""

from __future__ import annotations

from typing import Literal

from driftline.alignment.calls import enclosing, main_tensor
from driftline.alignment.operator_steps import OperatorSteps
from driftline.runs.record import Record

Layout = Literal["out_in", "in_out", "rows", ""]


class OperandLayouts:
    """The layouts of a run's operands."""

    def __init__(self, steps: OperatorSteps) -> None:
        self._steps = steps
        self._any = steps.run.facts.operator_sites

    def is_operand(self, record: Record) -> bool:
        """Whether an input is the matrix of a product, or is handed on to one."""
        return self._operand(record) is not None

    def of(self, record: Record) -> Layout:
        """How it lies; empty for what is no matrix of a product, or where nothing says it."""
        operand = self._operand(record)
        if operand is None:
            return ""
        calls, flow = self._steps.at(operand)
        call = calls[operand.key.site]
        if operand.shape[0] != operand.shape[1]:
            return "out_in" if operand.shape[0] == call.features else "in_out"
        param = flow.params.get(call.site)
        if param is None:
            return ""
        return "in_out" if param.get("transposeB", True) is False else "out_in"

    def _operand(self, record: Record) -> Record | None:
        """The matrix that a product takes: this input, or the one that it is handed on as."""
        key = record.key
        if not self._any or (key.port, key.phase, len(record.shape)) != ("input", "forward", 2):
            return None
        calls, _ = self._steps.at(record)
        if key.site not in calls:  # a container's, or that of an operation's kernel
            around = (calls[site] for site in enclosing(key.site) if site in calls)
            whole = next(around, None)
            inner = self._steps.taken(record)
            if whole is not None:
                inner = next((r for r in whole.records if _same_place(r, record)), None)
            if inner is None or inner.key.site not in calls or inner.shape != record.shape:
                return None
            record = inner
        call = calls[record.key.site]
        if call.kind != "linear" or record is main_tensor(call.records, "input"):
            return None
        return record if sorted(record.shape) == sorted((call.features, call.width)) else None


def _same_place(ours: Record, theirs: Record) -> bool:
    return (ours.key.port, ours.key.slot) == (theirs.key.port, theirs.key.slot)
