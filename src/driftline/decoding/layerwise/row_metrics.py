"""Two outputs of one layer, row by row: mean |difference| and cosine over the last dimension.

The metrics are the project's own (`mean_abs_error`, `cosine`), computed for each row that belongs
to a token that counts: rows of padding never count, and in later iterations rows of earlier tokens,
which a key-value cache returns in every step, are not counted again. Elements that are non-finite
alike on both sides are left out. A row is NaN if an element is non-finite on one side only, or if
it has no finite element; nothing is replaced.
"""

from __future__ import annotations

import math
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
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments
from driftline.settings import cores

Mask = np.ndarray[Any, np.dtype[np.bool_]]
CACHE = "past_key_values"
F64 = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.intp]]
Moments = Callable[[int, int], PairMoments]
"""Moments of the elements from one place to another."""
Apply = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

_NARROW = 256
"""Elements of a row up to which rows are measured together: 2 us each for 128, not 6."""
_BLOCK = 1 << 16
"""Elements that are measured together; float64 copies of them stay in the cache."""
_FIGURES = ("relative_l2", "cosine", "max_abs_error", "mean_abs_error")
"""The metrics of the table that measure the distance of two outputs."""
_SHARE = 1 << 19
"""The smallest number of elements for which a thread is used."""


class Span(NamedTuple):
    """The text of one call.

    Attributes:
        real: [batch, tokens], True where a token is not padding, from the first to the last token.
        cached: How many tokens the cache held already; the model got the others as input.
        new: The first position that no earlier call has computed.
    """

    real: Mask
    cached: int = 0
    new: int = 0

    @property
    def counts(self) -> Mask:
        """[batch, tokens]: real and new."""
        mask = self.real.copy()
        mask[:, : self.new] = False
        return mask


def token_rows(shape: tuple[int, ...], slot: str, span: Span) -> Mask | None:
    """Which rows count, [shape without its last axis]; None if all do.

    Args:
        shape: Of the output.
        slot: Which output it is: it tells caches from others.
        span: The text.
    """
    lead = shape[:-1]
    everything = span.counts
    cached = len(shape) == 4 and _holds(slot, lead[2], everything.shape[1])
    # A cache with a window holds the last tokens only.
    mask = everything[:, -lead[2] :] if cached else everything[:, span.cached :]
    if mask.all() or not lead:
        return None
    batch, tokens = mask.shape
    if cached:
        return _spread(mask, lead, (2,))
    if len(lead) == 1:
        if lead[0] == batch * tokens:  # tokens of all prompts in one axis
            return mask.reshape(-1)
        return _anywhere(mask)[0] if lead[0] == tokens else None
    axes = tuple(axis for axis in range(1, len(lead)) if lead[axis] == tokens)
    # If an output's shape does not fit the text, its padding is unknown.
    if lead[0] not in (1, batch) or not axes:
        return None
    return _spread(mask, lead, axes)


def is_cache(slot: str) -> bool:
    """Whether an output is part of a key-value cache: transformers say so, fms nests them.

    >>> is_cache("past_key_values.3.0"), is_cache("1.3.0"), is_cache("1.0"), is_cache("1")
    (True, True, True, False)
    """
    parts = slot.split(".")
    return parts[0] == CACHE or (len(parts) >= 2 and all(part.isdigit() for part in parts))


def _holds(slot: str, size: int, tokens: int) -> bool:
    """Whether an output is a cache of so many tokens."""
    if size == tokens:
        return is_cache(slot)
    parts = slot.split(".")
    return 0 < size < tokens and parts[0] == CACHE and parts[-1] in ("0", "1")


def _anywhere(mask: Mask) -> Mask:
    """[1, tokens]: what counts for any prompt."""
    return np.logical_or.reduce(mask, axis=0, keepdims=True)


def _spread(mask: Mask, lead: tuple[int, ...], axes: tuple[int, ...]) -> Mask:
    """The mask at the size of the leading axes; each of `axes` may be that of the tokens.

    Where a shape does not say which of two axes it is, a row counts only if it does either way, so
    that no padding is counted.
    """
    if lead[0] == 1 and mask.shape[0] > 1:  # one for all prompts: counts if it does for any
        mask = _anywhere(mask)
    spread = np.ones(lead, dtype=np.bool_)
    for axis in axes:
        shape = [1] * len(lead)
        shape[0], shape[axis] = mask.shape
        spread &= mask.reshape(shape)
    return spread


