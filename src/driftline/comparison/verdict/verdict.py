"""Counts of judged rows, which the verdict of a table is decided from.

The counts are taken in one pass over the rows. This file knows no limits and writes no sentences,
apart from the number of failing tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from driftline.comparison.table.row import LOST, NOT_RUN, Row
from driftline.comparison.tolerance.tolerance import EXPLAINED
from driftline.comparison.verdict.coverage import CallCounts


def execution(row: Row) -> tuple[int, int, int, int]:
    """Sort key of a row in the order of execution."""
    return (row.key.step, row.order, row.key.rank, row.key.process)


class RowCounts:
    """Counts of judged rows, and the rows that findings mention as examples.

    Attributes:
        rows: Number of rows.
        compared: Number of rows that were compared.
        failing: Number of compared rows that fail.
        first: The first failing row in execution order.
        inside: Number of rows without a partner because they are inside a fusion.
        bare: Number of rows compared by statistics that do not count NaN and Inf.
        explained: Number of rows that exceed the limit of their format but are explained by their
            inputs.
        closest: Of the rows within their limits, the one closest to its limit.
        unread: Number of rows that could not be read.
        first_unread: The first row that could not be read.
        not_run: Number of rows that were not computed by the backend under test.
        first_not_run: The first of these.
        incomparable: The first row that could not be compared.
        only_inputs: Whether there are outputs, but only inputs were compared.
        deciding: Names of the metrics that decided.
        calls: Number of calls of either side, and how many of them are covered.
    """

    def __init__(self, calls: CallCounts | None = None) -> None:
        """Create empty counts.

        Args:
            calls: Call counts of the same rows, if they were counted before. Coverage does not
                depend on the rows' status, so they stay valid after the rows are judged again.
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
        """Sentence that says how many of the compared tensors fail."""
        if not self.compared:
            return "no tensor behind them could be compared"
        return f"{self.failing} of {self.compared} compared tensors fail"

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the same rows, and count them."""
        for row in rows:
            self.take(row)
            yield row

    def take(self, row: Row) -> None:
        status, port = row.status, row.key.port
        self.rows += 1
        if not self._calls_are_known:
            self.calls.take(row)
        # Extra outputs exist only in the candidate; coverage is about tensors of the reference.
        if port == "output" and status != "extra":
            self._outputs = True
        # Rows without a partner are included: a lost tensor is unread on either side.
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
        # Without counts of NaN, the figures cannot rule out a NaN.
        if row.basis == "summary" and "one_sided" not in row.metrics:
            self.bare += 1
        if row.status == "fail":
            self.failing += 1
            # Rows are sorted by rank, so the first in the table may not be the first in time.
            if self.first is None or execution(row) < execution(self.first):
                self.first = row
        # A row that its inputs explain exceeds its limit, so it cannot be the closest one.
        elif row.limit_from.endswith(EXPLAINED):
            self.explained += 1
        elif (
            row.status == "pass"
            and row.limit
            and (self.closest is None or row.severity > self.closest.severity)
        ):
            self.closest = row
