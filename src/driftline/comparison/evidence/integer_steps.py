"""The steps of weights that are stored as integers with many scales.

A row says what a single scale is; of a tensor of scales it only knows the name. What rounding
explains follows from the mean square of the scales, which is read here. So does whether a few of
the scales or zero points are wrong, which a whole weight hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, start
from driftline.alignment.recipe_steps import Part, Step, apply_step, fold
from driftline.comparison.evidence.context import EvidenceContext
from driftline.comparison.evidence.rules import has_many_scales
from driftline.comparison.measure.operands import F64
from driftline.comparison.measure.recipes import apply_recipe, made
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.tolerance import INTEGER_STEP, WORST_SCALE
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

_FEW = 32.0
"""Methods that move weights to make up for the rounding of others (GPTQ) spread that unevenly over
a scale's few elements. Measured on 64 weights of 64 and 256 inputs, normal and with heavy tails,
inputs that go together or not: of groups of 16 the worst was 6.4 times the median, of 64 2.4 times,
of whole channels 2.2 times; this allows 7.5, 3.75 and 2.5."""


class IntegerSteps:
    """Reads the scales of quantised weights."""

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context

    def wants(self, row: Row) -> bool:
        return has_many_scales(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        del row
        recipes = pair.reference_recipe, pair.candidate_recipe
        runs = self._context.runs
        steps = [_step(run, recipe) for run, recipe in zip(runs, recipes, strict=True)]
        if not any(steps):
            return {}
        evidence: dict[str, Number] = {INTEGER_STEP: max(steps)}
        # Of two quantised weights neither is what the other was rounded from.
        if all(steps) or (values := self._context.values(pair)) is None:
            return evidence
        side = int(steps[1] > 0.0)
        recipe = recipes[side]
        worst = _worst_scale(values[1] - values[0], runs[side], recipe) if recipe else 0.0
        return {**evidence, WORST_SCALE: worst} if worst else evidence


def _worst_scale(errors: F64, run: Run, recipe: Recipe) -> float:
    """How far off the elements of the worst scale are, in what rounding does at this scale.

    Beside it stand the other scales of the weight: what a method does to all of them is no fault
    of one. 0 with a single scale.
    """
    step, codes = recipe.steps[0], recipe.sources[0]
    words, dtype = _part(run, recipe.sources[1])
    factor = 1.0 if step.factor is None else step.factor
    scales = np.asarray(to_float64(words.reshape(-1), dtype), np.float64) * factor
    if scales.size < 2:
        return 0.0
    # The number of each element's scale, brought to the weight's layout as the codes are.
    numbers = np.arange(scales.size, dtype=np.float32).reshape(words.shape)
    ones = np.ones(codes.shape, np.uint8)
    parts = [(ones, DTYPES["uint8"]), (numbers, DTYPES["float32"])]
    spread = fold((Step("dequantise", step.axis), *recipe.steps[1:]), parts, apply_step)[0]
    numbered = spread.reshape(-1).astype(np.intp)
    squares = _sums(numbered, np.square(errors), scales.size)
    counts = _sums(numbered, np.ones(errors.size), scales.size)
    rounding = counts * np.square(scales) / 12.0
    worst = float(np.max(_beside(squares, rounding) / (1.0 + _FEW / np.maximum(counts, 1.0))))
    channels = _channels(words.shape, codes.shape)
    if channels is None:
        return worst
    size = int(channels.max()) + 1
    by_channel = _beside(_sums(channels, squares, size), _sums(channels, rounding, size))
    return max(worst, float(np.max(by_channel)))


def _part(run: Run, source: Recipe | Record) -> Part:
    return made(run, source if isinstance(source, Recipe) else start(source))


def _sums(places: npt.NDArray[np.intp], numbers: F64, size: int) -> F64:
    return np.asarray(np.bincount(places, numbers, size), np.float64)


def _channels(scales: tuple[int, ...], codes: tuple[int, ...]) -> npt.NDArray[np.intp] | None:
    """Which output channel each scale is of: along the one axis of which every element has its own
    scales. None where no axis, or several, are such.
    """
    if len(scales) != len(codes):
        return np.arange(math.prod(scales))  # a plain list
    own = [axis for axis, size in enumerate(scales) if size == codes[axis] > 1]
    return np.indices(scales)[own[0]].reshape(-1) if len(own) == 1 else None


def _beside(squares: F64, rounding: F64) -> F64:
    """Errors in what rounding explains, and in what is usual if that is more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sqrt(squares / rounding)
    # A scale of 0 stands for weights that are 0, and explains nothing else.
    ratios = np.where(squares > 0.0, ratios, 0.0)
    usual = float(np.sort(ratios)[(ratios.size - 1) // 2])
    return ratios / max(1.0, usual)


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