class RowMetrics(NamedTuple):
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


def measure_rows(
    pair: Pair,
    reference: Bytes,
    candidate: Bytes,
    counts: Mask | None,
    metrics: tuple[Metric, ...],
    *,
    elements: bool = False,
) -> RowMetrics:
    """Measure one pair of outputs; if it cannot be compared, it has no rows but a reason.

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
        return RowMetrics(row, counts, NOTHING, NOTHING, None)
    shape = pair.reference.shape
    width = shape[-1] if shape else 1
    values = _values(pair, reference, candidate)
    places = np.flatnonzero(counts) if counts is not None else np.arange(_count(shape, width))
    if not width or not len(places):
        row = row._replace(status="incomparable", reason="it has no element that counts")
        return RowMetrics(row, counts, NOTHING, NOTHING, None)
    moments = _moments_of(values)
    pieces = [
        (first + start, first + stop)
        for first, last in _stretches(places, width)
        for start, stop in blocks_of(last - first)
    ]
    share = max(1, min(_threads(), len(places) * width // _SHARE))
    with _threads_for(share) as apply:
        parts = apply(lambda piece: moments(*piece), pieces)
        rows = apply(lambda own: _measure_all(values, moments, own, width), _divided(places, share))
    abs_diff = np.concatenate([part[0] for part in rows])
    cos_sim = np.concatenate([part[1] for part in rows])
    from_moments = measure_moments(parts, metrics)
    counted = _counted(values, places, width)
    row = row.measured("values", measure_values(counted, from_moments, metrics, []))
    if counts is not None:
        # The table says that padding was left out, and what was compared.
        recipe, compared = f"select({len(places)} of {counts.size} rows)", (len(places), width)
        row = row._replace(reference_recipe=recipe, candidate_recipe=recipe)
        row = row._replace(reference_shape=compared, candidate_shape=compared)
    every = _elements(values, places, width) if elements else None
    # What is NaN on one side only is in `one_sided`, and makes its row NaN.
    nan = min(sum(part.r_nan for part in parts), sum(part.c_nan for part in parts))
    if nan:
        # A layer with NaN on both sides does not agree: none of its figures may pass.
        unknown = {name: math.nan for name in _FIGURES if name in row.metrics}
        reason = f"elements that are NaN on both sides: {nan}"
        row = row._replace(metrics={**row.metrics, **unknown}, reason=reason)
    return RowMetrics(row, counts, abs_diff, cos_sim, every, nan)


def _count(shape: tuple[int, ...], width: int) -> int:
    return math.prod(shape) // width if width else 0


def _values(pair: Pair, reference: Bytes, candidate: Bytes) -> ValuePair:
    reference_dtype, candidate_dtype = DTYPES[pair.reference.dtype], DTYPES[pair.candidate.dtype]
    count = math.prod(pair.reference.shape)
    return ValuePair(
        reference.view(np.dtype(reference_dtype.storage)),
        reference_dtype,
        candidate.view(np.dtype(candidate_dtype.storage)),
        candidate_dtype,
        count,
        pair.reference.shape,
    )


def _moments_of(values: ValuePair) -> Moments:
    """Moments of a stretch of elements: by address, which takes 3 us a row, where the kernel is."""
    if not kernel.takes_addresses():
        return lambda start, stop: values.moments(start, stop, atol=0.0, rtol=0.0)
    reference_dtype, candidate_dtype = values.reference_dtype, values.candidate_dtype
    # Addresses stay valid: the caller holds `values` until all rows are measured.
    reference, candidate = values.reference.ctypes.data, values.candidate.ctypes.data
    reference_size, candidate_size = reference_dtype.bits // 8, candidate_dtype.bits // 8

    def moments(start: int, stop: int) -> PairMoments:
        return kernel.pair_moments_at(
            reference + start * reference_size,
            reference_dtype,
            candidate + start * candidate_size,
            candidate_dtype,
            count=stop - start,
        )

    return moments


def _measure_all(
    values: ValuePair, moments: Moments, places: Places, width: int
) -> tuple[F64, F64]:
    """Both metrics of every row; narrow rows together, since a call for each would cost more."""
    # Squares of float64 may leave its range; only rows measured one by one are checked for that.
    if width > _NARROW or "float64" in (values.reference_dtype.name, values.candidate_dtype.name):
        return _one_by_one(values, moments, places, width)
    size = max(1, _BLOCK // width)
    blocks = [places[start : start + size] for start in range(0, len(places), size)]
    parts = [
        _all_at_once(values, block, width) or _one_by_one(values, moments, block, width)
        for block in blocks
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _one_by_one(values: ValuePair, moments: Moments, places: Places, width: int) -> tuple[F64, F64]:
    abs_diff, cos_sim = np.empty(len(places)), np.empty(len(places))
    for index, place in enumerate(places.tolist()):
        part = moments(place * width, (place + 1) * width)
        if part.one_sided or not part.finite:
            abs_diff[index] = cos_sim[index] = math.nan
            continue
        abs_diff[index] = mean_abs_error(part)
        cos_sim[index] = cosine(part)
        # Squares left the range of float64, so the sums say nothing.
        if needs_definition(part):
            cos_sim[index] = cosine_by_definition(
                *_decoded(values, place * width, (place + 1) * width)
            )
    return abs_diff, cos_sim


def _all_at_once(values: ValuePair, places: Places, width: int) -> tuple[F64, F64] | None:
    """The same, of finite rows at once, by the formulas of `derivation`; None if not all are."""
    flat = _counted(values, places, width).decoded()
    reference, candidate = (side.reshape(-1, width) for side in flat)
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        return None
    error = candidate - reference
    rr, cc, ee, rc = (
        np.einsum("ij,ij->i", left, right)
        for left, right in (
            (reference, reference),
            (candidate, candidate),
            (error, error),
            (reference, candidate),
        )
    )
    reference_norm, candidate_norm = np.sqrt(rr), np.sqrt(cc)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Nearly equal rows by their difference: 1 - cosine would cancel in the product.
        near = 1.0 - np.maximum(
            (ee - (reference_norm - candidate_norm) ** 2) / (2.0 * reference_norm * candidate_norm),
            0.0,
        )
        far = np.clip(rc / reference_norm / candidate_norm, -1.0, 1.0)
    cos_sim: F64 = np.array(np.where(ee < 0.5 * rr, near, far), np.float64)
    # A row of zeros has no direction: 1 against another such row, 0 against any other.
    no_angle = (rr == 0.0) | (cc == 0.0)
    cos_sim[no_angle] = (rr == cc)[no_angle]
    return np.abs(error).mean(axis=1), cos_sim


@cache
def _threads() -> int:
    """Cores that may be used here; more than a few wait for Python's lock."""
    return min(8, cores())


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="driftline-rows")


