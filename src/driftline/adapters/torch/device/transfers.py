"""Whole tensors on their way to the host: cloned at once, copied beside the program's work.

The clone is made in the program's own queue, so an operation that writes in place comes after it.
Clones are gathered and copied to pinned memory by another queue. While more bytes of them wait than
the budget of the device allows, tensors are copied without a clone instead, in the program's queue:
then the device waits for the copy, the program does not. Host memory that is used up is another
matter: see `desk.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections import deque

import torch

from driftline.adapters.torch.device.pinned import Region
from driftline.adapters.torch.device.places import Mark, Place

TOGETHER = 16 << 20
"""Bytes of clones that are gathered before they are copied."""


class Parcel:
    """One tensor's bytes on their way into a region of host memory."""

    __slots__ = ("mark", "region")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.mark: Mark | None = None

    def arrived(self) -> bool:
        return self.mark is not None and self.mark.query()


class Transfers:
    """Copies tensors of one device to the host.

    Attributes:
        budget: Bytes of clones that may exist at a time.
        direct: How many tensors were copied without a clone.
    """

    def __init__(self, place: Place, budget: int) -> None:
        self._place = place
        self.budget = budget
        self.direct = 0
        self._gathered: list[tuple[Parcel, torch.Tensor]] = []
        self._gathered_bytes = 0
        self._under_way: deque[tuple[Mark, int, list[torch.Tensor]]] = deque()
        self._alive = 0
        self._stream = 0

    @property
    def waiting(self) -> bool:
        """Whether anything was cloned and is not yet being copied."""
        return bool(self._gathered)

    def take(self, tensor: torch.Tensor, region: Region, *, owned: bool) -> Parcel:
        """Have the bytes of a contiguous tensor copied to a region.

        Args:
            tensor: As it is now; it may change as soon as this returns.
            region: As large as the tensor.
            owned: It is a copy already, and nobody else's.

        Raises:
            torch.OutOfMemoryError: There is no memory for a clone.
        """
        size = region.size
        parcel = Parcel(region)
        if self._gathered and self._stream != self._place.stream():
            self.send()
        if not owned and self._alive + size > self.budget:
            self.send()
            self._bury()
        if not owned and self._alive + size > self.budget:
            self.direct += 1
            parcel.mark = self._place.copy_here([(region.memory, _bytes(tensor))])
            return parcel
        clone = tensor if owned else tensor.clone()
        if not self._gathered:
            self._stream = self._place.stream()
        self._gathered.append((parcel, _bytes(clone)))
        self._gathered_bytes += size
        self._alive += size
        if self._gathered_bytes >= TOGETHER:
            self.send()
            self._bury()
        return parcel

    def send(self) -> None:
        """Start the copies of what was gathered."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        size, self._gathered_bytes = self._gathered_bytes, 0
        mark = self._place.copy_aside([(parcel.region.memory, data) for parcel, data in gathered])
        self._under_way.append((mark, size, [data for _, data in gathered]))
        for parcel, _ in gathered:
            parcel.mark = mark

    def free(self) -> None:
        """Let go of clones whose copies are there; call it when memory is short."""
        self._bury()

    def _bury(self) -> None:
        """Clones are held until their copy is there: the allocator knows nothing of it."""
        while self._under_way and self._under_way[0][0].query():
            _, size, _ = self._under_way.popleft()
            self._alive -= size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes; sizes of 1 confuse `view`."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
