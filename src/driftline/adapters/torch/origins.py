"""What is known of memory that holds more than finite numbers: who meant it, and who did not.

Kept per storage, so that views share it, and only as long as the storage lives: addresses are given
away again, weak references are not. Reads no values.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import enum
import functools
import weakref
from typing import Any, Generic, TypeVar

import torch

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
        self._known: dict[int, tuple[Any, T]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: torch.Tensor) -> T | None:
        found = self._known.get(id(tensor.untyped_storage())) if self._known else None
        return found[1] if found is not None else None

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
