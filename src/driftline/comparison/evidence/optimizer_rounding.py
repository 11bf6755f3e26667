"""What an optimizer makes of gradients that are only rounding, element by element.

Adam divides a gradient by its size. If a gradient, or single elements of it, are zero by
construction (the bias of an attention key), it turns rounding into full steps, which differ in
every program. From then on, the optimizer's state and the parameter differ at those elements.

These elements are traced through the optimizer's arithmetic, as a graph lists it or a run of
operators recorded it, and only through elementwise operators. The error without them is the metric
`beyond_rounding`, which is judged elsewhere. No element is excused if its gradient is not in the
runs, or differs by more than rounding.

For modules, the optimizer's arithmetic is not recorded. There, the signs of a parameter's gradients
and the learning rate determine how far apart two correct updates may leave it (`TurnedSigns`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.comparison.evidence.cancelling import Sums
from driftline.comparison.evidence.context import EvidenceContext, relative_error
from driftline.comparison.evidence.loose_bias import NO_MORE
from driftline.comparison.evidence.rules import (
    GRADIENTS,
    SUMMED,
    is_operator_over_limit,
    is_updated_parameter_over_limit,
)
from driftline.comparison.measure.operands import F64
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.defaults import LIMITS, coarsest
from driftline.comparison.tolerance.tolerance import BEYOND_ROUNDING, MOVED_APART
from driftline.comparison.verdict.module_kinds import strides_of
from driftline.numerics.dtypes import DType
from driftline.runs.layout import GRAPHS
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import tensor_path

if TYPE_CHECKING:
    from driftline.alignment.sites.compiled_graphs import Graphs
    from driftline.comparison.table.structure import Stride
    from driftline.graphs.sources.graph_files import Graph, GraphNode

_ELEMENTWISE = frozenset(
    f"aten.{name}{end}"
    for name in (
        *("add", "sub", "mul", "div", "neg", "sqrt", "rsqrt", "square", "pow", "reciprocal"),
        *("abs", "sign", "maximum", "minimum", "clamp", "where", "lerp", "addcmul", "addcdiv"),
        *("copy", "clone", "alias", "detach", "_to_copy"),
    )
    for end in ("", "_")
) | {"prims.fma", "prims.copy_", "prims.convert_element_type"}
"""Operators in which each element of the result depends only on the same elements of the inputs."""
_APART = 1e-3
"""Relative difference above which elements count as different."""
_ROUNDINGS = 64
"""Number of roundings of the largest element up to which a difference counts as rounding."""
_DEEPEST = 400
_EPSILON = 1e-8
"""Number that optimizers add to the size of a gradient; elements below it move less."""
_TAKEN = ("input", "param")
"""Ports of an operator's inputs; a parameter is an input if the run recorded it as one."""

_Mask: TypeAlias = "npt.NDArray[np.bool_]"
_Place = tuple[int, int, int, int]
_Call = tuple[str, int, int, int, int, str]


class OptimizerRounding:
    """Measures the error without elements whose gradient is only rounding."""

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context

    @cached_property
    def _elements(self) -> _Elements:
        # Created when a row needs it, because it reads the graphs of a run.
        return _Elements(self._context)

    def wants(self, row: Row) -> bool:
        # A known sum already explains more than its elements could.
        return is_operator_over_limit(row) and SUMMED not in row.metrics

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        if summed := self._elements.summed(pair):
            return {SUMMED: summed}
        left = self._elements.left(pair)
        return {} if left is None else {BEYOND_ROUNDING: left}


