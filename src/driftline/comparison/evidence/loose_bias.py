"""Outputs that differ by one number per channel, because nothing constrains a bias.

The bias of an attention key, or of a layer before a batch norm, has no effect on later results, so
its gradient is zero except for rounding. An optimizer that divides a gradient by its size (Adam)
turns that rounding into full steps, which differ in every program. From then on the layer's output
differs, and nothing else does.

This file measures whether that explains a whole difference; other files judge it. Each channel
whose bias had different gradients in an earlier step may be off by one number. The error without
these numbers is the metric `beyond_bias`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.comparison.evidence.context import LARGEST_DECODED, EvidenceContext
from driftline.comparison.evidence.rules import (
    GRADIENTS,
    is_bias,
    is_output_over_limit,
)
from driftline.comparison.measure.operands import F64, ValuePair
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.comparison.tolerance.tolerance import BEYOND
from driftline.numerics.dtypes import DType, to_float64
from driftline.runs.records import TensorKey

_APART, _ROUNDINGS = 1e-3, 64
"""Elements of a gradient count as different beyond this relative difference, or this many roundings
if that is more."""
NO_MORE = 16
"""Rounding of a bias's gradient, in units of roundoff of its weight's gradient."""
_WEIGHTS = ("weight", "w_0")
_POSITIONS = 64
"""Number of positions that are checked first, because most outputs differ in other ways."""
_HOPELESS = 10
"""Multiple of the limit above which the remaining error cannot be due to a bias."""

_Mask: TypeAlias = "npt.NDArray[np.bool_]"
_Place = tuple[int, int, str]


def is_bias_gradient(key: TensorKey, class_name: str, shape: tuple[int, ...] | None) -> bool:
    """Return whether a tensor is a bias's gradient: a module's, or the sum made by an operator."""
    if key.port in GRADIENTS:
        return is_bias(key.slot)
    # A run of operators has no parameters; a sum over all axes but the last is taken for a bias's.
    summed = key.port == "output" and key.phase == "backward" and class_name.startswith("aten.sum")
    return summed and shape is not None and len(shape) > 0 and shape[-1] == math.prod(shape) > 1


def module_of(site: str) -> str:
    """Return the module of a site; the name of an operator or node follows a slash."""
    return site.partition("/")[0]


def earlier(gradients: Sequence[int], step: int) -> Callable[[int], bool]:
    """Return a test for the steps whose gradients tell about a parameter in a step: earlier steps.

    If no earlier step was recorded, the step itself is used, because a parameter without gradient
    has none in any step.
    """
    if any(other < step for other in gradients):
        return lambda other: other < step
    return lambda other: other == step


class BiasShift:
    """Measures the error of an output without the shift by a bias that drifts freely."""

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context
        self._biases = _Biases(context)

    def wants(self, row: Row) -> bool:
        return self._biases.any and is_output_over_limit(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        loose = self._biases.loose_before(row)
        if loose is None:
            return {}
        left = _without(self._context.opened(pair), loose, row)
        return {} if left is None else {BEYOND: left}


class _Biases:
    """Gradients of biases, and the channels in which they differ."""

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context
        self._given: dict[_Place, list[Pair]] = defaultdict(list)
        self._apart: dict[tuple[_Place, int], F64 | None] = {}
        self._weights: dict[TensorKey, Pair] = {}
        for pair in context.pairs:
            key = pair.reference.key
            shape = pair.reference.shape
            if key.port in GRADIENTS and key.slot in _WEIGHTS:
                self._weights[key._replace(slot="")] = pair
            if not is_bias_gradient(key, pair.reference.class_name, shape):
                continue
            if "/" in key.site or len(shape) == 1:
                self._given[key.rank, key.process, module_of(key.site)].append(pair)

    @property
    def any(self) -> bool:
        """Whether the runs hold any gradients of biases."""
        return bool(self._given)

    def loose_before(self, row: Row) -> _Mask | None:
        """Return the channels whose gradients differed in an earlier step; None without any."""
        place: _Place = (row.key.rank, row.key.process, module_of(row.key.site))
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        # In coarse formats, rounding alone gives differences of more than a thousandth.
        apart = max(_APART, _ROUNDINGS * dtype.unit_roundoff) if dtype is not None else math.inf
        loose: _Mask | None = None
        gradients = self._given.get(place, ())
        tells = earlier([pair.reference.key.step for pair in gradients], row.key.step)
        for pair in gradients:
            # A gradient of a later step cannot have moved the bias yet.
            if tells(pair.reference.key.step):
                gaps = self._gaps(place, pair)
                # The gradient of the same step did not move the bias; it only shows whether
                # anything constrains it.
                if gaps is not None and pair.reference.key.step == row.key.step:
                    gaps = self._if_rounding(pair, gaps, apart)
                if gaps is not None and (loose is None or loose.shape == gaps.shape):
                    loose = gaps > apart if loose is None else loose | (gaps > apart)
        return loose if loose is not None and loose.any() else None

    def _if_rounding(self, pair: Pair, gaps: F64, apart: float) -> F64:
        """Mark channels as different whose gradient is only rounding, relative to the weight's."""
        weight = self._weights.get(pair.reference.key._replace(slot=""))
        dtype = coarsest((pair.reference.dtype, pair.candidate.dtype))
        if weight is None or dtype is None:
            return gaps
        biases, weights = self._context.values(pair), self._context.values(weight)
        if biases is None or weights is None:
            return gaps
        sides = zip(biases, weights, strict=True)
        # The weight's gradient is the measure, because it is computed from the same terms.
        share = NO_MORE * dtype.unit_roundoff
        none = [
            np.abs(bias.reshape(-1)) <= share * np.linalg.norm(gradient) for bias, gradient in sides
        ]
        return np.where(none[0] & none[1], 2.0 * apart, gaps)

    def _gaps(self, place: _Place, pair: Pair) -> F64 | None:
        """Return the relative difference of the gradients in each channel."""
        cache_key = (place, pair.reference.order)
        if cache_key not in self._apart:
            self._apart[cache_key] = None
            if (values := self._context.values(pair)) is not None:
                reference, candidate = values
                size = np.maximum(np.abs(reference), np.abs(candidate))
                gaps = np.abs(reference - candidate) / np.where(size > 0.0, size, 1.0)
                self._apart[cache_key] = gaps
        return self._apart[cache_key]


