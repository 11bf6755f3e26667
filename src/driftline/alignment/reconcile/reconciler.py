"""The reconcilers, in order: pairs that differ in scale, layout or size get recipes.

Scales come first, because they apply to the stored values; then transposed weights, tokens and
batches, plain reshapes, and tile padding. A pair that no reconciler explains keeps its different
shapes, with a reason if one is known.
"""

from __future__ import annotations

from driftline.alignment.normalise.view import shapes_of
from driftline.alignment.plan import LeftOut, Pair, Plan
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
    comparable_scales,
    dequantised,
)
from driftline.alignment.sites.operators import OperatorSteps
from driftline.runs.run import Run


class Reconciler:
    """The reconcilers with what they have collected from both runs.

    Attributes:
        notes: Conclusions about whole steps, one sentence each.
    """

    def __init__(self, reference: Run, candidate: Run, plan: Plan) -> None:
        from driftline.alignment.reconcile.tokens import StepBatches

        self._runs = (reference, candidate)
        steps = OperatorSteps(reference), OperatorSteps(candidate)
        operands = OperandLayouts(steps[0]), OperandLayouts(steps[1])
        frameworks = (reference.facts.framework, candidate.facts.framework)
        self._layouts = Layouts(frameworks, operands, plan.pairs)
        # Made on first use: collecting scales reads all records, and most runs quantise nothing.
        self._scales: tuple[Scales, Scales] | None = None
        self._operators = (OperatorScales(steps[0]), OperatorScales(steps[1]))
        self._takes_weights = all(run.facts.operator_sites for run in self._runs)
        self._tokens = StepBatches(reference, candidate)
        self.notes = self._tokens.notes
        self._tiled = any(run.facts.tiled for run in self._runs)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Rows and tokens that were cut off although they are not padding."""
        return tuple(self._tokens.left_out())

    def reconcile(self, pair: Pair) -> Pair:
        """The pair with recipes that make its sides comparable, or with the reason why not."""
        if pair.reference.dtype != pair.candidate.dtype:
            if self._scales is None:
                self._scales = (Scales(self._runs[0]), Scales(self._runs[1]))
            pair = dequantised(pair, *self._scales, self._operators)
        elif self._takes_weights:
            pair = as_numbers(pair, self._operators)
        if self._takes_weights and len(pair.reference.shape) == 1:
            pair = comparable_scales(pair, self._operators)
        # If the values are unavailable for a known reason, shapes do not matter any more.
        if pair.trouble:
            return pair
        # Before shapes are compared, because a transposed square weight has the same shape.
        turned = transposed(pair, self._layouts)
        if turned is not None:
            return turned
        reference_shape, candidate_shape = shapes_of(pair)
        if reference_shape == candidate_shape:
            return pair
        trouble = ""
        # Weights have no tokens; cutting one would hide that two models differ in size.
        if not self._layouts.are_weights(pair):
            reconciled, trouble = self._tokens.cut(pair)
            if reconciled is not None:
                return reconciled
        reconciled = reshaped(pair)
        # Tile padding last: a different number of tokens may look the same, but must be reported.
        if reconciled is None and self._tiled and not trouble and not self._tokens_differ(pair):
            reconciled = cropped(pair)
        if reconciled is not None:
            return reconciled
        if trouble:
            apart = f"the shapes differ: {_dims(reference_shape)} against {_dims(candidate_shape)}"
            return pair._replace(trouble=f"{apart}; {trouble}")
        return pair

    def _tokens_differ(self, pair: Pair) -> bool:
        """Whether the steps have different numbers of tokens, which is not tile padding."""
        if self._layouts.are_weights(pair):
            return False
        reference, candidate = self._tokens.batches(pair)
        return (
            reference is not None and candidate is not None and reference.tokens != candidate.tokens
        )


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