class TurnedSigns:
    """Measures how far apart changed signs of gradients may leave a parameter.

    An optimizer that divides a gradient by its size moves each element by at most its learning
    rate, in the direction of the sign. So in each step, two correct updates may move a parameter
    apart by the learning rate times the share of the signs that rounding changed. The result is
    relative to the size of the parameter, which may have begun at zero.
    """

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context
        self._signs: dict[int, _Signs | None] = {}

    @cached_property
    def _gradients(self) -> dict[tuple[int, int, str, str], list[Pair]]:
        by_parameter: dict[tuple[int, int, str, str], list[Pair]] = defaultdict(list)
        for pair in self._context.pairs:
            if pair.reference.key.port == "optimizer_grad":
                by_parameter[_parameter(pair.reference.key)].append(pair)
        return by_parameter

    @cached_property
    def _strides(self) -> dict[str, Stride]:
        places = {(rank, process) for rank, process, *_ in self._gradients}
        return strides_of(self._context.runs[0], places)

    def wants(self, row: Row) -> bool:
        return is_updated_parameter_over_limit(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        del pair
        key, size = row.key, float(row.metrics.get("reference_l2", 0.0))
        stride = self._strides.get(tensor_path(key.site, key.slot))
        if stride is None or stride.by_gradient or not size > 0.0:
            return {}
        updates = key.step + (key.moment == "after")
        gradients = [
            gradient
            for gradient in self._gradients.get(_parameter(key), ())
            if gradient.reference.key.step < updates
        ]
        signs = [read for gradient in gradients if (read := self._signs_of(gradient)) is not None]
        share = max((read.turned for read in signs), default=0.0)
        # A run may keep no values of later steps; what is rounding in one step is so in all.
        if len(signs) < updates:
            share = max([share, *(read.loose for read in signs)])
        explained = share * stride.length * updates / size
        return {MOVED_APART: explained} if explained > 0.0 else {}

    def _signs_of(self, gradient: Pair) -> _Signs | None:
        if id(gradient) not in self._signs:
            self._signs[id(gradient)] = None
            values = self._context.values(gradient)
            dtype = coarsest((gradient.reference.dtype, gradient.candidate.dtype))
            if values is not None and dtype is not None and values[0].size:
                self._signs[id(gradient)] = _signs(*values, dtype)
        return self._signs[id(gradient)]


class _Signs(NamedTuple):
    """Differences between the signs of two gradients, relative to a step that moves all elements.

    Attributes:
        turned: How far apart the signs of the two sides are.
        loose: How far apart they may be in a step with other rounding errors.
    """

    turned: float
    loose: float


def _signs(reference: F64, candidate: F64, dtype: DType) -> _Signs:
    moved = [side / (np.abs(side) + _EPSILON) for side in (reference, candidate)]
    apart = float(np.linalg.norm(moved[1] - moved[0]))
    sizes = np.maximum(np.abs(reference), np.abs(candidate))
    # Elements of one gradient are sums of similar terms, so the largest gives the rounding error.
    is_loose = sizes <= NO_MORE * dtype.unit_roundoff * sizes.max()
    opposite = 2.0 * math.sqrt(np.count_nonzero(is_loose))
    return _Signs(*(share / math.sqrt(reference.size) for share in (apart, opposite)))


def _parameter(key: TensorKey) -> tuple[int, int, str, str]:
    return key.rank, key.process, key.site, key.slot


class _Elements:
    """Finds the elements of a pair that are only rounding, by tracing one of the runs.

    It uses pairs and their values, and no rows, because a shard of a comparison has few rows.
    """

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context
        self._runs = reference, candidate = context.runs
        self._sums = (Sums(reference), Sums(candidate))
        self._masks: dict[int, _Mask | None] = {}
        self._summed: dict[int, float] = {}
        # The run whose arithmetic is traced: the one that lists its graphs, which tell more than
        # recorded operators.
        self._side = 0 if _has_graphs(reference) or not _has_graphs(candidate) else 1
        self._of: dict[TensorKey, Pair] = {}
        self._gradients: dict[tuple[str, str], list[Pair]] = defaultdict(list)
        self._arriving: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
        for pair in context.pairs:
            key = pair.reference.key
            if "/" in key.site:
                self._of.setdefault(self._own(pair).key, pair)
            if key.port == "grad_output":
                self._arriving[key.rank, key.process, key.step, key.site].append(pair)
            backward = key.port == "output" and key.phase == "backward" and "/" in key.site
            if key.port in GRADIENTS or backward:
                # A tensor with the same bytes as a gradient is the gradient that the optimizer
                # received.
                digests = (pair.reference.digest, pair.candidate.digest)
                if all(digests):
                    self._gradients[digests].append(pair)

    def summed(self, pair: Pair) -> float:
        """Return the norm of the terms whose sum is the tensor of a pair; 0 if it is unknown."""
        if id(pair) not in self._summed:
            digests = (pair.reference.digest, pair.candidate.digest)
            sizes = (self._size(gradient) for gradient in self._gradients.get(digests, ()))
            self._summed[id(pair)] = next((size for size in sizes if size), 0.0)
        return self._summed[id(pair)]

    def _size(self, gradient: Pair) -> float:
        key = gradient.reference.key
        if key.port not in GRADIENTS:
            ends = zip(self._sums, (gradient.reference, gradient.candidate), strict=True)
            return next((size for side, tensor in ends if (size := side.summed(tensor))), 0.0)
        # A weight's gradient sums products, whose norm is not that of the arriving gradient.
        if len(gradient.reference.shape) != 1:
            return 0.0
        arrived = self._arriving.get((key.rank, key.process, key.step, key.site), ())
        values = [self._values(pair) for pair in arrived]
        # The arriving gradients must agree, or their sum does not measure rounding.
        if any(tensor is None or relative_error(*tensor) > LIMITS["float32"] for tensor in values):
            return 0.0
        return math.sqrt(sum(float(np.linalg.norm(tensor[0])) ** 2 for tensor in values if tensor))

    def _own(self, pair: Pair) -> Record:
        return pair.candidate if self._side else pair.reference

    def left(self, pair: Pair) -> float | None:
        """Return the relative L2 of a pair without such elements; None if there are none."""
        mask = self._mask(pair, 0)
        values = self._values(pair) if mask is not None and mask.any() else None
        if values is None or mask is None or mask.size != values[0].size:
            return None
        reference, candidate = values[0][~mask], values[1][~mask]
        # An infinity among the excluded elements would go unnoticed.
        if not np.isfinite(values[1]).all():
            return None
        apart, size = float(np.linalg.norm(candidate - reference)), float(np.linalg.norm(reference))
        return apart / size if size else (math.inf if apart else 0.0)

    def _mask(self, pair: Pair, depth: int) -> _Mask | None:
        """Return the elements of a pair that are only rounding; None if that is unknown."""
        if id(pair) not in self._masks:
            self._masks[id(pair)] = None  # a cycle explains nothing
            # The recursion is bounded, because it may be as deep as the run has steps.
            self._masks[id(pair)] = self._found(pair, depth) if depth < _DEEPEST else None
        return self._masks[id(pair)]

    def _found(self, pair: Pair, depth: int) -> _Mask | None:
        dtype = coarsest((pair.reference.dtype, pair.candidate.dtype))
        values = self._values(pair)
        if dtype is None or values is None:
            return None
        # A pair within its limit may still have single elements that are only rounding.
        far = not relative_error(*values) <= LIMITS[dtype.name]
        summed = self.summed(pair) if far else 0.0
        if not far or summed:
            return _rounding(*values, dtype, summed if far else None)
        own = self._own(pair)
        together: _Mask | None = None
        for source in self._made_of(own):
            # Elements keep their positions only between tensors of one size.
            if math.prod(self._own(source).shape) != math.prod(own.shape):
                continue
            mask = self._mask(source, depth + 1)
            if mask is not None:
                together = mask if together is None else together | mask
        return together

    def _values(self, pair: Pair) -> tuple[F64, F64] | None:
        return self._context.values(pair) if math.prod(pair.reference.shape) else None

    # --- what a tensor was computed from

    def _made_of(self, own: Record) -> Iterator[Pair]:
        for record in self._sources(own):
            if (pair := self._of.get(record.key)) is not None:
                yield pair

    def _sources(self, own: Record) -> Iterator[Record]:
        graphs = self._graphs.get((own.key.rank, own.key.process))
        if graphs is not None:
            sources = list(graphs.made_of(own))
            yield from sources or self._before(own)
            return
        call = _call(own.key)
        if own.key.port == "output" and _name(own.class_name) in _ELEMENTWISE:
            yield from (
                argument for argument in self._taken.get(call, ()) if argument.shape == own.shape
            )
        elif own.key.port in _TAKEN:
            yield from self._before(own)

    def _before(self, own: Record) -> list[Record]:
        """Return the last earlier output with the very bytes of a tensor."""
        records = self._given.get(own.digest, ()) if own.digest else ()
        # Only the latest one, because optimizers write the same bytes again and again.
        return [record for record in records if record.order < own.order][-1:]

    @cached_property
    def _graphs(self) -> dict[tuple[int, int], _Optimizers]:
        run = self._runs[self._side]
        if not _has_graphs(run):
            return {}
        from driftline.alignment.sites.compiled_graphs import graphs_of

        return {owner: _Optimizers(graphs) for owner, graphs in graphs_of(run).items()}

    @cached_property
    def _taken(self) -> dict[_Call, list[Record]]:
        """Inputs of operators, by call."""
        by_call: dict[_Call, list[Record]] = defaultdict(list)
        for pair in self._of.values():
            own = self._own(pair)
            if own.key.port in _TAKEN and "/" in own.key.site:
                by_call[_call(own.key)].append(own)
        return by_call

    @cached_property
    def _given(self) -> dict[str, list[Record]]:
        """Outputs of operators, by their bytes, in order."""
        by_digest: dict[str, list[Record]] = defaultdict(list)
        for pair in self._of.values():
            own = self._own(pair)
            if own.key.port == "output" and "/" in own.key.site:
                by_digest[own.digest].append(own)
        for records in by_digest.values():
            records.sort(key=lambda record: record.order)
        return by_digest


def _rounding(reference: F64, candidate: F64, dtype: DType, summed: float | None) -> _Mask | None:
    """Return the elements that differ, in a pair whose differences are rounding."""
    apart = np.abs(candidate - reference)
    sizes = np.maximum(np.abs(reference), np.abs(candidate))
    if summed is not None and not np.linalg.norm(apart) <= LIMITS[dtype.name] * summed:
        return None
    # Rounding is relative to the largest element, or to the terms that were summed.
    scale = max(float(sizes.max()), summed or 0.0)
    share = max(_APART, _ROUNDINGS * dtype.unit_roundoff)
    slight = apart <= _ROUNDINGS * dtype.unit_roundoff * scale
    return (apart > share * sizes) & slight


class _Optimizers:
    """Graphs that write into their inputs, as optimizers do, and where their values come from."""

    def __init__(self, graphs: Graphs) -> None:
        self._records: dict[tuple[int, str, int, int], Record] = {}
        self._places: dict[TensorKey, tuple[Graph, GraphNode]] = {}
        self._times: dict[int, list[tuple[int, int]]] = {}
        self._inputs: dict[int, dict[str, frozenset[str]]] = {}
        times: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for value in graphs.values:
            if value.node is None:
                continue
            key, number = value.record.key, id(value.graph)
            if number not in self._inputs:
                self._inputs[number] = _elementwise(value.graph)
            # A graph that writes into no input is not an optimizer's.
            if not self._inputs[number]:
                continue
            self._records.setdefault((number, value.node.name, key.step, key.visit), value.record)
            self._places[key] = (value.graph, value.node)
            times[number].add((key.step, key.visit))
        self._times = {number: sorted(moments) for number, moments in times.items()}

    def made_of(self, own: Record) -> Iterator[Record]:
        """Yield the graph inputs from which a value's elements were computed."""
        graph, node = self._places.get(own.key, (None, None))
        if graph is None or node is None:
            return
        inputs, now = self._inputs[id(graph)], (own.key.step, own.key.visit)
        names = inputs.get(node.name, frozenset[str]())
        if node.target == "placeholder":  # written by the previous execution
            before = [time for time in self._times[id(graph)] if time < now]
            if not before:
                return
            now, names = before[-1], inputs.get(f"{node.name} after", frozenset[str]())
        for name in sorted(names):
            record = self._records.get((id(graph), name, *now))
            if record is not None:
                yield record


def _elementwise(graph: Graph) -> dict[str, frozenset[str]]:
    """Return, for each node, the graph inputs from whose elements its own are computed.

    The value written into an input is listed as `{input} after`. Empty for a graph that writes into
    no input, because it is not an optimizer's.
    """
    origins: dict[str, frozenset[str]] = {}
    shapes = {node.name: node.shape for node in graph.nodes}
    writes = False
    for node in graph.nodes:
        if node.target == "placeholder":
            origins[node.name] = frozenset({node.name})
        elif _name(node.target) in _ELEMENTWISE:
            arguments = list(node.inputs)
            # The value copied into an input is what the next execution reads there.
            into = arguments.pop(0) if _name(node.target).endswith(".copy_") and arguments else ""
            alike = [origins.get(name) for name in arguments if shapes.get(name) == node.shape]
            origins[node.name] = frozenset[str]().union(*(names for names in alike if names))
            if into:
                writes = True
                origins[f"{into} after"] = origins[node.name]
    return origins if writes else {}


def _has_graphs(run: Run) -> bool:
    return any(
        GRAPHS in run.sheets(*owner)
        for owner in {(record.key.rank, record.key.process) for record in run.records}
    )


def _call(key: TensorKey) -> _Call:
    return (key.site, key.step, key.visit, key.rank, key.process, key.phase)


def _name(operator: str) -> str:
    """Return an operator's name without its overload, and without the name of its kernel."""
    return operator.partition(" ")[0].rpartition(".")[0]