def _without(values: ValuePair, loose: _Mask, row: Row) -> float | None:
    """Return the relative L2 without one number per loose channel; None if much error remains."""
    shape = row.reference_shape or ()
    axis = _channels(shape, loose.size, row.class_name)
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if axis is None or dtype is None or not math.prod(shape) <= LARGEST_DECODED:
        return None
    sides: list[tuple[Any, DType]] = []
    for raw, own in (
        (values.reference, values.reference_dtype),
        (values.candidate, values.candidate_dtype),
    ):
        # Packed codes and integers are not sums with a bias.
        if own.kind != "float" or own.bits < 8:
            return None
        channels_last = np.moveaxis(raw.reshape(shape), axis, -1)
        sides.append((channels_last.reshape(-1, loose.size), own))
    left = 0.0
    # A few positions are tried first: most outputs differ in other ways, and need no full decoding.
    for every in (max(len(sides[0][0]) // _POSITIONS, 1), 1):
        reference_values, candidate_values = (
            to_float64(words[::every], own) for words, own in sides
        )
        left = _constant_off(cast(F64, reference_values), cast(F64, candidate_values), loose)
        if not left <= _HOPELESS * LIMITS[dtype.name]:
            return None
    return left


def _constant_off(reference: F64, candidate: F64, loose: _Mask) -> float:
    apart = candidate - reference
    # The mean over positions is the best single number for a channel.
    apart -= np.where(loose, apart.mean(axis=0), 0.0)
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(apart)) / size if size else math.inf


def _channels(shape: tuple[int, ...], count: int, class_name: str) -> int | None:
    """Return the axis of an output along which a bias of this size is added; None without one."""
    # Convolutions have channels first and other modules last; the size decides which axis fits.
    axes = (1, -1) if class_name.startswith(("Conv", "BatchNorm")) else (-1, 1)
    return next((axis for axis in axes if len(shape) > 1 and shape[axis] == count), None)
