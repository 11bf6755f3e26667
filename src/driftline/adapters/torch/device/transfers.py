"""Whole tensors on their way to the host: copied aside at once, sent beside the program's work.

The copy on the device is made in the program's own queue, so an operation that writes in place
comes after it. Copies lie side by side in crates; another queue copies a crate to pinned memory in
one go. While more bytes of crates exist than the budget of the device allows, tensors are copied to
the host in the program's queue instead: then the device waits for the copy, the program does not.
Host memory that is used up is another matter: see `desk.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import threading
from collections import deque

import torch

from driftline.adapters.torch.device import native
from driftline.adapters.torch.device.pinned import ALIGNMENT, Region
from driftline.adapters.torch.device.places import Mark, Place

CRATE = 64 << 20
"""Bytes of copies that are gathered before they are sent."""
_SHARE = 8
"""A budget is room for so many crates at least, each smaller then."""


class Crate:
    """Copies of tensors, one behind the other, and the region of host memory they go to.

    Attributes:
        mark: Reached when everything in it is there; None while it is open.
    """

    __slots__ = ("_lock", "_out", "at", "mark", "memory", "region", "stream", "used")

    def __init__(self, region: Region, memory: torch.Tensor | None, stream: int) -> None:
        self.region = region
        self.memory = memory
        self.at = 0 if memory is None else memory.data_ptr()
        self.stream = stream
        self.used = 0
        self.mark: Mark | None = None
        self._out = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> Parcel:
        parcel = Parcel(self, self.used, size)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._out += 1
        return parcel

    def parcel_done(self) -> None:
        """Somebody has what he wanted of it. Only after its arrival: nothing is added any more."""
        with self._lock:
            self._out -= 1
            last = not self._out
        if last:
            self.region.give_back()


class Parcel:
    """One tensor's bytes on their way to host memory; say when they are no longer needed."""

    __slots__ = ("_crate", "_offset", "done", "size")

    def __init__(self, crate: Crate, offset: int, size: int) -> None:
        self._crate = crate
        self._offset = offset
        self.size = size
        self.done = crate.parcel_done

    @property
    def mark(self) -> Mark | None:
        return self._crate.mark

    @property
    def address(self) -> int:
        """Where they are, after their arrival."""
        return self._crate.region.memory.data_ptr() + self._offset


class Transfers:
    """Copies tensors of one device to the host.

    Attributes:
        budget: Bytes of crates that may exist on the device at a time.
        direct: How many tensors were copied without one.
    """

    def __init__(self, place: Place, budget: int) -> None:
        self._place = place
        self.budget = budget
        self.direct = 0
        self._open: Crate | None = None
        self._under_way: deque[Crate] = deque()
        self._alive = 0
        driver = native.driver() if place.index >= 0 else None
        self._copy = driver.copy if driver is not None else None
        self._context = native.context_of(place.index)

    @property
    def waiting(self) -> bool:
        """Whether anything was copied aside and is not yet on its way."""
        return self._open is not None

    def put(
        self, tensor: torch.Tensor, address: int, size: int, stream: int, *, insist: bool
    ) -> Parcel | None:
        """Copy a contiguous tensor as it is now into the open crate.

        Args:
            tensor: It may change as soon as this returns.
            address: Of its elements.
            size: Bytes of it.
            stream: The current queue.
            insist: Have torch do it where the driver cannot, as for a device that is not the
                current one.

        Returns:
            None if there is no crate with room for it, or something stands in the way.
        """
        crate = self._open
        if crate is None or crate.stream != stream or crate.used + size > crate.region.size:
            return None
        to = crate.used
        if self._copy is None or self._copy(self._context, stream, crate.at + to, address, size):
            if not insist:
                return None
            assert crate.memory is not None
            crate.memory[to : to + size].copy_(_bytes(tensor))
        return crate.add(size)

    def room_for(self, size: int, host_budget: int) -> int:
        """How large the next crate is, for a tensor that has no place; 0 if there can be none."""
        self.send()
        self._bury()
        left = self.budget - self._alive
        usual = min(CRATE, host_budget // _SHARE, self.budget // _SHARE, left)
        return max(size, usual) if size <= left else 0

    def open(self, region: Region) -> None:
        """Begin a crate as large as a region of host memory.

        Raises:
            torch.OutOfMemoryError: There is no memory for it.
        """
        memory = self._place.empty((region.size,), torch.uint8)
        self._open = Crate(region, memory, self._place.stream())
        self._alive += region.size

    def take_direct(self, tensor: torch.Tensor, region: Region) -> Parcel:
        """Have a contiguous tensor copied to a region as large, without a crate."""
        self.direct += 1
        crate = Crate(region, None, 0)
        parcel = crate.add(region.size)
        crate.mark = self._place.copy_here([(region.memory, _bytes(tensor))])
        return parcel

    def send(self) -> None:
        """Start the copy of the open crate."""
        crate, self._open = self._open, None
        if crate is None:
            return
        assert crate.memory is not None
        used = min(crate.used, crate.region.size)
        copies = [(crate.region.memory[:used], crate.memory[:used])]
        crate.mark = self._place.copy_aside(copies, crate.stream)
        self._under_way.append(crate)

    def free(self) -> None:
        """Let go of crates whose copies are there; call it when memory is short."""
        self._bury()

    def _bury(self) -> None:
        """Crates are held until their copy is there: the allocator knows nothing of it."""
        while self._under_way:
            crate = self._under_way[0]
            if crate.mark is not None and not crate.mark.query():
                return
            self._under_way.popleft()
            crate.memory = None
            self._alive -= crate.region.size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes; sizes of 1 confuse `view`."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
