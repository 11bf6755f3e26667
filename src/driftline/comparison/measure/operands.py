"""The stored values of two tensors: from stored bytes to the measurements of the pair.

The kernel reads the bytes as they are in the file, without a copy; large tensors are read by
blocks. Only metrics that the kernel's pass does not provide need the values as float64 arrays.
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


class ValuePair(NamedTuple):
    """The stored values of both sides, and the number of their elements.

    Attributes:
        reference: Flat storage values, as `Run.raw` returns them.
        reference_dtype: Their dtype.
        count: Number of logical elements on each side.
        shape: The tensor's shape; None if the values are a sample.
    """

    reference: Storage
    reference_dtype: DType
    candidate: Storage
    candidate_dtype: DType
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - `count` hides an unused method
    shape: tuple[int, ...] | None

    def moments(self, start: int, stop: int, *, atol: float, rtol: float) -> PairMoments:
        """Return the moments of a block, measured in one pass."""
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
        """Whether it is a matrix whose transpose has the same shape."""
        return _is_square(self.shape)

    def arrays(self) -> ValuePair:
        """Return the pair itself, because it already holds arrays."""
        return self

    def decoded(self) -> tuple[F64, F64]:
        """Both sides as flat float64, mask sentinels as -inf; complex numbers are two reals."""
        return (
            _decoded(self.reference, self.reference_dtype, self.count),
            _decoded(self.candidate, self.candidate_dtype, self.count),
        )


class MappedPair(NamedTuple):
    """The values of two tensors in mapped files, measured in place without an array.

    Attributes:
        reference: Address of the reference's values.
        reference_dtype: Their dtype.
        count: Number of logical elements on each side.
        shape: The tensor's shape.
        arrays: Opens the same values as arrays, for metrics that need them.
    """

    reference: Memory
    reference_dtype: DType
    candidate: Memory
    candidate_dtype: DType
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - `count` hides an unused method
    shape: tuple[int, ...]
    arrays: Callable[[], ValuePair]

    def moments(self, start: int, stop: int, *, atol: float, rtol: float) -> PairMoments:
        """Return the moments of a block, measured in one pass; blocks start at even elements."""
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
    reference: Run, reference_record: Record, candidate: Run, candidate_record: Record
) -> ValuePair | MappedPair:
    """Return the stored values of a pair, in mapped files if that is possible.

    Raises:
        DriftlineError: The values of a side cannot be read, or the samples share no elements.
    """
    if reference_record.kept == candidate_record.kept == "full" and kernel.takes_addresses():
        arrays = partial(open_arrays, reference, reference_record, candidate, candidate_record)
        # The kernel reads mapped pages by address, without a copy and without a numpy array.
        mapped = _mapped(
            reference.memory(reference_record),
            reference_record,
            candidate.memory(candidate_record),
            candidate_record,
            arrays,
        )
        if mapped is not None:
            return mapped
    return open_arrays(reference, reference_record, candidate, candidate_record)


def open_window(
    reference: Run, candidate: Run, pair: Pair, start: int, stop: int
) -> ValuePair | MappedPair:
    """Return the same for a pair of which only elements `start` to `stop` will be read.

    Raises:
        DriftlineError: The values of a side cannot be read.
    """
    reference_record, candidate_record = pair.reference, pair.candidate
    if reference_record.kept == candidate_record.kept == "full" and kernel.takes_addresses():
        reference_memory = reference.window(
            reference_record, *_bytes(reference_record, start, stop)
        )
        candidate_memory = candidate.window(
            candidate_record, *_bytes(candidate_record, start, stop)
        )
        arrays = partial(open_arrays, reference, reference_record, candidate, candidate_record)
        mapped = _mapped(
            reference_memory, reference_record, candidate_memory, candidate_record, arrays
        )
        if mapped is not None:
            return mapped
    return open_arrays(reference, reference_record, candidate, candidate_record)


def _bytes(record: Record, start: int, stop: int) -> tuple[int, int]:
    """Return the (start, stop) bytes of some elements, of which the first has an even index."""
    dtype = DTYPES[record.dtype]
    return start * dtype.bits // 8, dtype.byte_count(stop)


def _mapped(
    reference_memory: Memory | None,
    reference_record: Record,
    candidate_memory: Memory | None,
    candidate_record: Record,
    arrays: Callable[[], ValuePair],
) -> MappedPair | None:
    reference_dtype, candidate_dtype = (
        DTYPES[reference_record.dtype],
        DTYPES[candidate_record.dtype],
    )
    count = math.prod(reference_record.shape)
    # A file that was cut after its index was written must not be read beyond its end.
    if (
        reference_memory is None
        or candidate_memory is None
        or reference_memory.length < reference_dtype.byte_count(count)
        or candidate_memory.length < candidate_dtype.byte_count(count)
    ):
        return None
    return MappedPair(
        reference_memory,
        reference_dtype,
        candidate_memory,
        candidate_dtype,
        count,
        reference_record.shape,
        arrays,
    )


def open_arrays(
    reference: Run, reference_record: Record, candidate: Run, candidate_record: Record
) -> ValuePair:
    """Return the stored values of a pair; samples are reduced to their common elements.

    Raises:
        DriftlineError: The values of a side cannot be read, or the samples share no elements.
    """
    reference_dtype, candidate_dtype = (
        DTYPES[reference_record.dtype],
        DTYPES[candidate_record.dtype],
    )
    # Equal digests do not replace reading: they describe the captured bytes, not those on disk.
    reference_values, candidate_values = (
        reference.raw(reference_record),
        candidate.raw(candidate_record),
    )
    elements = math.prod(reference_record.shape)
    if reference_record.kept == candidate_record.kept == "full":
        return ValuePair(
            reference_values,
            reference_dtype,
            candidate_values,
            candidate_dtype,
            elements,
            reference_record.shape,
        )
    reference_stride = reference_record.sample_stride if reference_record.kept == "sample" else 1
    candidate_stride = candidate_record.sample_stride if candidate_record.kept == "sample" else 1
    # Elements that both sides have: every nth, where n is a multiple of both strides.
    common = math.lcm(reference_stride, candidate_stride)
    reference_values = _thinned(reference_values, reference_dtype, common // reference_stride)
    candidate_values = _thinned(candidate_values, candidate_dtype, common // candidate_stride)
    return ValuePair(
        reference_values,
        reference_dtype,
        candidate_values,
        candidate_dtype,
        -(-elements // common),
        None,
    )


def measure_moments(moments: Sequence[PairMoments], metrics: Sequence[Metric]) -> dict[str, Number]:
    """Return the measurements that the kernel's pass provides."""
    total = moments[0] if len(moments) == 1 else merge_moments(moments)
    measured: dict[str, Number] = {}
    others = metrics
    # One call gives all standard metrics; the others are derived one by one.
    if metrics[:_USUAL] == STANDARD:
        measured = standard(total)
        others = metrics[_USUAL:]
    for metric in others:
        if metric.derive is not None and (value := metric.derive(total)) is not None:
            measured[metric.column.name] = value
    if needs_definition(total):
        measured["_scaled"] = 1  # removed again by `measure_values`
    return measured


