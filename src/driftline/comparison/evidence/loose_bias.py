"""Outputs that differ by one number per channel, because nothing holds a bias where it is.

The bias of an attention key, or of a layer in front of a batch norm, changes nothing that comes
after it: its gradient is zero but for rounding. An optimizer that divides a gradient by its size
(Adam) makes whole steps of that rounding, others in every program, and the layer's output differs
from then on. Nothing else does.

Whether that is all there is to a difference is measured here, and judged elsewhere: channels whose
bias was given other gradients in an earlier step may each be off by one number, and what is left
without it is the metric `beyond_bias`.
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
"""Elements of a gradient that differ by this share, and by so many roundings, are not the same."""
NO_MORE = 16
"""Rounding of a bias's gradient, in units of roundoff of its weight's gradient."""
_WEIGHTS = ("weight", "w_0")
_POSITIONS = 64
"""So many positions are looked at first: most outputs differ in other ways."""
_HOPELESS = 10
"""So many times its limit a row is off by more than a bias."""

_Mask: TypeAlias = "npt.NDArray[np.bool_]"
_Place = tuple[int, int, str]


def is_bias_gradient(key: TensorKey, class_name: str, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor is the gradient of a bias: of a module, or the sum that an operator made."""
    if key.port in GRADIENTS:
        return is_bias(key.slot)
    # A run of operators knows no parameters; a sum over all but the last axis is a bias's.
    summed = key.port == "output" and key.phase == "backward" and class_name.startswith("aten.sum")
    return summed and shape is not None and len(shape) > 0 and shape[-1] == math.prod(shape) > 1


def module_of(site: str) -> str:
    """The module of a site; an operator or node stands behind a slash."""
    return site.partition("/")[0]


def earlier(gradients: Sequence[int], step: int) -> Callable[[int], bool]:
    """Which steps' gradients tell of a parameter in a step: those before it.

    Where none before it was recorded, its own must do: what has no gradient has none in any step.
    """
    if any(other < step for other in gradients):
        return lambda other: other < step
    return lambda other: other == step


class BiasShift:
    """Says what is left of an output's error without a bias that moved by itself."""

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
    """Gradients that biases were given, and which of their channels were given others."""

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
        """Whether the runs hold gradients of biases at all."""
        return bool(self._given)

    def loose_before(self, row: Row) -> _Mask | None:
        """Channels that were given other gradients in a step before; None when there are none."""
        place: _Place = (row.key.rank, row.key.process, module_of(row.key.site))
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        # Coarse formats differ by more than a thousandth by rounding alone.
        apart = max(_APART, _ROUNDINGS * dtype.unit_roundoff) if dtype is not None else math.inf
        loose: _Mask | None = None
        gradients = self._given.get(place, ())
        tells = earlier([pair.reference.key.step for pair in gradients], row.key.step)
        for pair in gradients:
            # A gradient of a later step cannot have moved the bias yet.
            if tells(pair.reference.key.step):
                gaps = self._gaps(place, pair)
                # Its own step says nothing of what moved it, only that nothing
                # holds it.
                if gaps is not None and pair.reference.key.step == row.key.step:
                    gaps = self._if_rounding(pair, gaps, apart)
                if gaps is not None and (loose is None or loose.shape == gaps.shape):
                    loose = gaps > apart if loose is None else loose | (gaps > apart)
        return loose if loose is not None and loose.any() else None

    def _if_rounding(self, pair: Pair, gaps: F64, apart: float) -> F64:
        """Channels that have no gradient but rounding, beside their weight's, count as apart."""
        weight = self._weights.get(pair.reference.key._replace(slot=""))
        dtype = coarsest((pair.reference.dtype, pair.candidate.dtype))
        if weight is None or dtype is None:
            return gaps
        biases, weights = self._context.values(pair), self._context.values(weight)
        if biases is None or weights is None:
            return gaps
        sides = zip(biases, weights, strict=True)
        # What is left is measured by the weight's gradient, which is made of the same terms.
        share = NO_MORE * dtype.unit_roundoff
        none = [
            np.abs(bias.reshape(-1)) <= share * np.linalg.norm(gradient) for bias, gradient in sides
        ]
        return np.where(none[0] & none[1], 2.0 * apart, gaps)

    def _gaps(self, place: _Place, pair: Pair) -> F64 | None:
        """How far apart the gradients of each channel are, as shares of themselves."""
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
    """Relative L2 of a pair without one number for each loose channel; None if that is no help."""
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
        # Packed codes and integers are no sums with a bias.
        if own.kind != "float" or own.bits < 8:
            return None
        channels_last = np.moveaxis(raw.reshape(shape), axis, -1)
        sides.append((channels_last.reshape(-1, loose.size), own))
    left = 0.0
    # A few positions first: most outputs differ in other ways, and the rest is never decoded.
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
    """Which axis of an output a bias of so many numbers is added along."""
    # Convolutions have channels first, all else last; the count decides where both fit.
    axes = (1, -1) if class_name.startswith(("Conv", "BatchNorm")) else (-1, 1)
    return next((axis for axis in axes if len(shape) > 1 and shape[axis] == count), None)