@contextmanager
def _threads_for(share: int) -> Generator[Apply]:
    """Something like `map`, done by several threads if there is enough to do."""
    if share == 1:
        yield lambda measure, pieces: [measure(piece) for piece in pieces]
    else:
        yield lambda measure, pieces: list(_pool().map(measure, pieces))


def _divided(places: Places, share: int) -> list[Places]:
    size = -(-len(places) // share)
    return [places[start : start + size] for start in range(0, len(places), size)]


def _stretches(places: Places, width: int) -> list[tuple[int, int]]:
    """Elements of consecutive rows as (first, last + 1): a prompt's real tokens are together."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    firsts = places[np.concatenate(([0], breaks))] * width
    lasts = (places[np.concatenate((breaks - 1, [len(places) - 1]))] + 1) * width
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _counted(values: ValuePair, places: Places, width: int) -> ValuePair:
    """The rows that count by themselves; looked into only by metrics that want every value."""
    if len(places) * width == values.count:
        return values
    reference = values.reference.reshape(-1, width)[places].reshape(-1)
    candidate = values.candidate.reshape(-1, width)[places].reshape(-1)
    return values._replace(
        reference=reference, candidate=candidate, count=len(reference), shape=None
    )


def _decoded(values: ValuePair, start: int, stop: int) -> tuple[F64, F64]:
    """Both sides of a stretch, without elements that are the same non-finite value on both."""
    part = values._replace(
        reference=values.reference[start:stop],
        candidate=values.candidate[start:stop],
        count=stop - start,
    )
    reference, candidate = part.decoded()
    alike = ~np.isfinite(reference) & (
        (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
    )
    return reference[~alike], candidate[~alike]


def _elements(values: ValuePair, places: Places, width: int) -> F64:
    parts: list[F64] = []
    for first, last in _stretches(places, width):
        reference, candidate = _decoded(values, first, last)
        with np.errstate(invalid="ignore"):
            parts.append(np.abs(candidate - reference))
    return np.concatenate(parts)