def measure_values(
    pair: ValuePair | MappedPair,
    measured: dict[str, Number],
    metrics: Sequence[Metric],
    notes: list[str],
) -> dict[str, Number]:
    """Complete the measurements with those that need all values at once.

    If a user's function raises an exception, its value is NaN and `notes` gets a sentence.
    """
    wanted = [metric for metric in metrics if metric.derive is None]
    if measured.pop("_scaled", 0):
        # A sum overflowed float64, so metrics of sums use their definitions, which scale first.
        wanted += [
            metric
            for name in measured
            if (metric := KNOWN.get(name)) is not None and metric.definition is not None
        ]
    if not wanted:
        return measured
    reference, candidate = pair.decoded()
    finite = np.isfinite(reference) & np.isfinite(candidate)
    finite_reference, finite_candidate = (
        (reference, candidate) if finite.all() else (reference[finite], candidate[finite])
    )
    for metric in wanted:
        reference_values, candidate_values = finite_reference, finite_candidate
        if metric.whole:
            reference_values, candidate_values = _shaped(reference, pair), _shaped(candidate, pair)
        if metric.function is None:
            measured[metric.name] = metric.define()(reference_values, candidate_values)
            continue
        try:
            # Users' functions get copies, so that their writes cannot affect the next metric.
            measured[metric.name] = float(
                metric.function(reference_values.copy(), candidate_values.copy())
            )
        except (Exception, SystemExit) as trouble:
            # A failing metric must not hide the results of the others; NaN satisfies no limit.
            measured[metric.name] = math.nan
            notes.append(f"the metric '{metric.name}' failed: {type(trouble).__name__}: {trouble}")
    return measured


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
        # Attention masks use the lowest value of a format for minus infinity.
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
        # Two codes share a byte, so single codes cannot be selected without unpacking.
        raise BadInput(f"samples of packed {dtype.name} with different strides share no bytes")
    return np.ascontiguousarray(values[::stride])
