"""What a leaf module adds to the error: the reference's function on the candidate's own input.

Where the weights are in the runs (`--level params`), a linear, a convolution, a norm, an embedding
or an activation can be computed again in float64: with the reference's weights, on what the
candidate's module was given. What the candidate's output differs from that by, the module has added
itself, whatever came in. Computed with the candidate's own weights besides, it tells wrong weights
from a wrong function.

Which function a module is, its class does not tell (a Linear may be wrapped, a norm have its own
formula): the function must give the reference's output from the reference's input to within
rounding, otherwise nothing is said. The rounding that the candidate's formats explain is measured
as well, by jittering input and weights by one rounding each, so that sums that cancel are allowed
what they need. Costs are bounded: of a large tensor an even sample of rows and channels is taken,
with those of the largest error among them, and of a comparison so many leaves at most.
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
"""Products of one evaluation of a leaf, about a millisecond."""
_MOST_LEAVES = 512
"""Leaves of one comparison; the first that are off, in order of execution."""
_ELEMENTS = 1 << 14
"""Elements of the rows of one evaluation that are no matrix product."""
_LARGEST_IMAGE = 1 << 22
"""Elements of one image, which a convolution needs at once."""
_CHANNELS, _KERNELS, _POSITIONS = 64, 32, 256
_AGAIN = 16
"""Rows on which a function that siblings have is tried."""
_FEWEST = 8
"""Rows that are computed at least, of a module that is very wide."""
_SELF = 4.0
"""Times its rounding: so far the reference may be from the function that it is taken for."""
_TIED = 3
"""Weights of other modules that are tried for a module that shares one."""
_FINE = 2.0**-24
_ACROSS = 1.0 / math.sqrt(3.0)
"""Root mean square of a rounding, in units of the largest one."""
_ALLOWED, _ALLOWED_FINE = 3.0, 6.0
"""Times its rounding: so far a right implementation may be from the function. In a fine format the
function's own approximation (of a root, an exponential) is as large as rounding is."""

_Place: TypeAlias = tuple[int, int, str]


class RecomputedLeaf:
    """Says what a leaf's own computation adds, and what rounding explains of that."""

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
        """The one input and the one output of a call, on both sides; None for any other call."""
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
        """Weights that a module may compute with: its own, or one that it shares with another."""
        key = row.key
        place = (key.rank, key.process, key.site)
        if pairs := self._weights.get(place):
            # Weights are stored once, or in every step: the latest of those that were there.
            steps = [pair.reference.key.step for pair in pairs]
            latest = max((step for step in steps if step <= key.step), default=min(steps))
            yield [pair for pair in pairs if pair.reference.key.step == latest]
            return
        # A tied weight is stored where it was met first; the module tree tells its shape.
        declared = self._declared(0, key, key.site)
        if not declared:
            yield ()
        # The candidate must hold it as it is, too: it may have packed it in this place only.
        elif len(declared) == 1 and declared == self._declared(
            1, key, row.candidate_site or key.site
        ):
            for pair in self._by_shape.get(next(iter(declared.items())), ()):
                yield [pair]

    def _declared(self, side: int, key: TensorKey, site: str) -> Mapping[str, Shape]:
        """Names and shapes of what a module of one run holds, by its module tree."""
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
        """The function that gives the reference's output from the reference's input."""
        weights = _stored(self._context.runs[0], [pair.reference for pair in pairs])
        if weights is None:
            return None
        side = call.reference
        shapes = {name: weight.shape for name, weight in weights.items()}
        kind = (row.class_name, side.given.shape[1:], side.made.shape[1:], tuple(shapes.items()))
        leaves = possible_leaves(
            side.given.shape,
            not _is_float(side.given),
            side.made.shape,
            shapes,
            self._attributes(row.key),
        )
        # Modules of one class and shape are mostly the same function: that one is tried first, and
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
            # Several epsilons may fit; the one that fits best is the reference's.
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
        # A weight that the candidate has packed is quantised: another function by intention.
        if own is None:
            return {}
        coarsest = max((weight.dtype.unit_roundoff for weight in own.values()), default=0.0)
        added = _measured(leaf, call.candidate, weights, block, coarsest)
        if added is None:
            return {}
        unit = DTYPES[call.candidate.made.dtype].unit_roundoff
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
    given: Record
    made: Record

    @property
    def is_readable(self) -> bool:
        return all(
            record.kept == "full"
            and 0 not in record.shape
            and record.dtype in DTYPES
            and DTYPES[record.dtype].bits >= 8
            and DTYPES[record.dtype].kind != "complex"
            and not self.run.lost(record)
            for record in (self.given, self.made)
        ) and _is_float(self.made)


class _Call(NamedTuple):
    """One call on both sides; inputs and outputs have the same shapes.

    Attributes:
        worst: Where the outputs differ most, a flat index.
    """

    reference: _Side
    candidate: _Side
    worst: int


class _Block(NamedTuple):
    """Which part of a call is computed."""

    rows: Places
    part: Part


class _Measured(NamedTuple):
    """A stored output against a computed one, relative to the latter."""

    error: float
    rounding: float
    projection: float


def _is_float(record: Record) -> bool:
    dtype = DTYPES.get(record.dtype)
    return dtype is not None and dtype.kind == "float" and dtype.bits >= 8


def _is_plain(pair: Pair) -> bool:
    """Whether the stored tensors of a pair are what was computed, in one shape."""
    return (
        not pair.trouble and not has_recipe(pair) and pair.reference.shape == pair.candidate.shape
    )


def _outer(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _held(tree: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Shape]]:
    """Parameters of every module of a stored tree by site; a damaged tree has none."""
    try:
        nodes = list(ModuleTree.from_json(tree).walk()) if tree else []
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {
        node.site: {parameter.name: parameter.shape for parameter in node.parameters}
        for node in nodes
    }


