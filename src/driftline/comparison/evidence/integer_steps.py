"""Quantisation steps of weights stored as codes with many scales: integers or small floats.

The recipe in a row contains a single scale, but only the name of a tensor of scales. The error that
rounding explains follows from the mean square of the scales, which are read here. It is also
measured whether a few of the scales or zero points are wrong, which figures of the whole weight
hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
from driftline.comparison.tolerance.defaults import WEIGHT_ROUNDINGS
from driftline.comparison.tolerance.tolerance import INTEGER_STEP, WORST_PLACE, WORST_SCALE
from driftline.numerics.dtypes import DTYPES, DType, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

_FEW = 32.0
"""Methods that move weights to compensate for the rounding of others (GPTQ) spread this unevenly
over the few elements of a scale. Measured on 64 weights of 64 and 256 inputs, normal and
heavy-tailed, with correlated inputs and without: the worst of the groups of 16 was 6.4 times the
median, of 64 2.4 times, of whole channels 2.2 times; this allows 7.5, 3.75 and 2.5."""
_MOVED = 0.32
"""For the same weights, and those of GPTQ with four and eight bits, the mean error of a group was
never above 0.69 of a step (0.27 after plain rounding); this allows 0.8 of a step."""
_UNEVEN, _FEW_OUTPUTS = 1.6, 8.0
"""The error of one input was up to 3.7 times the median, and 1.2 times after plain rounding; this
allows four times with many outputs."""


class IntegerSteps:
    """Measures the scales of quantised weights."""

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
        side = int(steps[1] > 0.0)
        codes = _codes(recipes[side])
        # Steps between small floats grow with the numbers, so a scale alone says nothing of them.
        is_float = codes is not None and DTYPES[codes.dtype].is_floating
        evidence: dict[str, Number] = {} if is_float else {INTEGER_STEP: max(steps)}
        # If both weights are quantised, neither was rounded from the other.
        if all(steps) or (values := self._context.values(pair)) is None:
            return evidence
        return {
            **evidence,
            **_worst_scale(values[1] - values[0], values[side], runs[side], recipes[side]),
        }


def _codes(recipe: Recipe | None) -> Record | None:
    """Return the tensor of codes that a recipe multiplies with scales; None for packed ones."""
    source = recipe.sources[0] if recipe is not None else None
    return None if isinstance(source, Recipe) else source


def _worst_scale(errors: F64, values: F64, run: Run, recipe: Recipe | None) -> dict[str, Number]:
    """Return the error of the worst part of a weight over its rounding error, and its place.

    The parts are the elements of one scale, of one output channel, and of one input. Each is
    compared with the other parts of the same kind in the same weight, because a method that affects
    all of them is no fault of one. Empty for a single scale.
    """
    if recipe is None:
        return {}
    step, codes = recipe.steps[0], recipe.sources[0]
    words, dtype = _part(run, recipe.sources[1])
    factor = 1.0 if step.factor is None else step.factor
    scales = np.asarray(to_float64(words.reshape(-1), dtype), np.float64) * factor
    if scales.size < 2:
        return {}
    # The index of each element's scale, brought to the weight's layout in the same way as the
    # codes.
    numbers = np.arange(scales.size, dtype=np.float32).reshape(words.shape)
    ones = np.ones(codes.shape, np.uint8)
    parts = [(ones, DTYPES["uint8"]), (numbers, DTYPES["float32"])]
    spread = fold((Step("dequantise", step.axis), *recipe.steps[1:]), parts, apply_step)[0]
    numbered = spread.reshape(-1).astype(np.intp)
    record = _codes(recipe)
    code_type = DTYPES[record.dtype] if record is not None else None
    is_float = code_type is not None and code_type.is_floating
    rounding = np.square(scales[numbered]) / 12.0
    if code_type is not None and is_float:
        rounding = _float_rounding(values, scales[numbered], code_type)
    channels = _channels(words.shape, codes.shape)
    weight = _Weight(numbered, scales, rounding, not is_float, channels, recipe.shape)
    worst = max(_worst_parts(errors, weight), key=lambda part: part.excess)
    if worst.excess <= WEIGHT_ROUNDINGS:
        return {WORST_SCALE: worst.excess} if worst.excess else {}
    return {WORST_SCALE: worst.excess, **_place_of_fault(errors, weight)}


class _Weight(NamedTuple):
    """The scaling of a weight.

    Attributes:
        numbered: Index of each element's scale.
        scales: The scales.
        rounding: Mean square of the rounding error of each element.
        has_zeros: Whether its codes are integers, which have a zero point.
        channels: Output channel of each scale; None without channels.
        shape: Shape of the weight.
    """

    numbered: npt.NDArray[np.intp]
    scales: F64
    rounding: F64
    has_zeros: bool
    channels: npt.NDArray[np.intp] | None
    shape: tuple[int, ...]


def _place_of_fault(errors: F64, weight: _Weight) -> dict[str, Number]:
    """Return the place of the smallest part without which no other part is too far off."""
    parts = [p for p in _worst_parts(errors, weight) if p.excess > WEIGHT_ROUNDINGS]
    for part in sorted(parts, key=lambda part: np.count_nonzero(part.elements)):
        left = np.where(part.elements, 0.0, errors)
        if all(other.excess <= WEIGHT_ROUNDINGS for other in _worst_parts(left, weight)):
            return _place(part.elements, weight.shape)
    return {}


def _float_rounding(values: F64, scales: F64, dtype: DType) -> F64:
    """Return the mean square of the error of rounding each element to small floats with a scale."""
    sizes = np.abs(np.divide(values, scales, out=np.zeros_like(values), where=scales != 0.0))
    exponents = np.frexp(sizes)[1] - 1
    exponents = np.maximum(exponents, dtype.smallest_normal_exponent) - dtype.mantissa
    return np.square(np.ldexp(scales, exponents)) / 12.0


def _worst_parts(errors: F64, weight: _Weight) -> Iterator[_WorstPart]:
    yield _of_one_scale(errors, weight)
    if weight.has_zeros:
        yield _of_a_wrong_zero(errors, weight.numbered, weight.scales)
    if len(weight.shape) == 2:
        yield _of_one_input(errors, weight)
    if weight.channels is not None:
        yield _of_one_channel(errors, weight, weight.channels)


class _WorstPart(NamedTuple):
    """A part of a weight: its excess error, and which elements it has."""

    excess: float
    elements: npt.NDArray[np.bool_]


def _worst_part(excess: F64, parts: npt.NDArray[np.intp]) -> _WorstPart:
    worst = int(np.argmax(excess))
    return _WorstPart(float(excess[worst]), parts == worst)


def _of_one_scale(errors: F64, weight: _Weight) -> _WorstPart:
    numbered, size = weight.numbered, weight.scales.size
    counts = _sums(numbered, np.ones(errors.size), size)
    squares = _sums(numbered, np.square(errors), size)
    excess = _beside(squares, _sums(numbered, weight.rounding, size))
    return _worst_part(excess / (1.0 + _FEW / np.maximum(counts, 1.0)), numbered)


def _of_a_wrong_zero(errors: F64, numbered: npt.NDArray[np.intp], scales: F64) -> _WorstPart:
    """Uses the mean error: rounding goes up as often as down, a zero point moves all one way."""
    counts = _sums(numbered, np.ones(errors.size), scales.size)
    steps = np.abs(counts * scales)
    means = np.abs(_sums(numbered, errors, scales.size))
    return _worst_part(
        np.divide(means, steps, out=np.zeros_like(means), where=steps > 0.0) / _MOVED, numbered
    )


def _of_one_input(errors: F64, weight: _Weight) -> _WorstPart:
    """Groups elements by input; a wrong order of groups gives an input another scale."""
    outputs, inputs = weight.shape
    columns = np.tile(np.arange(inputs), outputs)
    squares = _sums(columns, np.square(errors), inputs)
    excess = _beside(squares, _sums(columns, weight.rounding, inputs))
    return _worst_part(excess / (_UNEVEN * (1.0 + _FEW_OUTPUTS / outputs)), columns)


def _of_one_channel(errors: F64, weight: _Weight, channels: npt.NDArray[np.intp]) -> _WorstPart:
    size = int(channels.max()) + 1
    own = channels[weight.numbered]
    squares = _sums(own, np.square(errors), size)
    return _worst_part(_beside(squares, _sums(own, weight.rounding, size)), own)


def _place(elements: npt.NDArray[np.bool_], shape: tuple[int, ...]) -> dict[str, Number]:
    """Return the first and last output and input of some elements of a matrix."""
    if len(shape) != 2:
        return {}
    outputs, inputs = np.nonzero(elements.reshape(shape))
    ends = outputs.min(), outputs.max(), inputs.min(), inputs.max()
    return dict(zip(WORST_PLACE, map(int, ends), strict=True))


def _part(run: Run, source: Recipe | Record) -> Part:
    return made(run, source if isinstance(source, Recipe) else start(source))


def _sums(places: npt.NDArray[np.intp], numbers: F64, size: int) -> F64:
    return np.asarray(np.bincount(places, numbers, size), np.float64)


def _channels(scales: tuple[int, ...], codes: tuple[int, ...]) -> npt.NDArray[np.intp] | None:
    """Return the output channel of each scale: its index on the only axis that has own scales.

    None if no axis, or several, have their own scales for every element.
    """
    if len(scales) != len(codes):
        return np.arange(math.prod(scales))  # a plain list
    own = [axis for axis, size in enumerate(scales) if size == codes[axis] > 1]
    return np.indices(scales)[own[0]].reshape(-1) if len(own) == 1 else None


def _beside(squares: F64, rounding: F64) -> F64:
    """Return errors over what rounding explains, or over the usual error if that is larger."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sqrt(squares / rounding)
    # A scale of 0 stands for weights that are 0, and explains no errors.
    ratios = np.where(squares > 0.0, ratios, 0.0)
    usual = float(np.sort(ratios)[(ratios.size - 1) // 2])
    return ratios / max(1.0, usual)


def _step(run: Run, recipe: Recipe | None) -> float:
    """Return the root mean square of the scales by which a recipe multiplies; 0 without any."""
    step = next((s for s in recipe.steps if s.kind == "dequantise"), None) if recipe else None
    if recipe is None or step is None or len(recipe.sources) < 2:
        return 0.0
    source = recipe.sources[1]
    scales = apply_recipe(run, source if isinstance(source, Recipe) else start(source))
    numbers = to_float64(scales.values.reshape(-1), scales.dtype)
    factor = abs(step.factor) if step.factor is not None else 1.0
    return factor * float(np.sqrt(np.mean(np.square(numbers)))) if numbers.size else 0.0
