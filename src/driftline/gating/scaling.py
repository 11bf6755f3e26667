"""A measured table in which errors are shares of what they are made of, for who weighs them."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Pair
from driftline.comparison.table import Table, is_kept
from driftline.gating.evidence import with_evidence
from driftline.gating.far import GRADIENTS
from driftline.gating.judge import judge
from driftline.runs.run import Run
from driftline.tolerance.scales import is_on_another_scale


def on_their_scales(table: Table, pairs: Sequence[Pair], reference: Run, candidate: Run) -> Table:
    """The same table; rows that pass on another scale than their own are judged, others are not.

    Args:
        table: Measured.
        pairs: All pairs of its plan.
        reference: The one run.
        candidate: The other.
    """
    rows = table.rows
    if is_kept(rows) or not any(row.key.port in GRADIENTS for row in rows):
        return table
    judged = judge(table.with_rows(with_evidence(rows, pairs, reference, candidate))).rows
    found = zip(rows, judged, strict=True)
    return table.with_rows(new if is_on_another_scale(new) else old for old, new in found)
