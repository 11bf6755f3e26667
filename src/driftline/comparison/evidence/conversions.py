"""Conversions that a graph compiler put into a GE dump, each against itself.

A Cast or TransData that the graph does not know has no counterpart in another dump; but what it
gave should be what it got. One row each, in place of the two lone tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.rules.compiler_dumps import is_conversion
from driftline.comparison.measure.scheduler import Elementwise, measure
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table, is_kept
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

CONVERSION = "conversion"
"""`Row.by` of such a row: its reference is what an operator got, its candidate what it gave."""


def conversions_of(run: Run) -> dict[TensorKey, Pair]:
    """Every conversion by the key of its input: input and output as a pair of one run."""
    from driftline.alignment.rules.compiler_dumps import conversions

    return {got.key: Pair(got, gave, "graph") for got, gave in conversions(run)}


def with_conversions(
    table: Table,
    reference: Run,
    candidate: Run,
    metrics: Sequence[Metric],
    elementwise: Elementwise,
) -> Table:
    """The table with a measured row for each conversion that nothing stands against.

    Args:
        table: Measured, not judged yet.
        reference: The one run.
        candidate: The other.
        metrics: What is measured.
        elementwise: As for the table itself.
    """
    if is_kept(table.rows) and not any(
        row.status in ("missing", "extra") and is_conversion(row.class_name) for row in table.rows
    ):
        return table
    rows: list[Row] = list(table.rows)
    for status, run in (("missing", reference), ("extra", candidate)):
        alone = {row.key for row in rows if row.status == status and is_conversion(row.class_name)}
        found = {
            key: pair
            for key, pair in (conversions_of(run) if alone else {}).items()
            if key in alone and pair.candidate.key in alone
        }
        if not found:
            continue
        pairs = Plan(tuple(found.values()))
        more = measure(pairs, run, run, metrics=metrics, elementwise=elementwise)
        measured = {row.key: row._replace(by=CONVERSION) for row in more.rows}
        gone = {pair.candidate.key for pair in found.values()}
        rows = [
            measured.get(row.key, row) if row.status == status else row
            for row in rows
            if row.status != status or row.key not in gone
        ]
    return table if len(rows) == len(table.rows) else table.with_rows(rows)
