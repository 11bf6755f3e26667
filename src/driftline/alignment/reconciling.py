"""A pair whose sides are kept apart by layout, size or scale: each rule is asked in turn."""

from __future__ import annotations

from driftline.alignment.plan import Pair, Plan
from driftline.runs.run import Run


class Reconciler:
    """The rules, with what they know of both runs as wholes."""

    def __init__(self, reference: Run, candidate: Run, plan: Plan) -> None:
        del reference, candidate, plan

    def settled(self, pair: Pair) -> Pair:
        """The pair with recipes that bring its sides together, or with the reason there is none."""
        return pair
