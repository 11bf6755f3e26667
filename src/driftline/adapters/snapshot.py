"""What adapters say of a tensor they looked at: its bytes, or why it has none that can be stored.

How a tensor of a framework is looked at is the adapter's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES
from driftline.numerics.kernel import bytes_at

Bytes = npt.NDArray[np.uint8]


class Snapshot(NamedTuple):
    """One tensor's description and, unless only described, its bytes in C order.

    Attributes:
        address: Where its bytes are, possibly in live memory.
        length: How many bytes; negative when only the description was wanted.
        elements: How many, logically.
        placement: For a shard: how the whole lies over its ranks.
        owner: Keeps the memory alive.
    """

    dtype: str
    shape: tuple[int, ...]
    address: int
    length: int
    device: str
    device_index: int | None
    elements: int
    placement: str
    owner: Any

    @property
    def data(self) -> Bytes | None:
        """The flat bytes, not copied; None when only the description was wanted."""
        return bytes_at(self.address, self.length) if self.length >= 0 else None


class Refusal(NamedTuple):
    """Why a tensor cannot be stored, as the end of the sentence "not stored: ..."."""

    reason: str


class Pending(NamedTuple):
    """A tensor that has no values yet: the result of a collective that may still be under way.

    Attributes:
        when_there: Called with a function, hands it the tensor with its values, now or later.
        placement: As in a snapshot.
    """

    when_there: Callable[[Callable[[Any], None]], None]
    placement: str


def every_nth(shot: Snapshot, stride: int) -> Bytes:
    """The bytes of elements 0, stride, 2*stride, ... of a snapshot."""
    data = shot.data
    assert data is not None
    width = DTYPES[shot.dtype].bits
    if stride == 1:
        return data
    if width < 8:  # two elements a byte: a sample of bytes is a sample of pairs, so unpack first
        codes = np.stack((data & 0x0F, data >> 4), axis=1).reshape(-1)[::stride]
        padded = np.append(codes, np.uint8(0)) if codes.size % 2 else codes
        return (padded[0::2] | (padded[1::2] << 4)).astype(np.uint8)
    size = width // 8
    return np.ascontiguousarray(data.reshape(-1, size)[::stride]).reshape(-1)
