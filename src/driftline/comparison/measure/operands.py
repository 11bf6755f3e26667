"""Two tensors whose values were kept: from stored bytes to the measurements of the pair.

Bytes go to the kernel as they lie in the file, without a copy, block by block for large tensors.
Only metrics that the kernel's pass does not hold need the values as float64 arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.comparison.metrics.catalogue import KNOWN, STANDARD, Metric
from driftline.comparison.metrics.from_moments import needs_definition, standard
from driftline.comparison.table.row import Number
from driftline.errors import BadInput
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType, to_float64
from driftline.numerics.fields import PairMoments, merge_moments
from driftline.runs.records import Record
from driftline.runs.run import Memory, Run

Storage: TypeAlias = "npt.NDArray[Any]"
F64: TypeAlias = "npt.NDArray[np.float64]"

_USUAL = len(STANDARD)
_SCALED = ("relative_l2", "cosine", "projection", "rmse")


class ValuePair(NamedTuple):
    """The stored values of both sides, and how many elements they hold.

    Attributes:
        reference: Flat storage values, as `Run.raw` gives them.
        reference_dtype: What they mean.
        count: Logical elements on each side.
        shape: The tensor's shape; None when the values are a sample of it.
    """

    reference: Storage
    reference_dtype: DType
    candidate: Storage
    candidate_dtype: DType
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    shape: tuple[int, ...] | None

    def moments(self, start: int, stop: int, *, atol: float, rtol: float) -> PairMoments:
        """What one pass over a block knows."""
        return kernel.pair_moments(
            _part(self.reference, self.reference_dtype, start, stop),
            self.reference_dtype,
            _part(self.candidate, self.candidate_dtype, start, stop),
            self.candidate_dtype,
            count=stop - start,
            atol=atol,
            rtol=rtol,
        )

    @property
    def is_square(self) -> bool:
        """Whether it is a matrix that has the same shape when it lies the other way round."""
        return _is_square(self.shape)

    def arrays(self) -> ValuePair:
        """The pair itself: what it holds are arrays."""
        return self

    def decoded(self) -> tuple[F64, F64]:
        """Both sides as flat float64, mask sentinels as -inf; a complex number is two reals."""
        return (
            _decoded(self.reference, self.reference_dtype, self.count),
            _decoded(self.candidate, self.candidate_dtype, self.count),
        )


class MappedPair(NamedTuple):
    """The same of two tensors that lie in mapped files: measured where they are, without an array.

    Attributes:
        reference: Where the reference's values lie.
        reference_dtype: What they mean.
        count: Logical elements on each side.
        shape: The tensor's shape.
        arrays: Opens the same values as arrays, for metrics that need them.
    """

    reference: Memory
    reference_dtype: DType
    candidate: Memory
    candidate_dtype: DType
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    shape: tuple[int, ...]
    arrays: Callable[[], ValuePair]

    def moments(self, start: int, stop: int, *, atol: float, rtol: float) -> PairMoments:
        """What one pass over a block knows; blocks start at even elements."""
        return kernel.pair_moments_at(
            self.reference.address + start * self.reference_dtype.bits // 8,
            self.reference_dtype,
            self.candidate.address + start * self.candidate_dtype.bits // 8,
            self.candidate_dtype,
            count=stop - start,
            atol=atol,
            rtol=rtol,
        )

    @property
    def is_square(self) -> bool:
        """As `ValuePair.is_square`."""
        return _is_square(self.shape)

    def decoded(self) -> tuple[F64, F64]:
        """As `ValuePair.decoded`."""
        return self.arrays().decoded()


def open_values(
    reference: Run, ours: Record, candidate: Run, theirs: Record
) -> ValuePair | MappedPair:
    """The kept values of a pair, as they lie in mapped files where that is enough.

    Raises:
        DriftlineError: The values of a side cannot be read, or the samples share no elements.
    """
    if ours.kept == theirs.kept == "full" and kernel.takes_addresses():
        arrays = partial(open_arrays, reference, ours, candidate, theirs)
        mapped = _mapped(reference.memory(ours), ours, candidate.memory(theirs), theirs, arrays)
        if mapped is not None:
            return mapped
    return open_arrays(reference, ours, candidate, theirs)


def open_window(
    reference: Run, candidate: Run, pair: Pair, start: int, stop: int
) -> ValuePair | MappedPair:
    """The same of a pair of which only the elements from `start` to `stop` will be looked at.

    Raises:
        DriftlineError: The values of a side cannot be read.
    """
    ours, theirs = pair.reference, pair.candidate
    if ours.kept == theirs.kept == "full" and kernel.takes_addresses():
        here = reference.window(ours, *_bytes(ours, start, stop))
        there = candidate.window(theirs, *_bytes(theirs, start, stop))
        arrays = partial(open_arrays, reference, ours, candidate, theirs)
        mapped = _mapped(here, ours, there, theirs, arrays)
        if mapped is not None:
            return mapped
    return open_arrays(reference, ours, candidate, theirs)


def _bytes(record: Record, start: int, stop: int) -> tuple[int, int]:
    """First and last-plus-one byte of some elements, of which the first is an even one."""
    dtype = DTYPES[record.dtype]
    return start * dtype.bits // 8, dtype.byte_count(stop)


def _mapped(
    here: Memory | None,
    ours: Record,
    there: Memory | None,
    theirs: Record,
    arrays: Callable[[], ValuePair],
) -> MappedPair | None:
    our_dtype, their_dtype = DTYPES[ours.dtype], DTYPES[theirs.dtype]
    count = math.prod(ours.shape)
    if (
        here is None
        or there is None
        or here.length < our_dtype.byte_count(count)
        or there.length < their_dtype.byte_count(count)
    ):
        return None
    return MappedPair(here, our_dtype, there, their_dtype, count, ours.shape, arrays)


def open_arrays(reference: Run, ours: Record, candidate: Run, theirs: Record) -> ValuePair:
    """The kept values of a pair; a sample is set against the same elements of the other side.

    Raises:
        DriftlineError: The values of a side cannot be read, or the samples share no elements.
    """
    our_dtype, their_dtype = DTYPES[ours.dtype], DTYPES[theirs.dtype]
    # Equal digests do not spare a read: they say what was captured, not what is on disk today.
    here, there = reference.raw(ours), candidate.raw(theirs)
    elements = math.prod(ours.shape)
    if ours.kept == theirs.kept == "full":
        return ValuePair(here, our_dtype, there, their_dtype, elements, ours.shape)
    our_stride = ours.sample_stride if ours.kept == "sample" else 1
    their_stride = theirs.sample_stride if theirs.kept == "sample" else 1
    common = math.lcm(our_stride, their_stride)
    here = _thinned(here, our_dtype, common // our_stride)
    there = _thinned(there, their_dtype, common // their_stride)
    return ValuePair(here, our_dtype, there, their_dtype, -(-elements // common), None)


def measure_moments(moments: Sequence[PairMoments], metrics: Sequence[Metric]) -> dict[str, Number]:
    """The measurements that the kernel's pass holds."""
    whole = moments[0] if len(moments) == 1 else merge_moments(moments)
    found: dict[str, Number] = {}
    others = metrics
    if metrics[:_USUAL] == STANDARD:
        found = standard(whole)
        others = metrics[_USUAL:]
    for metric in others:
        if metric.derive is not None and (value := metric.derive(whole)) is not None:
            found[metric.column.name] = value
    if needs_definition(whole):
        found["_scaled"] = 1  # taken out again by `measure_values`
    return found


