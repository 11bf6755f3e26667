"""A pair whose sides are kept apart by layout, size or scale: each rule is asked in turn.

Scales first (they need the values as they are stored), then weights that lie transposed, tokens
and batches, plain reshapes, and tile padding. What no rule explains stays apart, with a reason.
"""

from __future__ import annotations

from driftline.alignment.normalise.view import shapes_of
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.reconcile.layout import (
    Layouts,
    OperandLayouts,
    cropped,
    reshaped,
    transposed,
)
from driftline.alignment.reconcile.quantised import (
    OperatorScales,
    Scales,
    as_numbers,
    dequantised,
    same_terms,
)
from driftline.alignment.sites.operators import OperatorSteps
from driftline.runs.run import Run


class Reconciler:
    """The rules, with what they know of both runs as wholes.

    Attributes:
        notes: What was concluded about steps as wholes, one sentence each.
    """

    def __init__(self, reference: Run, candidate: Run, plan: Plan) -> None:
        from driftline.alignment.reconcile.tokens import TokenBook

        self._runs = (reference, candidate)
        steps = OperatorSteps(reference), OperatorSteps(candidate)
        operands = OperandLayouts(steps[0]), OperandLayouts(steps[1])
        frameworks = (reference.facts.framework, candidate.facts.framework)
        self._layouts = Layouts(frameworks, operands, plan.pairs)
        self._scales: tuple[Scales, Scales] | None = None
        self._operators = (OperatorScales(steps[0]), OperatorScales(steps[1]))
        self._takes_weights = all(run.facts.operator_sites for run in self._runs)
        self._tokens = TokenBook(reference, candidate)
        self.notes = self._tokens.notes
        self._tiled = any(run.facts.tiled for run in self._runs)

    def settled(self, pair: Pair) -> Pair:
        """The pair with recipes that bring its sides together, or with the reason there is none."""
        if pair.reference.dtype != pair.candidate.dtype:
            if self._scales is None:
                self._scales = (Scales(self._runs[0]), Scales(self._runs[1]))
            pair = dequantised(pair, *self._scales, self._operators)
        elif self._takes_weights:
            pair = as_numbers(pair, self._operators)
        if self._takes_weights and len(pair.reference.shape) == 1:
            pair = same_terms(pair, self._operators)
        if pair.trouble:
            return pair
        turned = transposed(pair, self._layouts)
        if turned is not None:
            return turned
        here, there = shapes_of(pair)
        if here == there:
            return pair
        trouble = ""
        if not self._layouts.are_weights(pair):
            found, trouble = self._tokens.cut(pair)
            if found is not None:
                return found
        found = reshaped(pair)
        if found is None and self._tiled and not trouble and not self._tokens_differ(pair):
            found = cropped(pair)
        if found is not None:
            return found
        if trouble:
            apart = f"the shapes differ: {_dims(here)} against {_dims(there)}"
            return pair._replace(trouble=f"{apart}; {trouble}")
        return pair

    def _tokens_differ(self, pair: Pair) -> bool:
        """Whether the step has another number of tokens: that is no padding of a tile."""
        if self._layouts.are_weights(pair):
            return False
        ours, theirs = self._tokens.batches(pair)
        return ours is not None and theirs is not None and ours.tokens != theirs.tokens


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
