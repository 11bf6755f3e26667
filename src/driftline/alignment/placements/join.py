"""Parts of one tensor, each at its place on a mesh, become the whole they are part of.

Gives recipes, and for the rules that must look, what such a recipe would give. Which axis of the
mesh holds what is for others to say.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.alignment.placements.mesh import Coordinate, Placed
from driftline.alignment.recipe import Recipe, Source, joined
from driftline.alignment.rules.fused_projections import relative_distance, rows_of
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.numerics.sketch import sketch
from driftline.runs.records import Record
from driftline.runs.run import Run

Shape = tuple[int, ...]
F64 = npt.NDArray[np.float64]
_LARGEST = 1 << 22
"""Elements of a tensor that are looked at, and of larger ones about so many."""


_ALONG = ("concat", "select")


class DoesNotFit(Exception):
    """Parts that cannot be joined so; the message says why."""


def join(parts: Mapping[Coordinate, Source], placed: Sequence[Placed]) -> list[Source]:
    """What parts make together: one source for each place of the axes that hold replicas.

    Raises:
        DoesNotFit: A part is missing, or shapes do not fit.
    """
    found = dict(parts)
    for axis in _order(placed):
        how = placed[axis]
        if how.kind == "replicate":
            continue
        together: dict[Coordinate, dict[int, Source]] = {}
        for at, source in found.items():
            rest = (*at[:axis], 0, *at[axis + 1 :])
            together.setdefault(rest, {})[at[axis]] = source
        size = 1 + max(at[axis] for at in found)
        found = {}
        for rest, members in together.items():
            if lacking := [n for n in range(size) if n not in members]:
                raise DoesNotFit(f"part {lacking[0] + 1} of {size} is missing")
            sources = [members[n] for n in sorted(members)]
            found[rest] = _one(sources, how)
    return [found[at] for at in sorted(found)]


def _order(placed: Sequence[Placed]) -> list[int]:
    """Axes in the order in which they are undone: what was cut last is joined first."""
    late = sorted(
        (axis for axis, how in enumerate(placed) if how.late), key=lambda n: -placed[n].late
    )
    return late + [axis for axis in reversed(range(len(placed))) if not placed[axis].late]


def _one(sources: Sequence[Source], how: Placed) -> Source:
    if len(sources) == 1:
        return sources[0]
    first = sources[0].shape
    if how.kind in ("sum", "mean"):
        if len({source.shape for source in sources}) != 1:
            raise DoesNotFit(f"terms of a sum have different shapes: {shapes_said(sources)}")
        return joined(sources, how.kind, 0, first)
    if how.kind != "shard":
        raise DoesNotFit("nothing says how it lies")
    # Where there are more ranks than rows, the last ones hold nothing.
    full = [source for source in sources if 0 not in source.shape] or [sources[0]]
    first, axis = full[0].shape, how.axis
    rest = {(*source.shape[:axis], *source.shape[axis + 1 :]) for source in full}
    if not all(axis < len(source.shape) for source in full) or len(rest) != 1:
        raise DoesNotFit(f"the ranks' shapes do not fit: {shapes_said(sources)}")
    if len(full) == 1:
        return full[0]
    whole = sum(source.shape[axis] for source in full)
    full = [part for source in full for part in _flat(source, axis)]
    return joined(full, "concat", axis, (*first[:axis], whole, *first[axis + 1 :]))


def _flat(source: Source, axis: int) -> Sequence[Source]:
    """The parts of what was itself joined along this axis and no more: joined in one go."""
    if isinstance(source, Recipe) and [(s.kind, s.axis) for s in source.steps] == [
        ("concat", axis)
    ]:
        return source.sources
    return (source,)


def ways(
    parts: Mapping[Coordinate, Source],
    target: Shape,
    known: Mapping[int, Placed],
    axes: int,
) -> list[tuple[Placed, ...]]:
    """Every way in which parts, cut along axes, make tensors of a shape.

    Args:
        parts: By place.
        target: The shape they must make.
        known: What is known of some axes of the mesh.
        axes: How many axes the mesh has.
    """
    shapes = {part.shape for part in parts.values() if 0 not in part.shape}
    if any(len(shape) != len(target) for shape in shapes):
        return []
    cut = [n for n in range(len(target)) if any(shape[n] != target[n] for shape in shapes)]
    choices: list[list[Placed]] = []
    for axis in range(axes):
        if axis in known:
            choices.append([known[axis]])
        elif len({at[axis] for at in parts}) == 1:
            choices.append([Placed("replicate")])
        else:
            choices.append([Placed("replicate"), *(Placed("shard", n) for n in cut)])
    found: list[tuple[Placed, ...]] = []
    for way in itertools.product(*choices):
        try:
            made = join(parts, way)
        except DoesNotFit:
            continue
        if all(source.shape == target for source in made):
            found.append(way)
    return found


class Thin(NamedTuple):
    """Which elements of a large tensor are looked at: every nth along an axis that nothing cuts."""

    axis: int
    step: int


def thinned(shape: Shape, placed: Sequence[Placed]) -> Thin | None:
    """How to look at a tensor of many elements; None where all of them may be."""
    many = -(-math.prod(shape) // _LARGEST)
    cut = {how.axis for how in placed if how.kind == "shard"}
    whole = [axis for axis in range(len(shape)) if axis not in cut]
    if many < 2 or not whole:
        return None
    return Thin(max(whole, key=lambda axis: shape[axis]), many)


def values_of(
    run: Run, source: Source, *, sketched: bool = False, thin: Thin | None = None
) -> F64 | None:
    """What a record or a recipe of joins holds; None where that cannot be had.

    Args:
        run: Where it lies.
        source: What.
        sketched: Its sketch instead, which is linear in the values: summaries have no more.
        thin: Which elements; all, when not given.
    """
    try:
        return _values(run, source, sketched, thin)
    except (DriftlineError, OSError, ValueError):
        return None


def _values(run: Run, source: Source, sketched: bool, thin: Thin | None) -> F64:
    if isinstance(source, Record):
        return _sketch(run, source) if sketched else _numbers(run, source, thin)
    each = (_values(run, one, sketched, thin) for one in source.sources)  # one at a time
    joining = source.steps[0].kind if source.steps else ""
    if thin is not None and any(
        step.axis == thin.axis for step in source.steps if step.kind in _ALONG
    ):
        raise BadInput("it is cut where elements are left out")
    found: Any
    if joining == "concat" and not sketched:
        found = np.concatenate(list(each), axis=source.steps[0].axis)
    else:
        found = next(each)
        for more in each if joining in ("sum", "mean") else ():
            found = found + more
    for step in source.steps:
        if step.kind == "mean":
            found = found / len(source.sources)
        elif step.kind == "times":
            found = found * step.factor
        elif sketched and step.kind != "sum":
            raise BadInput("sketches of parts are none of the whole")
        elif step.kind == "select":
            found = np.take(found, step.numbers, axis=step.axis)
        elif step.kind not in ("concat", "sum"):
            raise BadInput("no join")
    return cast("F64", found)


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
        words = words[(slice(None),) * thin.axis + (slice(None, None, thin.step),)]
    numbers: Any = to_float64(np.ascontiguousarray(words).reshape(-1), dtype, words.size)
    return cast("F64", numbers.reshape(words.shape))


def _sketch(run: Run, record: Record) -> F64:
    if record.summary is None:
        return sketch(_numbers(run, record))
    if not record.summary.sketch:
        raise BadInput("no sketch")
    return np.array(record.summary.sketch)


def distance(ours: F64, theirs: F64) -> float:
    """Relative to the first: |theirs - ours| / |ours|; infinite where they cannot be compared."""
    if ours.shape != theirs.shape:
        return math.inf
    with np.errstate(all="ignore"):
        off = float(np.linalg.norm((theirs - ours).reshape(-1)))
        size = float(np.linalg.norm(ours.reshape(-1)))
    if not math.isfinite(off):
        return math.inf
    return off / size if size else (0.0 if off == 0 else math.inf)


def shapes_said(sources: Sequence[Source | Recipe]) -> str:
    return " and ".join("x".join(map(str, source.shape)) or "scalar" for source in sources)


# Shards of a tensor that is several in one: each rank has its piece of q, of k and of v.


AGREE, APART = 0.05, 0.5
FUSED = re.compile(
    r"(w?_?qkv|query_key_value|c_attn|w_?pack|in_proj|kv|key_value|gate_?up|up_gate|w13|fc1|"
    r"wi|dense_h_to_4h|linear_fc1)(_?(proj|linear|layer|operation))*"
)
_WAYS = ((1, 1, 1), (1, 1), *((share, 1, 1) for share in (2, 3, 4, 5, 6, 7, 8, 12, 16)))


def positions(sizes: Sequence[int], parts: Sequence[int]) -> tuple[int, ...] | None:
    """Where the elements of the whole lie among joined shards; None if the shards have no parts so.

    >>> positions([4, 4], [1, 1])
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    unit = sum(parts)
    if any(size % unit for size in sizes):
        return None
    found: list[int] = []
    for which in range(len(parts)):
        begin = 0
        for size in sizes:
            first = begin + sum(parts[:which]) * size // unit
            found.extend(range(first, first + parts[which] * size // unit))
            begin += size
    return tuple(found)


def is_called_fused(site: str) -> bool:
    """Whether a name says that a projection is several in one.

    >>> is_called_fused("layers.0.attn.qkv_proj"), is_called_fused("layers.0.attn.q_proj")
    (True, False)
    """
    last = site.rpartition(".")[2].lower()
    return FUSED.fullmatch(re.sub(r"^\d+_", "", last)) is not None


def parts_by_values(
    run: Run, shards: Sequence[Record], other: Run, whole: Record
) -> tuple[int, ...]:
    """The parts that make shards along the last axis agree with the whole; empty if none need be.

    Args:
        run: The sharded run.
        shards: Of one tensor, in the order of ranks.
        other: The run that has it whole.
        whole: The tensor there.
    """
    target = rows_of(other, whole)
    pieces = [rows_of(run, shard) for shard in shards]
    if target is None or any(piece is None for piece in pieces):
        return ()
    known = [piece for piece in pieces if piece is not None]
    count = min(len(target), *map(len, known))
    joined = np.concatenate([piece[:count] for piece in known], axis=1)
    if not count or joined.shape[1] != target.shape[1]:
        return ()
    if not relative_distance(joined, target[:count]) > APART:
        return ()
    fitting: list[tuple[int, ...]] = []
    for parts in _WAYS:
        places = positions([piece.shape[1] for piece in known], parts)
        if places is not None and relative_distance(joined[:, places], target[:count]) < AGREE:
            fitting.append(parts)
    return fitting[0] if len(fitting) == 1 else ()
