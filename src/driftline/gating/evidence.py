"""What measured rows alone do not know, and a fair judgement needs: all of it, in one call."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Pair
from driftline.comparison.row import Row
from driftline.gating.loose_biases import with_loose_biases
from driftline.gating.sums import with_sums
from driftline.runs.run import Run


def with_evidence(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    """Rows with what is known of biases that move by themselves, and of sums that cancel.

    Args:
        rows: Measured; all rows of a plan, or some.
        pairs: All pairs of the plan.
        reference: The one run.
        candidate: The other.
    """
    found = with_loose_biases(rows, pairs, reference, candidate)
    return with_sums(found, pairs, reference, candidate)
