# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
"""Contents of a tensor, read cheaply: its largest magnitude, counts where they matter, its origin.

Reads host memory where it is, whatever the order of its strides; a tensor that decides itself
what its values are cannot be read here. Does not judge.
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
# Fewer whole numbers can be anything; positions come in larger numbers, in 64ths at most.
_FEW, _FRACTION = 16, 64
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Reading(NamedTuple):
    """What was seen of one tensor.

    Attributes:
        pattern: Its element format.
        elements: How many; reals, for complex ones.
        peak: The largest magnitude; NaN or infinity where there is one.
        nan: How many NaN.
        pos_inf: How many +infinities.
        neg_inf: How many -infinities.
        top: How many at the format's largest value.
        bottom: How many at its lowest.
        zero: How many zeros; -1 where nobody counted.
        subnormal: How many numbers below the normal ones; -1 where nobody counted.

    Where only extremes are known (on a device), a count of 1 means "at least one".
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
"""Of a tensor that is always finite: nothing was counted."""


def pattern_of(dtype: torch.dtype) -> Pattern | None:
    """The format of an element type; None for those that are always finite."""
    # An exception is cheaper than a test here: after the first call the key is always there.
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        pattern = _BY_DTYPE[dtype] = PATTERNS.get(str(dtype).removeprefix("torch."))
        return pattern


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The ordinary strided tensor that holds the values; None where nothing can be seen."""
    if type(tensor) not in _ORDINARY:
        if not has_values(tensor):
            return None
        inner = snapshots._plain(tensor)
        if isinstance(inner, snapshots.Refusal | snapshots.Pending):
            return None
        tensor = inner[0]
    if tensor.is_nested:
        tensor = tensor.values()  # what all its parts hold, one after the other
    elif tensor.layout is not torch.strided:
        if tensor.layout is torch._mkldnn:  # pyright: ignore
            return None
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_quantized or not has_values(tensor):
        return None
    return tensor


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape; none for a nested tensor, which has several."""
    return () if tensor.is_nested else tuple(tensor.shape)


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an argument or a result, named as operators' slots are."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from tensors_in(part, f"{name}.{index}" if name else str(index))


def peak(tensor: torch.Tensor, pattern: Pattern) -> int:
    """The largest magnitude pattern of a plain host tensor with elements."""
    address, owner = _where(tensor)
    largest = peak_at(address, tensor.numel(), pattern) if address else 0
    # The copy of a tensor with gaps has to live until its memory has been read.
    del owner
    return largest


def read(tensor: torch.Tensor, pattern: Pattern) -> Reading:
    """Everything that can be counted in a plain host tensor."""
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
    """What the smallest and the largest element tell; both are NaN if any element is."""
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
    """Whether it is a mask of zeros and ones, or positions: sixteen simple fractions or more.

    The logarithm of either is taken for the sake of the others; zeros alone may be anybody's. The
    answer is a tensor where the values are, because a device is not waited for.
    """
    ones = tensor == 1
    # Zeros and ones, with at least one of them.
    mask = ones.any() & (ones | (tensor == 0)).all()
    if tensor.numel() < _FEW or tensor.is_complex():
        return mask
    # A power of two: the product is exact, or infinite where the number was whole anyway.
    steps = tensor * _FRACTION
    return mask | ((tensor != 0).any() & (steps == steps.round()).all() & (tensor >= 0).all())


def _where(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Where the values are one after the other, in whatever order, and who keeps them there."""
    if not tensor.is_contiguous():
        span = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # Strides of any order cover a gapless block when they span as many places as elements.
            span += (size - 1) * stride
        if span != tensor.numel():  # there are gaps, and nobody's values in them
            tensor = tensor.contiguous()
    return tensor.data_ptr(), tensor


# Origins: what is known of memory that holds more than finite numbers.


T = TypeVar("T")


class Origin(enum.IntEnum):
    """Where what is not finite in a tensor came from.

    UNKNOWN: no operator that was seen made it: weights, data, a compiled region.
    RAW: the memory was allocated and never wholly written: whatever stands there means nothing.
    RECEIVED: a collective put it there: another rank made it, or the sum of all.
    MEANT: somebody wanted it: a mask, a constant.
    ALLOWED: it is the consequence of an operator that the user allows to make it.
    MADE: it is the consequence of a finding.
    """

    UNKNOWN = 0
    RAW = 1
    RECEIVED = 2
    MEANT = 3
    ALLOWED = 4
    MADE = 5


class ByStorage(Generic[T]):
    """Something to remember of storages, for as long as they live."""

    def __init__(self) -> None:
        # By id of the storage with a weak reference, because storages cannot be dictionary keys.
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
    """Where what is not finite in host memory came from."""

    def of(self, tensor: torch.Tensor) -> Origin:
        return self.get(tensor) or Origin.UNKNOWN

    def add(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Remember it; the worst that was written to a storage stays true of it."""
        if origin > self.of(tensor):
            self.put(tensor, origin)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """All values of a tensor are new and finite; its storage may hold more than the tensor."""
        if is_whole(tensor):
            self.forget(tensor)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
