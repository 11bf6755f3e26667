"""Joining: the parts of one tensor on a mesh become a recipe for the complete tensor.

This file also computes the values of such a recipe, for rules that must check them, and finds the
parts of fused projections, of which each rank has a piece of q, of k and of v. Placements are
decided elsewhere.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.alignment.placements.mesh import AxisPlacement, Coordinate
from driftline.alignment.recipe import Recipe, Source, joined
from driftline.alignment.rules.fused_projections import relative_distance, rows_of
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.definitions import sketch
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

Shape = tuple[int, ...]
F64 = npt.NDArray[np.float64]
_LARGEST = 1 << 22
"""Largest number of elements that are read of a tensor; larger ones are sampled to about this."""


_ALONG = ("concat", "select")


class DoesNotFit(Exception):
    """Parts cannot be joined under a placement; the message gives the reason."""


def join(parts: Mapping[Coordinate, Source], placed: Sequence[AxisPlacement]) -> list[Source]:
    """Join parts; returns one source for each place along axes that hold replicas.

    Raises:
        DoesNotFit: A part is missing, or shapes do not fit.
    """
    sources_by_place = dict(parts)
    for axis in _order(placed):
        how = placed[axis]
        if how.kind == "replicate":
            continue
        groups: dict[Coordinate, dict[int, Source]] = {}
        for coordinate, source in sources_by_place.items():
            rest = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
            groups.setdefault(rest, {})[coordinate[axis]] = source
        # The size is counted from the parts, so a part that is missing at the end is noticed
        # elsewhere.
        size = 1 + max(coordinate[axis] for coordinate in sources_by_place)
        sources_by_place = {}
        # A gap is an error, because the parts after it would move to its place.
        for rest, members in groups.items():
            if lacking := [n for n in range(size) if n not in members]:
                raise DoesNotFit(f"part {lacking[0] + 1} of {size} is missing")
            sources = [members[n] for n in sorted(members)]
            sources_by_place[rest] = _join_axis(sources, how)
    return [sources_by_place[coordinate] for coordinate in sorted(sources_by_place)]


def _order(placed: Sequence[AxisPlacement]) -> list[int]:
    """Mesh axes in the order in which they are joined: the last cut is undone first."""
    late = sorted(
        (axis for axis, how in enumerate(placed) if how.late), key=lambda n: -placed[n].late
    )
    return late + [axis for axis in reversed(range(len(placed))) if not placed[axis].late]


def _join_axis(sources: Sequence[Source], how: AxisPlacement) -> Source:
    if len(sources) == 1:
        return sources[0]
    first = sources[0].shape
    if how.kind in ("sum", "mean"):
        if len({source.shape for source in sources}) != 1:
            raise DoesNotFit(f"terms of a sum have different shapes: {shapes_text(sources)}")
        return joined(sources, how.kind, 0, first)
    if how.kind != "shard":
        raise DoesNotFit("how its parts are laid out over the ranks is not known")
    # If there are more ranks than rows, the last ranks hold nothing.
    full = [source for source in sources if 0 not in source.shape] or [sources[0]]
    first, axis = full[0].shape, how.axis
    rest = {(*source.shape[:axis], *source.shape[axis + 1 :]) for source in full}
    if not all(axis < len(source.shape) for source in full) or len(rest) != 1:
        raise DoesNotFit(f"the ranks' shapes do not fit: {shapes_text(sources)}")
    if len(full) == 1:
        return full[0]
    length = sum(source.shape[axis] for source in full)
    # One concat with many sources instead of nested ones: the plan stays readable, and is executed
    # in one step.
    full = [part for source in full for part in _flat(source, axis)]
    return joined(full, "concat", axis, (*first[:axis], length, *first[axis + 1 :]))


def _flat(source: Source, axis: int) -> Sequence[Source]:
    """The parts of a source that is only a join along this axis; any other source alone.

    So they can be joined in one step.
    """
    if isinstance(source, Recipe) and [(s.kind, s.axis) for s in source.steps] == [
        ("concat", axis)
    ]:
        return source.sources
    return (source,)


def fitting_placements(
    parts: Mapping[Coordinate, Source],
    target: Shape,
    fixed: Mapping[int, AxisPlacement],
    axes: int,
) -> list[tuple[AxisPlacement, ...]]:
    """Every placement under which the parts make tensors of a given shape.

    Args:
        parts: The parts by coordinate.
        target: The shape of these tensors.
        fixed: Placements of mesh axes that are already known.
        axes: Number of axes of the mesh.
    """
    shapes = {part.shape for part in parts.values() if 0 not in part.shape}
    if any(len(shape) != len(target) for shape in shapes):
        return []
    # Axes that already have the complete size cannot have been cut.
    cut = [n for n in range(len(target)) if any(shape[n] != target[n] for shape in shapes)]
    choices: list[list[AxisPlacement]] = []
    for axis in range(axes):
        if axis in fixed:
            choices.append([fixed[axis]])
        elif len({coordinate[axis] for coordinate in parts}) == 1:
            choices.append([AxisPlacement("replicate")])
        else:
            choices.append([AxisPlacement("replicate"), *(AxisPlacement("shard", n) for n in cut)])
    fitting: list[tuple[AxisPlacement, ...]] = []
    for placements in itertools.product(*choices):
        try:
            made = join(parts, placements)
        except DoesNotFit:
            continue
        if all(source.shape == target for source in made):
            fitting.append(placements)
    return fitting


class Thin(NamedTuple):
    """Sampling of a large tensor: every nth element along an axis that is not cut."""

    axis: int
    step: int


def thinned(shape: Shape, placed: Sequence[AxisPlacement]) -> Thin | None:
    """Sampling for a tensor with many elements; None if it is small enough to read completely."""
    many = -(-math.prod(shape) // _LARGEST)
    cut = {how.axis for how in placed if how.kind == "shard"}
    uncut = [axis for axis in range(len(shape)) if axis not in cut]
    if many < 2 or not uncut:
        return None
    # The longest axis that is not cut loses the least detail.
    return Thin(max(uncut, key=lambda axis: shape[axis]), many)


def values_of(
    run: Run, source: Source, *, sketched: bool = False, thin: Thin | None = None
) -> F64 | None:
    """Values of a record or of a recipe of joins; None if they cannot be read.

    Args:
        run: The run that holds the values.
        source: The record or recipe.
        sketched: Return sketches instead, which are linear in the values; summaries hold no values.
        thin: Sampling of the elements; None for all elements.
    """
    try:
        return _values(run, source, sketched, thin)
    except (DriftlineError, OSError, ValueError):
        return None


def _values(run: Run, source: Source, sketched: bool, thin: Thin | None) -> F64:
    if isinstance(source, Record):
        return _sketch(run, source) if sketched else _numbers(run, source, thin)
    parts = (_values(run, part, sketched, thin) for part in source.sources)  # one at a time
    joining = source.steps[0].kind if source.steps else ""
    # The recipe's positions along a thinned axis would select other elements.
    if thin is not None and any(
        step.axis == thin.axis for step in source.steps if step.kind in _ALONG
    ):
        raise BadInput("it is cut where elements are left out")
    values: Any
    if joining == "concat" and not sketched:
        values = np.concatenate(list(parts), axis=source.steps[0].axis)
    else:
        values = next(parts)
        for more in parts if joining in ("sum", "mean") else ():
            values = values + more
    for step in source.steps:
        if step.kind == "mean":
            values = values / len(source.sources)
        elif step.kind == "times":
            # A sketch is linear in the values, so it allows sums and factors, but not joins.
            values = values * step.factor
        elif sketched and step.kind != "sum":
            raise BadInput("sketches of parts are none of the whole")
        elif step.kind == "select":
            values = np.take(values, step.numbers, axis=step.axis)
        elif step.kind not in ("concat", "sum"):
            raise BadInput("no join")
    return cast("F64", values)


def _numbers(run: Run, record: Record, thin: Thin | None = None) -> F64:
    count = math.prod(record.shape)
    if record.kept != "full" or run.lost(record):
        raise BadInput("no values")
    if count > _LARGEST * (1 if thin is None else thin.step):
        raise BadInput("too many")
    dtype = DTYPES[record.dtype]
    if dtype.kind in ("complex", "bits") or dtype.bits < 8:
        raise BadInput("no plain numbers")
    words: Any = run.raw(record).reshape(record.shape)
    if thin is not None:
        # Thinned before the conversion, because float64 takes up to eight times the memory of the
        # stored words.
        words = words[(slice(None),) * thin.axis + (slice(None, None, thin.step),)]
    numbers: Any = to_float64(np.ascontiguousarray(words).reshape(-1), dtype, words.size)
    return cast("F64", numbers.reshape(words.shape))


def _sketch(run: Run, record: Record) -> F64:
    if record.summary is None:
        return sketch(_numbers(run, record))
    if not record.summary.sketch:
        raise BadInput("no sketch")
    return np.array(record.summary.sketch)


def distance(reference: F64, candidate: F64) -> float:
    """Relative distance |candidate - reference| / |reference|.

    Infinite if shapes differ or a value is not finite.
    """
    if reference.shape != candidate.shape:
        return math.inf
    # Overflows in broken tensors are reported by the comparison, not here.
    with np.errstate(all="ignore"):
        off = float(np.linalg.norm((candidate - reference).reshape(-1)))
        size = float(np.linalg.norm(reference.reshape(-1)))
    if not math.isfinite(off):
        return math.inf
    return off / size if size else (0.0 if off == 0 else math.inf)


def shapes_text(sources: Sequence[Source | Recipe]) -> str:
    return " and ".join("x".join(map(str, source.shape)) or "scalar" for source in sources)


# Limits of the relative distance: below the first, values agree; above the second, their order is
# wrong.
AGREE, APART = 0.05, 0.5
FUSED = re.compile(
    r"(w?_?qkv|query_key_value|c_attn|w_?pack|in_proj|kv|key_value|gate_?up|up_gate|w13|fc1|"
    r"wi|dense_h_to_4h|linear_fc1)(_?(proj|linear|layer|operation))*"
)
# Equal thirds (q, k, v), halves (gate, up), and grouped queries with several heads per key.
_WAYS = ((1, 1, 1), (1, 1), *((share, 1, 1) for share in (2, 3, 4, 5, 6, 7, 8, 12, 16)))


def positions(sizes: Sequence[int], parts: Sequence[int]) -> tuple[int, ...] | None:
    """Positions of the complete tensor's elements among joined shards; None if sizes do not divide.

    >>> positions([4, 4], [1, 1])
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    unit = sum(parts)
    if any(size % unit for size in sizes):
        return None
    numbers: list[int] = []
    for which in range(len(parts)):
        begin = 0
        for size in sizes:
            first = begin + sum(parts[:which]) * size // unit
            numbers.extend(range(first, first + parts[which] * size // unit))
            begin += size
    return tuple(numbers)


def is_called_fused(site: str) -> bool:
    """Whether a site has a name that programs give to fused projections.

    >>> is_called_fused("layers.0.attn.qkv_proj"), is_called_fused("layers.0.attn.q_proj")
    (True, False)
    """
    last = site.rpartition(".")[2].lower()
    return FUSED.fullmatch(re.sub(r"^\d+_", "", last)) is not None


def parts_by_values(
    run: Run, shards: Sequence[Record], other: Run, other_record: Record
) -> tuple[int, ...]:
    """Shares of fused parts that make shards agree with the other run; empty if none are needed.

    Args:
        run: The sharded run.
        shards: The shards of one tensor, in the order of ranks.
        other: The run that has the complete tensor.
        other_record: The tensor in the other run.
    """
    target = rows_of(other, other_record)
    pieces = [rows_of(run, shard) for shard in shards]
    if target is None or any(piece is None for piece in pieces):
        return ()
    readable = [piece for piece in pieces if piece is not None]
    count = min(len(target), *map(len, readable))
    joined = np.concatenate([piece[:count] for piece in readable], axis=1)
    if not count or joined.shape[1] != target.shape[1]:
        return ()
    # If the shards agree rank after rank, no parts are fused.
    if not relative_distance(joined, target[:count]) > APART:
        return ()
    fitting: list[tuple[int, ...]] = []
    for parts in _WAYS:
        places = positions([piece.shape[1] for piece in readable], parts)
        if places is not None and relative_distance(joined[:, places], target[:count]) < AGREE:
            fitting.append(parts)
    # If several splits fit, the values cannot decide, so none is used.
    return fitting[0] if len(fitting) == 1 else ()
