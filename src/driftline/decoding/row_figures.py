"""Two outputs of one layer, row by row: mean |difference| and cosine over the last dimension.

The figures are the project's own (`mean_abs_error`, `cosine`), of each row. Elements that are
non-finite alike on both sides are left out; a row with one that is so on one side only, or with no
finite element, is NaN: nothing is replaced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.measure.operands import ValuePair, measure_moments, measure_values
from driftline.comparison.measure.pair_rows import incompatibility, paired
from driftline.comparison.measure.scheduler import blocks_of
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.metrics.definitions import cosine as cosine_by_definition
from driftline.comparison.metrics.from_moments import cosine, mean_abs_error, needs_definition
from driftline.comparison.table.row import Row
from driftline.decoding.counted_rows import Mask
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.moments import PairMoments

F64 = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.intp]]
Moments = Callable[[int, int], PairMoments]
"""Moments of the elements from one place to another."""
Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

_NARROW = 256
"""Elements of a row up to which rows are measured together: 2 us each for 128, not 6."""
_BLOCK = 1 << 16
"""Elements that are measured together; float64 copies of them stay in the cache."""
_SHARE = 1 << 19
"""Elements that are worth a thread."""


class Figures(NamedTuple):
    """One output of one call of one layer.

    Attributes:
        row: The whole output as a row of a comparison table, pads left out; its key says where.
        counts: Which rows count, [shape without its last axis]; None: all.
        abs_diff: Mean |difference| of each row that counts.
        cos_sim: Cosine of each row that counts.
        elements: |difference| of every element of those rows; None unless asked for.
        nan: Elements of those rows that are NaN on both sides; they are in no figure.
    """

    row: Row
    counts: Mask | None
    abs_diff: F64
    cos_sim: F64
    elements: F64 | None
    nan: int = 0


NOTHING = np.empty(0)


def figures_of(
    pair: Pair,
    reference: Bytes,
    candidate: Bytes,
    counts: Mask | None,
    metrics: tuple[Metric, ...],
    *,
    elements: bool = False,
) -> Figures:
    """Measure one pair of outputs; one that cannot be compared has no rows and says why.

    Args:
        pair: The two records.
        reference: Flat bytes.
        candidate: Flat bytes.
        counts: Which rows count.
        metrics: Of the whole, for the table.
        elements: Also every element's difference.
    """
    row = paired(pair)
    if trouble := incompatibility(pair):
        row = row._replace(status="incomparable", reason=trouble)
        return Figures(row, counts, NOTHING, NOTHING, None)
    shape = pair.reference.shape
    width = shape[-1] if shape else 1
    values = _values(pair, reference, candidate)
    here = np.flatnonzero(counts) if counts is not None else np.arange(_count(shape, width))
    if not width or not len(here):
        row = row._replace(status="incomparable", reason="it has no element that counts")
        return Figures(row, counts, NOTHING, NOTHING, None)
    moments = _pass(values)
    pieces = [
        (first + start, first + stop)
        for first, last in _stretches(here, width)
        for start, stop in blocks_of(last - first)
    ]
    share = max(1, min(_threads(), len(here) * width // _SHARE))
    with _helped(share) as each:
        parts = each(lambda piece: moments(*piece), pieces)
        rows = each(lambda places: _rows(values, moments, places, width), _shared(here, share))
    abs_diff = np.concatenate([found[0] for found in rows])
    cos_sim = np.concatenate([found[1] for found in rows])
    found = measure_moments(parts, metrics)
    row = row.measured("values", measure_values(_kept(values, here, width), found, metrics, []))
    if counts is not None:
        words, kept = f"select({len(here)} of {counts.size} rows)", (len(here), width)
        row = row._replace(reference_recipe=words, candidate_recipe=words)
        row = row._replace(reference_shape=kept, candidate_shape=kept)
    every = _elements(values, here, width) if elements else None
    nan = min(sum(part.r_nan for part in parts), sum(part.c_nan for part in parts))
    return Figures(row, counts, abs_diff, cos_sim, every, nan)


def _count(shape: tuple[int, ...], width: int) -> int:
    return math.prod(shape) // width if width else 0


def _values(pair: Pair, reference: Bytes, candidate: Bytes) -> ValuePair:
    ours, theirs = DTYPES[pair.reference.dtype], DTYPES[pair.candidate.dtype]
    count = math.prod(pair.reference.shape)
    return ValuePair(
        reference.view(np.dtype(ours.storage)),
        ours,
        candidate.view(np.dtype(theirs.storage)),
        theirs,
        count,
        pair.reference.shape,
    )


def _pass(values: ValuePair) -> Moments:
    """Moments of a stretch of elements: by address, which takes 3 us a row, where the kernel is."""
    if not kernel.takes_addresses():
        return lambda start, stop: values.moments(start, stop, atol=0.0, rtol=0.0)
    ours, theirs = values.reference_dtype, values.candidate_dtype
    here, there = values.reference.ctypes.data, values.candidate.ctypes.data
    wide, thin = ours.bits // 8, theirs.bits // 8

    def moments(start: int, stop: int) -> PairMoments:
        return kernel.pair_moments_at(
            here + start * wide, ours, there + start * thin, theirs, count=stop - start
        )

    return moments


def _rows(values: ValuePair, moments: Moments, places: Places, width: int) -> tuple[F64, F64]:
    """Both figures of every row; narrow rows together, since a call for each would cost more."""
    if width > _NARROW or "float64" in (values.reference_dtype.name, values.candidate_dtype.name):
        return _one_by_one(values, moments, places, width)
    size = max(1, _BLOCK // width)
    found = [
        _together(values, places[at : at + size], width)
        or _one_by_one(values, moments, places[at : at + size], width)
        for at in range(0, len(places), size)
    ]
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


def _one_by_one(values: ValuePair, moments: Moments, places: Places, width: int) -> tuple[F64, F64]:
    abs_diff, cos_sim = np.empty(len(places)), np.empty(len(places))
    for at, place in enumerate(places.tolist()):
        part = moments(place * width, (place + 1) * width)
        if part.one_sided or not part.finite:
            abs_diff[at] = cos_sim[at] = math.nan
            continue
        abs_diff[at] = mean_abs_error(part)
        cos_sim[at] = cosine(part)
        if needs_definition(part):
            cos_sim[at] = cosine_by_definition(
                *_decoded(values, place * width, (place + 1) * width)
            )
    return abs_diff, cos_sim


def _together(values: ValuePair, places: Places, width: int) -> tuple[F64, F64] | None:
    """The same, of finite rows at once, by the formulas of `derivation`; None if not all are."""
    flat = _kept(values, places, width).decoded()
    ours, theirs = (side.reshape(-1, width) for side in flat)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return None
    error = theirs - ours
    rr, cc, ee, rc = (
        np.einsum("ij,ij->i", one, other)
        for one, other in ((ours, ours), (theirs, theirs), (error, error), (ours, theirs))
    )
    here, there = np.sqrt(rr), np.sqrt(cc)
    with np.errstate(divide="ignore", invalid="ignore"):
        near = 1.0 - np.maximum((ee - (here - there) ** 2) / (2.0 * here * there), 0.0)
        far = np.clip(rc / here / there, -1.0, 1.0)
    cos_sim: F64 = np.array(np.where(ee < 0.5 * rr, near, far), np.float64)
    no_angle = (rr == 0.0) | (cc == 0.0)
    cos_sim[no_angle] = (rr == cc)[no_angle]
    return np.abs(error).mean(axis=1), cos_sim


@cache
def _threads() -> int:
    """Cores that may be used here; more than a few wait for Python's lock."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return min(8, len(usable(0)) if usable is not None else os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="driftline-rows")


