"""Sums and gradients that cancel: how large the terms were.

The gradient of a bias is a sum over all positions. If it is zero by construction (the bias of an
attention key, or of a layer before a batch norm), only rounding remains of it, and the rounding
errors of two runs are unrelated. Their size is a fraction of the terms. So for rows that exceed
their limits, the norm of the terms is measured here, as the metric `summed_l2`. A norm or a softmax
likewise cancels most of a gradient; `cancelled_l2` is the error of the remainder that rounding
explains. This file judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.evidence.context import (
    LARGEST_DECODED,
    EvidenceContext,
    relative_error,
)
from driftline.comparison.evidence.rules import (
    CANCELLED,
    GRADIENTS,
    SUMMED,
    is_cancelled_over_limit,
    is_sum_over_limit,
)
from driftline.comparison.measure.operands import F64
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.layout import GRAPHS
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.sites.compiled_graphs import Graphs, Value


_SUMS = {
    "aten.sum": "0",
    "aten.convolution_backward": "2",
    "aten.native_layer_norm_backward": "2",
    "aten.native_group_norm_backward": "2",
    "aten.native_batch_norm_backward": "2",
}
"""For each operator, the result that is a sum over elements of its first argument."""
CANCELLING: dict[str, tuple[tuple[int, str], ...]] = {
    "aten.native_layer_norm_backward": ((0, "grad_out"), (3, "rstd"), (4, "weight")),
    "aten._softmax_backward_data": ((0, "grad_output"), (1, "output")),
}
"""Operators whose first result is a product minus its mean, with the factors of the product."""
CANCELLING_ROUNDINGS = 64
"""Number of roundings of the product that are never treated as a fault."""
_LARGEST_SUM = 1 << 26
"""Largest tensor that is read for this, in elements."""


class SummedElements:
    """Measures the norm of a sum's terms, if a graph or a run of operators shows them."""

    def __init__(self, context: EvidenceContext) -> None:
        self._sides = Sums(context.runs[0]), Sums(context.runs[1])

    def wants(self, row: Row) -> bool:
        return is_sum_over_limit(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        # Either run may have recorded the terms, which have about the same size in both.
        for side, record in zip(self._sides, (pair.reference, pair.candidate), strict=True):
            if size := side.summed(record):
                return {SUMMED: size}
        return {}


class Sums:
    """The sums in a run; its graphs are read on the first query."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inputs: dict[TensorKey, list[Record]] | None = None

    def summed(self, record: Record) -> float:
        """Return the norm of the terms of a sum; 0 if it is unknown."""
        if record.key.port in GRADIENTS:
            return self._arrived(record)
        if (size := self._cancelled(record)) is not None:
            return size
        sizes = (self._size(source) for source in self._sources(record))
        return next(filter(None, sizes), 0.0)

    def _arrived(self, record: Record) -> float:
        """Return the norm of the gradient that arrives at a norm layer, for its parameters.

        The gradient of the bias sums the arriving gradient. The gradient of the weight sums its
        products with the normalised input, whose mean square is one. After a rectifier and before
        another norm, these terms cancel.
        """
        key = record.key
        arrived = self._gradients_of_norms.get((key.rank, key.process, key.step, key.site), ())
        # If there are several calls, the gradient is a single sum over all of them.
        return self._size(arrived[0]) if len(arrived) == 1 else 0.0

    @cached_property
    def _gradients_of_norms(self) -> Mapping[tuple[int, int, int, str], list[Record]]:
        calls: dict[tuple[int, int, int, str], list[Record]] = {}
        for record in self._run.records:
            key = record.key
            if key.port == "grad_output" and "Norm" in record.class_name:
                calls.setdefault((key.rank, key.process, key.step, key.site), []).append(record)
        return calls

    def _size(self, record: Record) -> float:
        """Return the norm of a tensor; 0 if it is unknown."""
        if record.summary is not None:
            return float(record.summary.l2 or 0.0)
        values = self._values(record)
        return 0.0 if values is None else float(np.linalg.norm(values))

    def _values(self, record: Record) -> F64 | None:
        if math.prod(record.shape) > _LARGEST_SUM or record.dtype not in DTYPES:
            return None
        try:
            values = to_float64(self._run.raw(record), DTYPES[record.dtype])
            return np.asarray(values, np.float64).reshape(record.shape)
        except (DriftlineError, OSError, ValueError):
            return None

    def _cancelled(self, record: Record) -> float | None:
        """Return the norm of a product before its mean was subtracted; None for other tensors."""
        factors: list[Record | None]
        if GRAPHS in self._run.sheets(record.key.rank, record.key.process):
            graphs, value = self._in_graphs.get(record.key, (None, None))
            node = value.node if value is not None else None
            if graphs is None or value is None or node is None:
                return None
            operator = graphs.node(value.graph, node.of[0]) if node.of else node
            wanted = CANCELLING.get(_operator(operator.target)) if operator is not None else None
            if wanted is None or operator is None or (node.of and node.of[1]):
                return None
            names = [
                operator.inputs[position]
                for position, _ in wanted
                if position < len(operator.inputs)
            ]
            key = record.key
            values = [
                graphs.by_node.get((id(value.graph), name, key.step, key.visit)) for name in names
            ]
            factors = [None if source is None else source.record for source in values]
        else:
            wanted = CANCELLING.get(_operator(record.class_name))
            if wanted is None or record.key.slot != "0":
                return None
            inputs = self._given().get(_call_key(record.key), ())
            arguments = {argument.key.slot: argument for argument in inputs}
            factors = [arguments.get(name) for _, name in wanted]
        return self._product(factors[:1], factors[1:])

    def _product(self, first: list[Record | None], others: list[Record | None]) -> float | None:
        values: Any = 1.0
        for factor in (*first, *others):
            if factor is None:
                if first[0] is None:
                    return None
                continue  # a norm layer without weight
            if (read := self._values(factor)) is None:
                return None
            values = values * read
        return float(np.linalg.norm(values))

    def _sources(self, record: Record) -> Iterator[Record]:
        if GRAPHS in self._run.sheets(record.key.rank, record.key.process):
            yield from self._in_graph(record)
        elif record.key.slot == _SUMS.get(_operator(record.class_name)):
            yield from self._given().get(_call_key(record.key), ())

    @cached_property
    def _in_graphs(self) -> dict[TensorKey, tuple[Graphs, Value]]:
        from driftline.alignment.sites.compiled_graphs import graphs_of

        return {
            value.record.key: (graphs, value)
            for graphs in graphs_of(self._run).values()
            for value in graphs.values
        }

    def _in_graph(self, record: Record) -> Iterator[Record]:
        graphs, value = self._in_graphs.get(record.key, (None, None))
        if graphs is None or value is None:
            return
        key = record.key
        for node in graphs.same_elements(value):
            operator = graphs.node(value.graph, node.of[0]) if node.of else node
            slot = str(node.of[1]) if node.of else "0"
            if (
                operator is None
                or not operator.inputs
                or _SUMS.get(_operator(operator.target)) != slot
            ):
                continue
            argument = graphs.by_node.get(
                (id(value.graph), operator.inputs[0], key.step, key.visit)
            )
            if argument is not None:
                yield argument.record

    def _given(self) -> Mapping[TensorKey, list[Record]]:
        """Return the inputs of a run's operators, by call."""
        if self._inputs is None:
            self._inputs = {}
            for record in self._run.records:
                if record.key.port in ("input", "param") and "/" in record.key.site:
                    self._inputs.setdefault(_call_key(record.key), []).append(record)
        return self._inputs


def _call_key(key: TensorKey) -> TensorKey:
    return key._replace(port="output", slot="", moment="after")


def is_cancelling(row: Row) -> bool:
    """Return whether a row is the first result of an operator in `CANCELLING`."""
    return row.key.slot == "0" and _operator(row.class_name) in CANCELLING


def _operator(name: str) -> str:
    """Return the name of an operator without its overload.

    >>> _operator("aten.sum.dim_IntList")
    'aten.sum'
    """
    return name.rpartition(".")[0]


# Gradients that cancel inside one module: how large the terms were.


_ROUNDINGS = 16
"""Number of roundings of the terms that are never treated as a fault."""
_CARRIED = 4
"""Factor by which a module may increase an error of its input or gradient."""
_BY_CHANNEL = ("BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm")


class CancelledInModule:
    """Measures the error that rounding explains in a gradient that cancelled inside a module."""

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context

    def wants(self, row: Row) -> bool:
        return is_cancelled_over_limit(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        explained = _explained(row, self._context)
        return {} if explained is None else {CANCELLED: explained}


def _explained(row: Row, context: EvidenceContext) -> float | None:
    """Return the error that rounding explains; None if the module's tensors do not show it.

    Other rows are not used, because a shard of a comparison does not have them.
    """
    shape, dtype = row.reference_shape, coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None or shape is None or not 0 < math.prod(shape) <= LARGEST_DECODED:
        return None
    values: dict[str, F64] = {}
    off = 0.0
    for pair in context.pairs_of_call(row.key):
        port = pair.reference.key.port
        if port not in ("input", "output", "grad_output") or port in values:
            continue
        reference_values, candidate_values = context.opened(pair).decoded()
        if reference_values.size != math.prod(shape):
            continue
        error = relative_error(reference_values, candidate_values)
        if not reference_values.any() or not error <= LIMITS[dtype.name]:
            return None  # a tensor that it is computed from is already wrong
        off += error
        values[port] = reference_values.reshape(shape)
    if len(values) < 3:
        return None
    before = _before(row.class_name, values["input"], values["output"], values["grad_output"])
    share = min(_ROUNDINGS * dtype.unit_roundoff + _CARRIED * off, LIMITS[dtype.name])
    return share * before if math.isfinite(before) else None


def _before(class_name: str, inputs: F64, result: F64, gradient: F64) -> float:
    """Return the norm of the gradient in a module before anything is subtracted from it."""
    if class_name.endswith("LogSoftmax"):
        return float(np.linalg.norm(gradient))
    if class_name.endswith("Softmax"):
        return float(np.linalg.norm(result * gradient))
    axes: tuple[int, ...] = (-1,)
    if class_name.startswith(_BY_CHANNEL) and inputs.ndim > 1:
        batch = (0,) if "BatchNorm" in class_name or inputs.ndim == 2 else ()
        axes = (*batch, *range(2, inputs.ndim))
    spread = inputs.std(axis=axes, keepdims=True)
    slope = result.std(axis=axes, keepdims=True) / np.where(spread > 0.0, spread, math.inf)
    return float(np.linalg.norm(slope * gradient))
