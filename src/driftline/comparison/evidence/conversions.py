"""Conversions that a graph compiler inserted into a GE dump, each compared with its own input.

A Cast or TransData that is not in the graph has no counterpart in another dump, but its output
should equal its input. One row for each conversion replaces the two rows without partners.
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
"""`Row.by` of such a row: its reference is an operator's input, its candidate the output."""


def conversions_of(run: Run) -> dict[TensorKey, Pair]:
    """Return each conversion as a pair of input and output in one run, by the key of its input."""
    # Imported on use, because it reads the graph of a compiler, which most runs lack.
    from driftline.alignment.rules.compiler_dumps import conversions

    return {got.key: Pair(got, gave, "graph") for got, gave in conversions(run)}


def with_conversions(
    rows: Sequence[Row], run: Run, metrics: Sequence[Metric], elementwise: Elementwise
) -> list[Row]:
    """Return rows that only one run has, with a measured row for each conversion among them.

    Args:
        rows: Rows of tensors without a partner, all from one run.
        run: That run.
        metrics: The metrics to measure.
        elementwise: Elementwise tolerances, as for the table itself.
    """
    # Neither end may have a partner: a conversion that is paired is compared as a pair.
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
    # The input's row represents both, and the output's row is dropped.
    return [by_input.get(row.key, row) for row in rows if row.key not in outputs]
