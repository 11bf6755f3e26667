"""Comparing two runs again when they have grown: what was measured before is not measured again.

A line of a run's index is final once it is written, so a pair of two known lines is a known row.
Judging is done anew each time: which row is the first to fail depends on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.engine import Progress, measure
from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.row import Row
from driftline.comparison.table import Table
from driftline.gating.conversions import with_conversions
from driftline.gating.evidence import with_evidence
from driftline.gating.judge import judge
from driftline.runs.run import Run
from driftline.tolerance.defaults import elementwise
from driftline.tolerance.limits import Tolerance
from driftline.tolerance.thresholds import Thresholds, load_thresholds

if TYPE_CHECKING:
    from _typeshed import StrPath


class Memory:
    """Rows of pairs that were measured; calling it compares two runs as `driftline.compare` does.

    Args:
        thresholds: Limits of each layer, or the path of a file of them.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all), the first time.
    """

    def __init__(
        self,
        thresholds: Thresholds | StrPath | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if thresholds is not None and not isinstance(thresholds, Thresholds):
            thresholds = load_thresholds(thresholds)
        self._tolerance = Tolerance(thresholds=thresholds)
        self._threads = threads
        self._progress = progress
        self._rows: dict[Pair, Row] = {}
        self.measured = 0

    def __call__(self, reference: Run, candidate: Run, plan: Plan) -> Table:
        """The judged table of a plan."""
        fresh = tuple(pair for pair in plan.pairs if pair not in self._rows)
        # Pairs and lone tensors apart: rows of pairs alone come in the order of the pairs.
        new = measure(
            Plan(fresh),
            reference,
            candidate,
            elementwise=elementwise,
            threads=self._threads,
            progress=self._progress,
        )
        self._progress = None  # the next time somebody waits in a browser, not at a terminal
        self.measured += len(fresh)
        known = {**self._rows, **dict(zip(fresh, new.rows, strict=True))}
        # Only what could be measured is final: a tensor that is not whole yet will be.
        self._rows = {pair: known[pair] for pair in plan.pairs if known[pair].status == "unjudged"}
        table = measure(plan._replace(pairs=()), reference, candidate)
        rows = [known[pair] for pair in plan.pairs]
        rows += [row for row in table.rows if row.status != "extra"]
        extra = [row for row in table.rows if row.status == "extra"]
        rows.sort(key=lambda row: (row.key.rank, row.key.process, row.order))
        table = table.with_rows((*rows, *extra))
        if plan.missing or plan.extra:
            table = with_conversions(table, reference, candidate, STANDARD, elementwise)
        table = table.with_rows(with_evidence(table.rows, plan.pairs, reference, candidate))
        if self._tolerance.thresholds is None:
            return judge(table, self._tolerance)
        from driftline.gating.checking import judge_by

        return judge_by(table, self._tolerance)
