"""Two outputs of one layer, row by row: mean |difference| and cosine over the last dimension.

The figures are the project's own (`mean_abs_error`, `cosine`), of each row. Elements that are
non-finite alike on both sides are left out; a row with one that is so on one side only, or with no
finite element, is NaN: nothing is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.metrics.derivation import cosine, mean_abs_error, needs_definition
from driftline.comparison.metrics.direction import cosine as cosine_by_definition
from driftline.comparison.row import Row
from driftline.comparison.unmeasured import clash, paired
from driftline.comparison.values import ValuePair, measure_moments, measure_values
from driftline.decoding.counted_rows import Mask
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.moments import PairMoments

F64 = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Figures(NamedTuple):
    """One output of one call of one layer.

    Attributes:
        row: The whole output as a row of a comparison table, pads left out; its key says where.
        counts: Which rows count, [shape without its last axis]; None: all.
        abs_diff: Mean |difference| of each row that counts.
        cos_sim: Cosine of each row that counts.
        elements: |difference| of every element of those rows; None unless asked for.
    """

    row: Row
    counts: Mask | None
    abs_diff: F64
    cos_sim: F64
    elements: F64 | None


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
    if trouble := clash(pair):
        row = row._replace(status="incomparable", reason=trouble)
        return Figures(row, counts, NOTHING, NOTHING, None)
    shape = pair.reference.shape
    width = shape[-1] if shape else 1
    values = _values(pair, reference, candidate)
    here = np.flatnonzero(counts) if counts is not None else np.arange(_rows(shape, width))
    if not width or not len(here):
        row = row._replace(status="incomparable", reason="it has no element that counts")
        return Figures(row, counts, NOTHING, NOTHING, None)
    moments = _pass(values)
    abs_diff, cos_sim = np.empty(len(here)), np.empty(len(here))
    for at, place in enumerate(here.tolist()):
        part = moments(place * width, (place + 1) * width)
        if part.one_sided or not part.finite:
            abs_diff[at] = cos_sim[at] = math.nan
            continue
        abs_diff[at] = mean_abs_error(part)
        cos_sim[at] = cosine(part)
        if needs_definition(part):
            cos_sim[at] = _cosine(values, place * width, (place + 1) * width)
    parts = [moments(first * width, last * width) for first, last in _stretches(here)]
    found = measure_moments(parts, metrics)
    row = row.measured("values", measure_values(_kept(values, here, width), found, metrics, []))
    if counts is not None:
        words, kept = f"select({len(here)} of {counts.size} rows)", (len(here), width)
        row = row._replace(reference_recipe=words, candidate_recipe=words)
        row = row._replace(reference_shape=kept, candidate_shape=kept)
    every = _elements(values, here, width) if elements else None
    return Figures(row, counts, abs_diff, cos_sim, every)


def _rows(shape: tuple[int, ...], width: int) -> int:
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


def _pass(values: ValuePair) -> Callable[[int, int], PairMoments]:
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


def _stretches(places: np.ndarray[Any, np.dtype[np.intp]]) -> list[tuple[int, int]]:
    """Consecutive places as (first, last + 1): a prompt's real tokens lie together."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    firsts = places[np.concatenate(([0], breaks))]
    lasts = places[np.concatenate((breaks - 1, [len(places) - 1]))] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _kept(values: ValuePair, places: np.ndarray[Any, Any], width: int) -> ValuePair:
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


def _cosine(values: ValuePair, start: int, stop: int) -> float:
    return cosine_by_definition(*_decoded(values, start, stop))


def _elements(values: ValuePair, places: np.ndarray[Any, Any], width: int) -> F64:
    found: list[F64] = []
    for first, last in _stretches(places):
        ours, theirs = _decoded(values, first * width, last * width)
        with np.errstate(invalid="ignore"):
            found.append(np.abs(theirs - ours))
    return np.concatenate(found)
