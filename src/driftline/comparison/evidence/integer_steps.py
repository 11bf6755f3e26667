"""The steps of weights that are stored as integers with many scales.

A row says what a single scale is; of a tensor of scales it only knows the name. What rounding
explains follows from the mean square of the scales, which is read here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, start
from driftline.comparison.evidence.context import EvidenceContext
from driftline.comparison.evidence.rules import has_many_scales
from driftline.comparison.measure.recipes import apply_recipe
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.tolerance import INTEGER_STEP
from driftline.numerics.dtypes import to_float64
from driftline.runs.run import Run


class IntegerSteps:
    """Reads the scales of quantised weights."""

    def __init__(self, context: EvidenceContext) -> None:
        self._runs = context.runs

    def wants(self, row: Row) -> bool:
        return has_many_scales(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        del row
        recipes = pair.reference_recipe, pair.candidate_recipe
        steps = [_step(run, recipe) for run, recipe in zip(self._runs, recipes, strict=True)]
        return {INTEGER_STEP: max(steps)} if any(steps) else {}


def _step(run: Run, recipe: Recipe | None) -> float:
    """Root mean square of the scales that a recipe multiplies integers with; 0 without any."""
    step = next((s for s in recipe.steps if s.kind == "dequantise"), None) if recipe else None
    if recipe is None or step is None or len(recipe.sources) < 2:
        return 0.0
    source = recipe.sources[1]
    scales = apply_recipe(run, source if isinstance(source, Recipe) else start(source))
    numbers = to_float64(scales.values.reshape(-1), scales.dtype)
    factor = abs(step.factor) if step.factor is not None else 1.0
    return factor * float(np.sqrt(np.mean(np.square(numbers)))) if numbers.size else 0.0
