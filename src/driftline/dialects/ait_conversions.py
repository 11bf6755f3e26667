"""Conversions that a graph compiler put into a GE dump, each against itself, for ait's report.

A Cast or TransData that the graph does not know has no counterpart in another dump; but what it
gave should be what it got, and the original's report has a line that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.row import Row
from driftline.runs.key import TensorKey
from driftline.runs.run import Run


class Conversion(NamedTuple):
    """One conversion: its input and output as a pair of one run, and the measured row."""

    pair: Pair
    row: Row


def conversions_of(run: Run, metrics: Sequence[str]) -> dict[TensorKey, Conversion | None]:
    """Every conversion by the key of its input; its output's key stands for None.

    Args:
        run: Perhaps a GE dump; any other run has no conversions.
        metrics: Measured besides the standard ones.
    """
    from driftline.alignment.graph import conversions
    from driftline.comparison.engine import measure
    from driftline.comparison.metrics.catalogue import requested

    pairs = tuple(Pair(got, gave, "graph") for got, gave in conversions(run))
    if not pairs:
        return {}
    table = measure(Plan(pairs), run, run, metrics=requested(metrics))
    found: dict[TensorKey, Conversion | None] = {}
    for pair, row in zip(pairs, table.rows, strict=True):
        found[pair.reference.key] = Conversion(pair, row)
        found[pair.candidate.key] = None
    return found
