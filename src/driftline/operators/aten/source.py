"""Calls of torch operators in a run of `driftline dump --level ops`, replayed on the CPU."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence

from driftline.errors import BadInput
from driftline.operators.aten.listing import calls_of
from driftline.operators.rows import OperatorCall
from driftline.operators.sources import Ask, Checked, Reproduction
from driftline.registry import require
from driftline.runs.run import Run

_VIEWS = "views and fresh memory have no values of their own: they are not among the operators"


class AtenSource:
    """Aten calls of a run, replayed on the CPU in float64."""

    kind = "aten calls"

    def __init__(self, run: Run, ask: Ask) -> None:
        self.run = run
        self.ask = ask
        listed = calls_of(run)
        require("torch", install="torch")
        for module in ask.imports:
            _imported(module)
        from driftline.operators.aten.rerunning import device_of

        self.device = device_of(ask.device) if ask.rerun else ""
        self._listed = [one for one in listed if ask.wants(one.call.op_type, one.call.ids)]
        self.filtered = len(listed) - len(self._listed)
        if not self._listed:
            raise BadInput(
                f"-ids and -opname leave none of {len(listed)} operators of {run.name}",
                hint="types: " + ", ".join(sorted({one.call.op_type for one in listed})[:8]),
            )
        self.remarks: Sequence[str] = self._remarked()

    def _remarked(self) -> list[str]:
        remarks = [_VIEWS]
        if self.ask.device and not self.ask.rerun:
            remarks.append("-device has no effect without -rerun: nothing is executed on it")
        if self.ask.rerun:
            remarks.append(f"executed again on {self.device}, in its own types")
        return remarks

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[Checked]:
        return map(self.at, range(len(self._listed)))

    def call(self, number: int) -> OperatorCall:
        """One of the calls, by its place."""
        return self._listed[number].call

    def at(self, number: int) -> Checked:
        """The same, replayed."""
        from driftline.operators.aten.checking import rows_of

        one = self._listed[number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has told the program already
            rows = tuple(rows_of(self.run, one, self.ask, self.device))
        if number % 256 == 255:
            self.run.release()
        return Checked(one.call, rows)

    def reproduction(self, checked: Checked) -> Reproduction | None:
        """The inputs, what the program gave, and how to execute the call, as a script."""
        from driftline.operators.aten.script import reproduction_of

        found = next(one for one in self._listed if one.call is checked.call)
        failing = [row.slot for row in checked.rows if row.status == "fail"]
        return reproduction_of(self.run, found, failing)


def _imported(module: str) -> None:
    """A module of the user that defines custom operators."""
    try:
        importlib.import_module(module)
    except Exception as trouble:
        raise BadInput(
            f"--import {module}: {type(trouble).__name__}: {trouble}",
            hint="name a module as Python does; its folder must be on PYTHONPATH",
        ) from None
