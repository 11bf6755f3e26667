"""Programs that inductor wrote: what each shows while it runs, and to whom."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from typing import Any

from driftline.adapters.torch.graphs.insight import Insight
from driftline.adapters.torch.graphs.recorder import Compiled, Execution, Recorder
from driftline.adapters.torch.graphs.working_steps import Unit, Workings


class Programme:
    """One compiled graph, and the executions of it that are under way, by thread.

    Attributes:
        shown: Who is shown its values.
        first: The first value of an execution.
        silent: Inputs that are not recorded: parameters.
        part_of: The graph that executes it, for the body of a control flow operator.
        within: What comes before the names of such a body.
        workings: What is computed beside its kernels.
    """

    def __init__(self) -> None:
        self.shown: list[tuple[Recorder, Compiled]] = []
        self.first = ""
        self.silent: set[str] = set()
        self.part_of: Programme | None = None
        self.within = ""
        self.workings: Workings | None = None
        self._thread = threading.local()

    def take(self, buffer: str, value: Any) -> None:
        """A kernel has written this, or the graph was given it."""
        executions, insight = self._under_way(buffer)
        if insight is not None:
            insight.give(buffer, value)
        if buffer not in self.silent:
            for execution in executions:
                execution.take_kept(buffer, value)

    def called(self, unit: int) -> None:
        """A kernel was called; -1 for the inputs."""
        if self.workings is None:
            return
        insight = self._under_way("")[1]
        if insight is not None:
            insight.turn(unit + 1)

    def _under_way(self, buffer: str) -> tuple[list[Execution], Insight | None]:
        """Of this thread; the first buffer of the graph begins a new one."""
        found = getattr(self._thread, "executions", None)
        if found is None or (buffer and buffer == self.first):
            executions = [
                execution
                for one, compiled in self.shown
                if (execution := one.execution(compiled)) is not None
            ]
            found = executions, self._insight(executions)
            self._thread.executions = found
        return found

    def _insight(self, executions: list[Execution]) -> Insight | None:
        if self.workings is None or not executions:
            return None

        def show(node: str, kernel: str, value: Any) -> None:
            for execution in executions:
                execution.take_inside(node, kernel, value)

        def tell(node: str, error: float, kernel: bool) -> None:
            for execution in executions:
                execution.take_error(node, error, kernel=kernel)

        return Insight(self.workings, show, tell)


class Scheduled:
    """A graph that is being scheduled.

    Attributes:
        number: Of the program.
        inputs: What the program shows of what it is given.
        waiting: Scheduled nodes whose kernel was not called yet.
        units: Kernels in the order of their calls.
        ends: By buffer or input: the last kernel that reads it.
        bodies: Of control flow operators, with what comes before their names.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inputs: list[str] = []
        self.waiting: list[Any] = []
        self.units: list[Unit] = []
        self.ends: dict[str, int] = {}
        self.bodies: list[tuple[str, Scheduled]] = []
