"""The error that a leaf module adds: the reference's function on the candidate's own input.

If the weights are in the runs (`--level params`), a linear, a convolution, a norm, an embedding or
an activation can be recomputed in float64, with the reference's weights and the input of the
candidate's module. The module itself has added the difference between this result and the
candidate's output, whatever error came in. Computing it again with the candidate's own weights
distinguishes wrong weights from a wrong function.

The class of a module does not determine its function (a Linear may be wrapped, and a norm may have
its own formula). So the function must give the reference's output from the reference's input to
within rounding; otherwise nothing is concluded. The error that rounding in the candidate's formats
explains is measured too, by changing input and weights by one rounding each, so that sums that
cancel are allowed what they need. The cost is bounded: of a large tensor an even sample of rows and
channels is taken, including the place of the largest error, and only a limited number of leaves per
comparison is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.evidence.context import EvidenceContext
from driftline.comparison.evidence.leaf_functions import (
    F64,
    Attributes,
    Convolution,
    Leaf,
    Linear,
    Part,
    Places,
    Shape,
    Weight,
    Weights,
    jittered,
    possible_leaves,
)
from driftline.comparison.evidence.rules import (
    ADDED_BY_OWN_WEIGHTS,
    ADDED_COLUMNS,
    ADDED_PROJECTION,
    is_leaf_beyond_rounding,
)
from driftline.comparison.measure.pair_rows import has_recipe
from driftline.comparison.table.row import Number, Row
from driftline.comparison.tolerance.tolerance import ADDED, ADDED_ALLOWED
from driftline.graphs.module_tree import ModuleTree
from driftline.numerics.dtypes import DTYPES, DType, to_float64
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import ModelFacts, read_model_facts

_WORK = 1 << 20
"""Number of products in one evaluation of a leaf, which takes about a millisecond."""
_MOST_LEAVES = 512
"""Largest number of leaves per comparison; the first ones that are off are taken, in order of
execution."""
_ELEMENTS = 1 << 14
"""Number of elements of the rows in one evaluation that is not a matrix product."""
_LARGEST_IMAGE = 1 << 22
"""Largest number of elements of one image, which a convolution needs at once."""
_CHANNELS, _KERNELS, _POSITIONS = 64, 32, 256
_AGAIN = 16
"""Number of rows on which a function that siblings have is tried."""
_FEWEST = 8
"""Smallest number of rows that are computed for a very wide module."""
_SELF = 4.0
"""Multiple of the rounding by which the reference may differ from the function assumed for it."""
_TIED = 3
"""Number of weights of other modules that are tried for a module that shares one."""
_FINE = 2.0**-24
_ACROSS = 1.0 / math.sqrt(3.0)
"""Root mean square of a rounding error, relative to the largest one."""
_ALLOWED, _ALLOWED_FINE = 3.0, 6.0
"""Multiple of the rounding by which a correct implementation may differ from the function. In a
fine format, the function's own approximation (of a root, an exponential) is as large as
rounding."""

_Place: TypeAlias = tuple[int, int, str]


class RecomputedLeaf:
    """Measures the error that a leaf's computation adds, and how much of it rounding explains."""

    columns = ADDED_COLUMNS

    def __init__(self, context: EvidenceContext) -> None:
        self._context = context
        self._weights: dict[_Place, list[Pair]] = {}
        self._by_shape: dict[tuple[str, Shape], list[Pair]] = {}
        self._shapes: dict[tuple[int, int, int], Mapping[str, Mapping[str, Shape]]] = {}
        self._facts: dict[tuple[int, int], ModelFacts] = {}
        self._functions: dict[tuple[object, ...], tuple[Leaf, float]] = {}
        self._left = _MOST_LEAVES
        names: set[str] = set()
        for pair in context.pairs:
            key = pair.reference.key
            names.add(key.site)
            if key.port == "param" and _is_float(pair.reference):
                self._weights.setdefault((key.rank, key.process, key.site), []).append(pair)
                shapes = self._by_shape.setdefault((key.slot, pair.reference.shape), [])
                if len(shapes) < _TIED:
                    shapes.append(pair)
        self._containers = {outer for name in names for outer in _outer(name)}

    def wants(self, row: Row) -> bool:
        if not self._weights or self._left <= 0 or row.key.site in self._containers:
            return False
        return is_leaf_beyond_rounding(row)

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        call = self._call_of(row, pair)
        if call is None:
            return {}
        self._left -= 1
        for weights in self._weights_of(row):
            if (leaf := self._identified(call, weights, row)) is not None:
                return self._added(leaf, call, weights)
        return {}

    def _call_of(self, row: Row, pair: Pair) -> _Call | None:
        """Return the single input and output of a call, on both sides; None for other calls."""
        inputs: list[Pair] = []
        for other in self._context.pairs_of_call(row.key):
            key = other.reference.key
            if key.port == "input" and key.phase == row.key.phase:
                inputs.append(other)
            elif key.port == "output" and key.phase == row.key.phase and other != pair:
                return None
        if len(inputs) != 1 or not (_is_plain(pair) and _is_plain(inputs[0])):
            return None
        reference, candidate = self._context.runs
        sides = (
            _Side(reference, inputs[0].reference, pair.reference),
            _Side(candidate, inputs[0].candidate, pair.candidate),
        )
        worst = int(row.metrics.get("max_abs_error_at", 0))
        return _Call(*sides, worst) if all(side.is_readable for side in sides) else None

    def _weights_of(self, row: Row) -> Iterator[Sequence[Pair]]:
        """Yield weights that a module may use: its own, or one that it shares with another."""
        key = row.key
        place = (key.rank, key.process, key.site)
        if pairs := self._weights.get(place):
            # Weights are stored once or in every step; the latest not after this step is used.
            steps = [pair.reference.key.step for pair in pairs]
            latest = max((step for step in steps if step <= key.step), default=min(steps))
            yield [pair for pair in pairs if pair.reference.key.step == latest]
            return
        # A tied weight is stored at its first module only; the module tree gives its shape.
        declared = self._declared(0, key, key.site)
        if not declared:
            yield ()
        # The candidate must declare the same weight, because it may have packed it in this module.
        elif len(declared) == 1 and declared == self._declared(
            1, key, row.candidate_site or key.site
        ):
            for pair in self._by_shape.get(next(iter(declared.items())), ()):
                yield [pair]

    def _declared(self, side: int, key: TensorKey, site: str) -> Mapping[str, Shape]:
        """Return names and shapes of a module's parameters in one run, by its module tree."""
        place = (side, key.rank, key.process)
        if place not in self._shapes:
            self._shapes[place] = _held(self._context.runs[side].topology(*place[1:]))
        return self._shapes[place].get(site, {})

    def _attributes(self, key: TensorKey) -> Attributes:
        place = (key.rank, key.process)
        if place not in self._facts:
            run = self._context.runs[0]
            self._facts[place] = read_model_facts(run, *place, weights=False)
        return self._facts[place].attributes(key.site)

    def _identified(self, call: _Call, pairs: Sequence[Pair], row: Row) -> Leaf | None:
        """Return the function that gives the reference's output from the reference's input."""
        weights = _stored(self._context.runs[0], [pair.reference for pair in pairs])
        if weights is None:
            return None
        side = call.reference
        shapes = {name: weight.shape for name, weight in weights.items()}
        kind = (row.class_name, side.input.shape[1:], side.output.shape[1:], tuple(shapes.items()))
        leaves = possible_leaves(
            side.input.shape,
            not _is_float(side.input),
            side.output.shape,
            shapes,
            self._attributes(row.key),
        )
        # Modules of one class and shape usually have the same function, so that one is tried first,
        # on few rows.
        if kind in self._functions:
            leaf, rounding = self._functions[kind]
            if (block := _chosen(leaf, call)) is not None:
                few = block._replace(rows=block.rows[:: max(len(block.rows) // _AGAIN, 1)])
                error = _error(leaf, side, weights, few)
                if error is not None and error <= _SELF * rounding:
                    return leaf
        best: tuple[float, Leaf, float] | None = None
        for leaf in leaves:
            if (block := _chosen(leaf, call)) is None:
                continue
            measured = _measured(leaf, side, weights, block)
            if measured is None or not measured.error <= _SELF * measured.rounding:
                continue
            # Several epsilons may fit; the best fit is taken for the reference's.
            if best is None or measured.error < best[0]:
                best = measured.error, leaf, measured.rounding
        if best is None:
            return None
        self._functions[kind] = best[1:]
        return best[1]

    def _added(self, leaf: Leaf, call: _Call, pairs: Sequence[Pair]) -> Mapping[str, Number]:
        reference, candidate = self._context.runs
        weights = _stored(reference, [pair.reference for pair in pairs])
        block = _chosen(leaf, call)
        if weights is None or block is None:
            return {}
        own = _stored(candidate, [pair.candidate for pair in pairs])
        # A weight that the candidate has packed is quantised, which is another function on purpose.
        if own is None or any(map(_is_coded, pairs)):
            return {}
        coarsest = max((weight.dtype.unit_roundoff for weight in own.values()), default=0.0)
        added = _measured(leaf, call.candidate, weights, block, coarsest)
        if added is None:
            return {}
        unit = DTYPES[call.candidate.output.dtype].unit_roundoff
        allowed = (_ALLOWED if unit > _FINE else _ALLOWED_FINE) * added.rounding
        metrics: dict[str, Number] = {
            ADDED: added.error,
            ADDED_ALLOWED: allowed,
            ADDED_PROJECTION: added.projection,
        }
        if own and added.error > allowed:
            by_own = [
                error
                for layout in _layouts(own, weights)
                if (error := _error(leaf, call.candidate, layout, block)) is not None
            ]
            if by_own:
                metrics[ADDED_BY_OWN_WEIGHTS] = min(by_own)
        return metrics


# --- what is read


class _Side(NamedTuple):
    """Input and output of a call in one run."""

    run: Run
    input: Record
    output: Record

    @property
    def is_readable(self) -> bool:
        return all(
            record.kept == "full"
            and 0 not in record.shape
            and record.dtype in DTYPES
            and DTYPES[record.dtype].bits >= 8
            and DTYPES[record.dtype].kind != "complex"
            and not self.run.lost(record)
            for record in (self.input, self.output)
        ) and _is_float(self.output)


class _Call(NamedTuple):
    """One call on both sides; inputs and outputs have the same shapes.

    Attributes:
        worst: Flat index of the largest difference between the outputs.
    """

    reference: _Side
    candidate: _Side
    worst: int


class _Block(NamedTuple):
    """The part of a call that is computed."""

    rows: Places
    part: Part


class _Measured(NamedTuple):
    """Comparison of a stored output with a computed one, relative to the computed one."""

    error: float
    rounding: float
    projection: float


def _is_float(record: Record) -> bool:
    dtype = DTYPES.get(record.dtype)
    return dtype is not None and dtype.kind == "float" and dtype.bits >= 8


def _is_plain(pair: Pair) -> bool:
    """Return whether the stored tensors of a pair are untransformed and have the same shape."""
    return (
        not pair.trouble and not has_recipe(pair) and pair.reference.shape == pair.candidate.shape
    )


def _is_coded(pair: Pair) -> bool:
    """Return whether a weight is stored as codes with scales, integers or small floats."""
    recipe = pair.candidate_recipe
    return recipe is not None and any(step.kind == "dequantise" for step in recipe.steps)


def _outer(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _held(tree: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Shape]]:
    """Return the parameters of every module of a stored tree, by site; empty if it is damaged."""
    try:
        nodes = list(ModuleTree.from_json(tree).walk()) if tree else []
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {
        node.site: {parameter.name: parameter.shape for parameter in node.parameters}
        for node in nodes
    }


def _stored(run: Run, records: Sequence[Record]) -> dict[str, Weight] | None:
    """Return the stored weights; None if one is not stored in full, or not as floats."""
    weights: dict[str, Weight] = {}
    for record in records:
        if record.kept != "full" or not _is_float(record) or run.lost(record):
            return None
        raw = run.raw(record)
        if raw.size != math.prod(record.shape):
            return None
        weights[record.key.slot] = Weight(raw.reshape(record.shape), DTYPES[record.dtype])
    return weights


def _layouts(own: Weights, wanted: Weights) -> Iterator[Weights]:
    """Yield the candidate's weights under the reference's names, as stored and transposed."""
    if len(own) != len(wanted):
        return
    # Slots are matched by their order: `w_0` of Paddle is torch's `weight`.
    named = dict(zip(wanted, own.values(), strict=True))
    if all(named[name].shape == weight.shape for name, weight in wanted.items()):
        yield named
    turned = {name: own.turned() if len(own.shape) == 2 else own for name, own in named.items()}
    if all(turned[name].shape == weight.shape for name, weight in wanted.items()):
        yield turned


# --- which part is computed


def _chosen(leaf: Leaf, call: _Call) -> _Block | None:
    """Return an even sample of rows, channels and positions, and the place of the worst error."""
    input_shape, made = call.reference.input.shape, call.reference.output.shape
    count = math.prod(made[: leaf.leading])
    width, tail = math.prod(input_shape[leaf.leading :]), made[leaf.leading :]
    row, within = divmod(call.worst, math.prod(tail))
    channels = positions = None
    places = math.prod(tail[1:])
    if isinstance(leaf, Linear):
        channels = min(tail[0], _CHANNELS)
        most = min(_WORK // (width * channels), 4 * _ELEMENTS // width)
    elif leaf.has_channels:
        # Images are read one at a time, because every channel and position of one may be needed.
        if max(width, math.prod(tail)) > _LARGEST_IMAGE:
            return None
        most = max(_ELEMENTS // max(width, math.prod(tail)), 1)
        positions = min(places, _POSITIONS)
        if isinstance(leaf, Convolution):
            channels = min(tail[0], _KERNELS)
            window = (
                width // math.prod(input_shape[2:]) * (leaf.terms * leaf.groups) // input_shape[1]
            )
            positions = max(min(positions, (1 << 18) // max(window, 1)), 1)
    elif width > _LARGEST_IMAGE:
        return None
    else:
        most = max(_ELEMENTS // width, 1)
    most = max(most, min(_FEWEST, max(_LARGEST_IMAGE // max(width, 1), 1)))
    part = Part(
        None if channels is None else _even(tail[0], channels, within // places),
        None if positions is None else _even(places, positions, within % places),
    )
    return _Block(_even(count, most, row), part)


def _even(count: int, most: int, wanted: int) -> Places:
    """Return evenly spread indices, at most `most`, and the index `wanted`."""
    if count <= most:
        return np.arange(count, dtype=np.intp)
    even = np.arange(most, dtype=np.intp) * (count - 1) // max(most - 1, 1)
    place = min(max(wanted, 0), count - 1)
    nearest = int(np.searchsorted(even, place))
    if nearest < most and even[nearest] == place:
        return even
    return np.insert(even, nearest, place)


def _rows(run: Run, record: Record, count: int, rows: Places | None = None) -> F64:
    """Return rows of a tensor as float64, [rows, everything else].

    Raises:
        ValueError: The file holds something else than the record says.
    """
    raw = run.raw(record).reshape(count, -1)
    chosen = raw if rows is None else raw[rows]
    return np.asarray(to_float64(chosen, DTYPES[record.dtype]), np.float64)


# --- what is measured


class _Results(NamedTuple):
    """A part of a call: input, computed result, stored minus computed, energy of the result."""

    input_values: F64
    result: F64
    error: F64
    energy: float


def _results(leaf: Leaf, side: _Side, weights: Weights, block: _Block) -> _Results | None:
    """Apply a leaf to a stored input; None if the result cannot be compared with the stored one."""
    count = math.prod(side.output.shape[: leaf.leading])
    input_values = _rows(side.run, side.input, count, block.rows)
    input_values = input_values.reshape(len(block.rows), *side.input.shape[leaf.leading :])
    made = _rows(side.run, side.output, count, block.rows)
    made = leaf.chosen(
        made.reshape(len(block.rows), *side.output.shape[leaf.leading :]), block.part
    )
    result = leaf.computed(input_values, weights, block.part)
    if result.shape != made.shape:
        return None
    energy = float(np.sum(result * result))
    error = made - result
    if not (math.isfinite(energy) and energy > 0.0 and np.isfinite(error).all()):
        return None
    return _Results(input_values, result, error, energy)


def _error(leaf: Leaf, side: _Side, weights: Weights, block: _Block) -> float | None:
    """Return the relative error of a stored output against a leaf's result on the stored input."""
    with np.errstate(all="ignore"):
        made = _results(leaf, side, weights, block)
    return None if made is None else math.sqrt(float(np.sum(made.error**2)) / made.energy)


def _measured(
    leaf: Leaf, side: _Side, weights: Weights, block: _Block, coarsest: float = 0.0
) -> _Measured | None:
    """Compare the stored output of one side with a leaf's result on the stored input.

    Args:
        leaf: The function.
        side: The run whose input and output are used.
        weights: The weights to compute with.
        block: The part to compute.
        coarsest: Unit roundoff of the weights of that side, if they are not the given ones.
    """
    with np.errstate(all="ignore"):
        made = _results(leaf, side, weights, block)
        if made is None:
            return None
        rounding = _rounding(leaf, side, weights, block, (made.input_values, made.result), coarsest)
    return _Measured(
        math.sqrt(float(np.sum(made.error**2)) / made.energy),
        rounding / math.sqrt(made.energy),
        float(np.sum(made.error * made.result)) / made.energy,
    )


def _rounding(
    leaf: Leaf,
    side: _Side,
    weights: Weights,
    block: _Block,
    computed: tuple[F64, F64],
    coarsest: float,
) -> float:
    """Return the L2 of the error that correct arithmetic in the formats of a call may have."""
    input_values, result = computed
    made_in, given_in = DTYPES[side.output.dtype], DTYPES[side.input.dtype]
    unit = made_in.unit_roundoff
    # An input of a finer format is rounded first (autocast), as finer weights are.
    inputs = unit if given_in.kind == "float" and given_in.unit_roundoff < unit else 0.0
    if not weights and given_in.kind == "float":
        inputs = unit  # an activation computed in steps rounds its input again
    factors = max([unit, coarsest, *(weight.dtype.unit_roundoff for weight in weights.values())])
    changed = leaf.computed(
        jittered(input_values, inputs),
        {name: weight._replace(jitter=factors) for name, weight in weights.items()},
        block.part,
    )
    size = float(np.linalg.norm(result))
    propagated = float(np.linalg.norm(changed - result))
    # How much larger the terms of a sum are than the sum.
    cancelled = max(propagated / (_ACROSS * max(inputs, factors) * size), 1.0)
    sums = min(unit, _FINE) * math.sqrt(64.0 + leaf.terms) * min(cancelled, 1e6) * size
    rounded = leaf.roundings * _ACROSS * unit * size
    return math.sqrt(propagated**2 + rounded**2 + sums**2 + _steps(made_in) ** 2 * result.size)


def _steps(dtype: DType) -> float:
    """Return the distance between the smallest numbers of a format, the unit of rounding there."""
    return math.ldexp(1.0, dtype.smallest_normal_exponent - dtype.mantissa)
