"""Conversions that a graph compiler put into a GE dump, each against itself.

A Cast or TransData that the graph does not know has no counterpart in another dump; but what it
gave should be what it got. One row each, in place of the two lone tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Pair
from driftline.alignment.rules.compiler_dumps import is_conversion
from driftline.comparison.measure.scheduler import Elementwise, measure_pairs
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.table.row import Row
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

CONVERSION = "conversion"
"""`Row.by` of such a row: its reference is what an operator got, its candidate what it gave."""


def conversions_of(run: Run) -> dict[TensorKey, Pair]:
    """Every conversion by the key of its input: input and output as a pair of one run."""
    # Reads the graph of a compiler, which most runs have not.
    from driftline.alignment.rules.compiler_dumps import conversions

    return {got.key: Pair(got, gave, "graph") for got, gave in conversions(run)}


def with_conversions(
    rows: Sequence[Row], run: Run, metrics: Sequence[Metric], elementwise: Elementwise
) -> list[Row]:
    """Rows of tensors that only one run has, with a measured row for each conversion among them.

    Args:
        rows: Of tensors that nothing stands against, all of one run.
        run: That run.
        metrics: What is measured.
        elementwise: As for the table itself.
    """
    # Both ends must be alone: a conversion that is paired is compared as such.
    lone = {row.key for row in rows if is_conversion(row.class_name)}
    pairs = {
        key: pair
        for key, pair in (conversions_of(run) if lone else {}).items()
        if key in lone and pair.candidate.key in lone
    }
    if not pairs:
        return list(rows)
    measured = measure_pairs(
        tuple(pairs.values()), run, run, metrics=metrics, elementwise=elementwise
    )
    by_input = {row.key: row._replace(by=CONVERSION) for row in measured}
    outputs = {pair.candidate.key for pair in pairs.values()}
    # The row of the input stands for both; that of the output goes.
    return [by_input.get(row.key, row) for row in rows if row.key not in outputs]