def _stored(run: Run, records: Sequence[Record]) -> dict[str, Weight] | None:
    """Weights as they are stored; None when one is not there in full, or not as floats."""
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
    """The candidate's weights under the reference's names, matrices either way round."""
    if len(own) != len(wanted):
        return
    # Slots are matched in order: `w_0` of Paddle is torch's `weight`.
    named = dict(zip(wanted, own.values(), strict=True))
    if all(named[name].shape == weight.shape for name, weight in wanted.items()):
        yield named
    turned = {name: own.turned() if len(own.shape) == 2 else own for name, own in named.items()}
    if all(turned[name].shape == weight.shape for name, weight in wanted.items()):
        yield turned


# --- which part is computed


def _chosen(leaf: Leaf, call: _Call) -> _Block | None:
    """An even sample of rows, channels and positions, with the place of the largest error."""
    input_shape, made = call.reference.given.shape, call.reference.made.shape
    count = math.prod(made[: leaf.leading])
    width, tail = math.prod(input_shape[leaf.leading :]), made[leaf.leading :]
    row, within = divmod(call.worst, math.prod(tail))
    channels = positions = None
    places = math.prod(tail[1:])
    if isinstance(leaf, Linear):
        channels = min(tail[0], _CHANNELS)
        most = min(_WORK // (width * channels), 4 * _ELEMENTS // width)
    elif leaf.has_channels:
        # Images are read one at a time: every channel and position of one may be needed.
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
    """Places of so many of some entries, evenly spread, and a wanted one."""
    if count <= most:
        return np.arange(count, dtype=np.intp)
    even = np.arange(most, dtype=np.intp) * (count - 1) // max(most - 1, 1)
    place = min(max(wanted, 0), count - 1)
    nearest = int(np.searchsorted(even, place))
    if nearest < most and even[nearest] == place:
        return even
    return np.insert(even, nearest, place)


def _rows(run: Run, record: Record, count: int, rows: Places | None = None) -> F64:
    """Rows of a tensor as float64, [rows, everything else].

    Raises:
        ValueError: The file holds something else than the record says.
    """
    raw = run.raw(record).reshape(count, -1)
    chosen = raw if rows is None else raw[rows]
    return np.asarray(to_float64(chosen, DTYPES[record.dtype]), np.float64)


# --- what is measured


class _Results(NamedTuple):
    """A part of a call: what was given, what a leaf makes of it, what is stored less that."""

    input_values: F64
    result: F64
    error: F64
    energy: float


def _results(leaf: Leaf, side: _Side, weights: Weights, block: _Block) -> _Results | None:
    """Apply a leaf to a stored input; None where nothing can be compared with what is stored."""
    count = math.prod(side.made.shape[: leaf.leading])
    input_values = _rows(side.run, side.given, count, block.rows)
    input_values = input_values.reshape(len(block.rows), *side.given.shape[leaf.leading :])
    made = _rows(side.run, side.made, count, block.rows)
    made = leaf.chosen(made.reshape(len(block.rows), *side.made.shape[leaf.leading :]), block.part)
    result = leaf.computed(input_values, weights, block.part)
    if result.shape != made.shape:
        return None
    energy = float(np.sum(result * result))
    error = made - result
    if not (math.isfinite(energy) and energy > 0.0 and np.isfinite(error).all()):
        return None
    return _Results(input_values, result, error, energy)


def _error(leaf: Leaf, side: _Side, weights: Weights, block: _Block) -> float | None:
    """Relative error of a stored output against what a leaf gives on the stored input."""
    with np.errstate(all="ignore"):
        made = _results(leaf, side, weights, block)
    return None if made is None else math.sqrt(float(np.sum(made.error**2)) / made.energy)


def _measured(
    leaf: Leaf, side: _Side, weights: Weights, block: _Block, coarsest: float = 0.0
) -> _Measured | None:
    """The stored output of one side against what a leaf gives on the stored input.

    Args:
        leaf: The function.
        side: Whose input and output.
        weights: What it is computed with.
        block: Which part of it.
        coarsest: Unit roundoff of weights that the side itself computes with, where those are not
            the ones given.
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
    """L2 of the error that right arithmetic in the formats of a call may have."""
    input_values, result = computed
    made_in, given_in = DTYPES[side.made.dtype], DTYPES[side.given.dtype]
    unit = made_in.unit_roundoff
    # A finer input is rounded on its way in (autocast), as finer weights are.
    inputs = unit if given_in.kind == "float" and given_in.unit_roundoff < unit else 0.0
    if not weights and given_in.kind == "float":
        inputs = unit  # an activation in steps rounds something like its input again
    factors = max([unit, coarsest, *(weight.dtype.unit_roundoff for weight in weights.values())])
    changed = leaf.computed(
        jittered(input_values, inputs),
        {name: weight._replace(jitter=factors) for name, weight in weights.items()},
        block.part,
    )
    size = float(np.linalg.norm(result))
    propagated = float(np.linalg.norm(changed - result))
    # How much larger the terms of a sum are than what is left of them.
    cancelled = max(propagated / (_ACROSS * max(inputs, factors) * size), 1.0)
    sums = min(unit, _FINE) * math.sqrt(64.0 + leaf.terms) * min(cancelled, 1e6) * size
    rounded = leaf.roundings * _ACROSS * unit * size
    return math.sqrt(propagated**2 + rounded**2 + sums**2 + _steps(made_in) ** 2 * result.size)


def _steps(dtype: DType) -> float:
    """The distance between the smallest numbers of a format, which rounding there is made of."""
    return math.ldexp(1.0, dtype.smallest_normal_exponent - dtype.mantissa)
