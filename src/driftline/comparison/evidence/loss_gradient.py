"""The gradient of a loss: the part of its error that the model's output does not explain.

A loss is computed from the model's output, so an error of the output is also in the loss's
gradient, and a trained model increases it there. For two families of losses this part can be
removed. The gradient of a cross entropy is a multiple of the softmax plus a term that depends only
on the labels; that of a squared error is a multiple of the output plus such a term. The rest of the
gradient's difference, the metric `beyond_outputs`, is due to the loss itself. This file judges
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.evidence.context import EvidenceContext
from driftline.comparison.evidence.rules import (
    BEYOND_OUTPUTS,
    BEYOND_OUTPUTS_COLUMN,
    is_arriving_gradient_off,
)
from driftline.comparison.measure.operands import F64
from driftline.comparison.measure.pair_rows import has_recipe
from driftline.comparison.table.row import Number, Row
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

_BLOCK = 1 << 20
"""Number of elements that are decoded at a time."""
_LARGEST = 1 << 26
"""Largest output for which this is measured, in elements."""


class LossGradient:
    """Measures the error of an arriving gradient without the part that the output explains."""

    columns = (BEYOND_OUTPUTS_COLUMN,)

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context

    def wants(self, row: Row) -> bool:
        return is_arriving_gradient_off(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        key = row.key
        outputs = [
            other
            for other in self._context.pairs_of_call(key)
            if other.reference.key.port == "output" and other.reference.key.slot == key.slot
        ]
        if len(outputs) != 1:
            return {}
        records = (
            outputs[0].reference,
            outputs[0].candidate,
            pair.reference,
            pair.candidate,
        )
        if any(map(has_recipe, (pair, outputs[0]))) or not _are_plain(records):
            return {}
        left = _beyond_outputs(self._context.runs, records)
        return {} if left is None else {BEYOND_OUTPUTS: left}


Four = tuple[Record, Record, Record, Record]
"""The outputs of the reference and the candidate, then the gradients that arrive at them."""


def _are_plain(records: Four) -> bool:
    shape = records[0].shape
    if not shape or not 0 < math.prod(shape) <= _LARGEST:
        return False
    return all(
        record.shape == shape
        and record.kept == "full"
        and record.dtype in DTYPES
        and DTYPES[record.dtype].kind == "float"
        and DTYPES[record.dtype].bits >= 8
        for record in records
    )


def _beyond_outputs(runs: tuple[Run, Run], records: Four) -> float | None:
    """Return the relative L2 of what the better of the two families does not explain."""
    slope = _Slope()
    for block in _blocks(runs, records):
        slope.take(*block)
    times = slope.value
    left_of_softmax = left_of_squares = size = moved = along = power = 0.0
    for outputs, others, gradient, arrived in _blocks(runs, records):
        if not all(np.isfinite(part).all() for part in (outputs, others, gradient, arrived)):
            return None
        apart = arrived - gradient
        explained = times * (_softmax(others) - _softmax(outputs))
        left_of_softmax += float(np.sum((apart - explained) ** 2))
        difference = others - outputs
        size += float(np.sum(gradient**2))
        moved += float(np.sum(apart**2))
        along += float(np.sum(apart * difference))
        power += float(np.sum(difference**2))
    if not size > 0.0:
        return None
    left_of_squares = moved - along**2 / power if power > 0.0 else moved
    return math.sqrt(max(min(left_of_softmax, left_of_squares), 0.0) / size)


class _Slope:
    """The factor of the softmax in the reference's gradient, fitted over all rows together."""

    def __init__(self) -> None:
        self._common = self._power = 0.0

    def take(self, outputs: F64, others: F64, gradient: F64, arrived: F64) -> None:
        del others, arrived
        shares = _softmax(outputs)
        # The label's element contains the target; rows without a label have no gradient.
        counted = np.ones(gradient.shape, dtype=bool)
        counted[np.arange(len(gradient)), np.argmin(gradient, axis=1)] = False
        counted &= np.abs(gradient).max(axis=1, keepdims=True) > 0.0
        number = np.maximum(counted.sum(axis=1, keepdims=True), 1)
        shares = np.where(counted, shares, 0.0)
        values = np.where(counted, gradient, 0.0)
        shares -= np.where(counted, shares.sum(axis=1, keepdims=True) / number, 0.0)
        self._common += float(np.sum(shares * values))
        self._power += float(np.sum(shares * shares))

    @property
    def value(self) -> float:
        return self._common / self._power if self._power > 0.0 else 0.0


def _softmax(values: F64) -> F64:
    raised = np.exp(values - values.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def _blocks(runs: tuple[Run, Run], records: Four) -> Iterator[tuple[F64, F64, F64, F64]]:
    """Yield blocks of rows of all four tensors, [rows, channels].

    Raises:
        DriftlineError, OSError, ValueError: One of them cannot be read.
    """
    channels = records[0].shape[-1]
    raws = [
        run.raw(record).reshape(-1, channels)
        for run, record in zip((*runs, *runs), records, strict=True)
    ]
    step = max(_BLOCK // channels, 1)
    for start in range(0, len(raws[0]), step):
        first, second, third, fourth = (
            np.asarray(to_float64(raw[start : start + step], DTYPES[record.dtype]), np.float64)
            for raw, record in zip(raws, records, strict=True)
        )
        yield first, second, third, fourth
