# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
"""Read a tensor for the error check: its largest magnitude, counts of special values, its origin.

Host memory is read in place, in any order of strides. A tensor subclass that defines its own values
cannot be read. This file does not judge what it reads.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from driftline.captures.torch import tensors as snapshots
from driftline.captures.torch.operators.dispatch import has_values
from driftline.numerics.dtypes import PATTERNS, Pattern
from driftline.numerics.peaks import peak_at, tally_at

_BY_DTYPE: dict[torch.dtype, Pattern | None] = {}
# Positions have at least so many elements, which are multiples of 1/64.
_FEW, _FRACTION = 16, 64
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Reading(NamedTuple):
    """Counts of the special values in one tensor.

    If only the extremes are known (on a device), a count of 1 means "at least one".

    Attributes:
        pattern: Its element format.
        elements: Number of elements; a complex one counts as two.
        peak: The largest magnitude; NaN or infinity if there is one.
        nan: Number of NaN.
        pos_inf: Number of positive infinities.
        neg_inf: Number of negative infinities.
        top: Number of elements equal to the format's largest value.
        bottom: Number of elements equal to the format's lowest value.
        zero: Number of zeros; -1 if not counted.
        subnormal: Number of subnormal numbers; -1 if not counted.
    """

    pattern: Pattern
    elements: int
    peak: float
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    top: int = 0
    bottom: int = 0
    zero: int = -1
    subnormal: int = -1

    @property
    def infinite(self) -> int:
        return self.pos_inf + self.neg_inf

    @property
    def nonfinite(self) -> int:
        return self.nan + self.pos_inf + self.neg_inf


UNREAD = Reading(PATTERNS["float32"], 0, 0.0)
"""The reading of a tensor that is always finite, in which nothing was counted."""


def pattern_of(dtype: torch.dtype) -> Pattern | None:
    """The format of an element type; None for types that are always finite."""
    # Handling an exception is cheaper than a test, because the key exists after the first call.
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        pattern = _BY_DTYPE[dtype] = PATTERNS.get(str(dtype).removeprefix("torch."))
        return pattern


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The ordinary strided tensor that holds the values; None if they cannot be read."""
    if type(tensor) not in _ORDINARY:
        if not has_values(tensor):
            return None
        inner = snapshots._plain(tensor)
        if isinstance(inner, snapshots.Refusal | snapshots.Pending):
            return None
        tensor = inner[0]
    if tensor.is_nested:
        tensor = tensor.values()  # the values of all its parts, one after the other
    elif tensor.layout is not torch.strided:
        if tensor.layout is torch._mkldnn:  # pyright: ignore
            return None
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_quantized or not has_values(tensor):
        return None
    return tensor


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; empty for a nested tensor, which has several."""
    return () if tensor.is_nested else tuple(tensor.shape)


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(slot, tensor) of each tensor in an argument or a result."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from tensors_in(part, f"{name}.{index}" if name else str(index))


def peak(tensor: torch.Tensor, pattern: Pattern) -> int:
    """The largest magnitude pattern of a plain host tensor with elements."""
    address, owner = _where(tensor)
    largest = peak_at(address, tensor.numel(), pattern) if address else 0
    # If a tensor was copied, the copy has to be kept until its memory has been read.
    del owner
    return largest


def read(tensor: torch.Tensor, pattern: Pattern) -> Reading:
    """Count all special values in a plain host tensor."""
    count = tensor.numel() * pattern.reals
    if not count:
        return Reading(pattern, 0, 0.0, zero=0, subnormal=0)
    address, owner = _where(tensor)
    if not address:
        return Reading(pattern, 0, 0.0, zero=0, subnormal=0)
    largest = pattern.value(peak_at(address, tensor.numel(), pattern))
    tally = tally_at(address, tensor.numel(), pattern)
    del owner
    return Reading(
        pattern,
        count,
        largest,
        tally.nan,
        tally.pos_inf,
        tally.neg_inf,
        tally.top,
        tally.bottom,
        tally.zero,
        tally.subnormal,
    )


def from_extremes(pattern: Pattern, count: int, low: float, high: float) -> Reading:
    """A reading from the smallest and the largest element; both are NaN if any element is."""
    if low != low or high != high:
        return Reading(pattern, count, float("nan"), nan=1)
    infinite = float("inf")
    return Reading(
        pattern,
        count,
        max(abs(low), abs(high)),
        pos_inf=int(high == infinite),
        neg_inf=int(low == -infinite),
        top=int(high == pattern.largest),
        bottom=int(low == -pattern.largest),
    )


def is_mask(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a tensor is a mask of zeros and ones, or positions: 16 or more multiples of 1/64.

    If the logarithm of such a tensor is taken, its zeros are intended. Zeros alone are no mask. The
    result is a tensor on the same device, so that the program does not wait for the device.
    """
    ones = tensor == 1
    # Zeros and ones, with at least one 1.
    mask = ones.any() & (ones | (tensor == 0)).all()
    if tensor.numel() < _FEW or tensor.is_complex():
        return mask
    # A power of two: the product is exact, or infinite where the number was whole anyway.
    steps = tensor * _FRACTION
    return mask | ((tensor != 0).any() & (steps == steps.round()).all() & (tensor >= 0).all())


def _where(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Address at which all values are without gaps, in any order, and the tensor that owns them."""
    if not tensor.is_contiguous():
        span = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # Strides of any order cover a gapless block when they span as many places as elements.
            span += (size - 1) * stride
        if span != tensor.numel():  # there are gaps, whose contents do not belong to the tensor
            tensor = tensor.contiguous()
    return tensor.data_ptr(), tensor


# Origins: facts about memory that contains values which are not finite.


T = TypeVar("T")


class Origin(enum.IntEnum):
    """The origin of values in a tensor that are not finite.

    UNKNOWN: No observed operator made them: weights, data, a compiled region.
    RAW: The memory was allocated but not completely written, so they have no meaning.
    RECEIVED: A collective wrote them: another rank made them, or the sum of all ranks.
    MEANT: They are intended: a mask, a constant.
    ALLOWED: They are the consequence of an operator that the user allows to make them.
    MADE: They are the consequence of a finding.
    """

    UNKNOWN = 0
    RAW = 1
    RECEIVED = 2
    MEANT = 3
    ALLOWED = 4
    MADE = 5


class ByStorage(Generic[T]):
    """Values that are remembered for storages, as long as these live."""

    def __init__(self) -> None:
        # The key is the id of the storage, because storages cannot be dictionary keys.
        self._known: dict[int, tuple[Any, T]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: torch.Tensor) -> T | None:
        entry = self._known.get(id(tensor.untyped_storage())) if self._known else None
        return entry[1] if entry is not None else None

    def put(self, tensor: torch.Tensor, what: T) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        before = self._known.get(key)
        ref = before[0] if before else weakref.ref(storage, functools.partial(self._gone, key))
        self._known[key] = (ref, what)

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor.untyped_storage()), None)

    def _gone(self, key: int, _: Any) -> None:
        self._known.pop(key, None)


class Origins(ByStorage[Origin]):
    """The origins of values in host memory that are not finite."""

    def of(self, tensor: torch.Tensor) -> Origin:
        return self.get(tensor) or Origin.UNKNOWN

    def add(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Remember an origin; a storage keeps the largest one that was added to it."""
        if origin > self.of(tensor):
            self.put(tensor, origin)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Forget the origin if a tensor with new, finite values covers all of its storage."""
        if is_whole(tensor):
            self.forget(tensor)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers all of its storage."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