def measure_values(
    pair: ValuePair | MappedPair,
    found: dict[str, Number],
    metrics: Sequence[Metric],
    notes: list[str],
) -> dict[str, Number]:
    """Complete the measurements with those that need every value at once.

    A user's function that raises is NaN, and a sentence in `notes`.
    """
    wanted = [metric for metric in metrics if metric.derive is None]
    if found.pop("_scaled", 0):
        wanted += [KNOWN[name] for name in _SCALED]
    if not wanted:
        return found
    ours, theirs = pair.decoded()
    both = np.isfinite(ours) & np.isfinite(theirs)
    flat_ours, flat_theirs = (ours, theirs) if both.all() else (ours[both], theirs[both])
    for metric in wanted:
        here, there = flat_ours, flat_theirs
        if metric.whole:
            here, there = _shaped(ours, pair), _shaped(theirs, pair)
        if metric.function is None:
            found[metric.name] = metric.define()(here, there)
            continue
        try:
            # Copies for users' functions: nothing they write may reach the next metric.
            found[metric.name] = float(metric.function(here.copy(), there.copy()))
        except (Exception, SystemExit) as trouble:
            # A metric that fails must not hide what the others found; no limit holds for NaN.
            found[metric.name] = math.nan
            notes.append(f"the metric '{metric.name}' failed: {type(trouble).__name__}: {trouble}")
    return found


def _is_square(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) == 2 and shape[0] == shape[1]


def _part(values: Storage, dtype: DType, start: int, stop: int) -> Storage:
    if dtype.bits == 4:
        return values[start // 2 : (stop + 1) // 2]  # blocks start at even elements
    return values[start:stop]


def _decoded(values: Storage, dtype: DType, count: int) -> F64:
    decoded = to_float64(values, dtype, count).reshape(-1)
    if dtype.kind == "complex":
        return decoded.view(np.float64)
    numbers = decoded.astype(np.float64, copy=False)
    if dtype.kind == "float" and dtype.bits >= 16:
        numbers = np.where(numbers == dtype.lowest, -np.inf, numbers)
    return numbers


def _shaped(values: F64, pair: ValuePair | MappedPair) -> F64:
    if pair.shape is None:
        return values
    if pair.reference_dtype.kind == "complex":
        return values.reshape(*pair.shape, 2)
    return values.reshape(pair.shape)


def _thinned(values: Storage, dtype: DType, stride: int) -> Storage:
    if stride == 1:
        return values
    if dtype.bits == 4:
        raise BadInput(f"samples of packed {dtype.name} with different strides share no bytes")
    return np.ascontiguousarray(values[::stride])
