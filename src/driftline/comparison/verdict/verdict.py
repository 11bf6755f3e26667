"""What a table's verdict hangs on, gathered while its judged rows pass by, once.

Knows no limits and words nothing: it counts, and remembers the few rows that are spoken of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from driftline.comparison.table.row import LOST, NOT_RUN, Row
from driftline.comparison.tolerance.tolerance import EXPLAINED
from driftline.comparison.verdict.coverage import CallCounts


def execution(row: Row) -> tuple[int, int, int, int]:
    """What comes first in the program comes first."""
    return (row.key.step, row.order, row.key.rank, row.key.process)


class RowCounts:
    """Counts of judged rows, and the rows that stand for them.

    Attributes:
        rows: How many there are.
        compared: How many were compared.
        failing: How many of those fail.
        first: The first that fails, in execution order.
        inside: How many are alone because they lie inside a fusion.
        bare: How many were compared by statistics that count no NaN and no Inf.
        explained: How many are over the limit of their format, and explained by their inputs.
        closest: Of those that keep a limit, the one that is nearest to it.
        unread: How many could not be read.
        first_unread: The first of them.
        not_run: How many were computed by something else than the backend in question.
        first_not_run: The first of them.
        incomparable: The first that could not be compared.
        only_inputs: Whether outputs are there, and nothing but inputs was compared.
        deciding: The metrics that decided.
        calls: Calls of either side, and how many of them are covered.
    """

    def __init__(self, calls: CallCounts | None = None) -> None:
        """Counts of nothing yet.

        Args:
            calls: Those of the same rows, where they were counted before: what is covered does not
                change with what passes.
        """
        self.rows = self.compared = self.failing = self.inside = self.bare = self.unread = 0
        self.not_run = 0
        self.explained = 0
        self.first: Row | None = None
        self.closest: Row | None = None
        self.first_unread: Row | None = None
        self.first_not_run: Row | None = None
        self.incomparable: Row | None = None
        self.deciding: set[str] = set()
        self.calls = calls or CallCounts()
        self._calls_are_known = calls is not None
        self._outputs = self._others = False

    @property
    def only_inputs(self) -> bool:
        return self._outputs and not self._others

    @property
    def failed(self) -> str:
        """How many of the compared tensors fail, in words."""
        if not self.compared:
            return "no tensor behind them could be compared"
        return f"{self.failing} of {self.compared} compared tensors fail"

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows, counted."""
        for row in rows:
            self.take(row)
            yield row

    def take(self, row: Row) -> None:
        status, port = row.status, row.key.port
        self.rows += 1
        if not self._calls_are_known:
            self.calls.take(row)
        # Extra outputs belong to the candidate; the question is what of the reference was
        # compared.
        if port == "output" and status != "extra":
            self._outputs = True
        # Also of lone rows: a tensor that is lost is unread wherever it stands.
        if LOST in row.reason:
            self.unread += 1
            self.first_unread = self.first_unread or row
        if row.reason.startswith(NOT_RUN):
            self.not_run += 1
            self.first_not_run = self.first_not_run or row
        if status in ("pass", "fail", "unjudged"):
            self._compared(row)
        elif status == "incomparable":
            self.incomparable = self.incomparable or row
        else:
            self.inside += row.inside_fusion

    def _compared(self, row: Row) -> None:
        self.compared += 1
        self.deciding.add(row.decided_by)
        if row.key.port != "input":
            self._others = True
        # Figures without counts of NaN cannot rule one out.
        if row.basis == "summary" and "one_sided" not in row.metrics:
            self.bare += 1
        if row.status == "fail":
            self.failing += 1
            # Rows come rank after rank, so the first in the table need not be the first
            # in time.
            if self.first is None or execution(row) < execution(self.first):
                self.first = row
        # What its inputs explain is over its limit, and not near it.
        elif row.limit_from.endswith(EXPLAINED):
            self.explained += 1
        elif (
            row.status == "pass"
            and row.limit
            and (self.closest is None or row.severity > self.closest.severity)
        ):
            self.closest = row