@contextmanager
def _helped(share: int) -> Generator[Each]:
    """Something like `map`, done by several threads if there is enough to do."""
    if share == 1:
        yield lambda act, things: [act(thing) for thing in things]
    else:
        yield lambda act, things: list(_pool().map(act, things))


def _shared(places: Places, share: int) -> list[Places]:
    size = -(-len(places) // share)
    return [places[at : at + size] for at in range(0, len(places), size)]


def _stretches(places: Places, width: int) -> list[tuple[int, int]]:
    """Elements of consecutive rows as (first, last + 1): a prompt's real tokens lie together."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    firsts = places[np.concatenate(([0], breaks))] * width
    lasts = (places[np.concatenate((breaks - 1, [len(places) - 1]))] + 1) * width
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _kept(values: ValuePair, places: Places, width: int) -> ValuePair:
    """The rows that count by themselves; looked into only by metrics that want every value."""
    if len(places) * width == values.count:
        return values
    ours = values.reference.reshape(-1, width)[places].reshape(-1)
    theirs = values.candidate.reshape(-1, width)[places].reshape(-1)
    return values._replace(reference=ours, candidate=theirs, count=len(ours), shape=None)


def _decoded(values: ValuePair, start: int, stop: int) -> tuple[F64, F64]:
    """Both sides of a stretch, without what is non-finite alike on both."""
    part = values._replace(
        reference=values.reference[start:stop],
        candidate=values.candidate[start:stop],
        count=stop - start,
    )
    ours, theirs = part.decoded()
    alike = ~np.isfinite(ours) & ((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    return ours[~alike], theirs[~alike]


def _elements(values: ValuePair, places: Places, width: int) -> F64:
    found: list[F64] = []
    for first, last in _stretches(places, width):
        ours, theirs = _decoded(values, first, last)
        with np.errstate(invalid="ignore"):
            found.append(np.abs(theirs - ours))
    return np.concatenate(found)
