"""Where device tensors are taken in: what becomes of each, and what is done when memory is short.

A tensor is summarised, or cloned and copied, without waiting for the device. Host memory is lent by
a ring; when the sink is slower than the program the ring is used up, and then the program waits, or
the tensor is dropped and counted, as chosen. Memory that cannot be had is never the program's
trouble: what capture holds is let go of, and summaries are kept from then on.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from driftline.adapters.budgets import Budgets
from driftline.adapters.torch.device import graph_watch, launching
from driftline.adapters.torch.device.flights import Flight
from driftline.adapters.torch.device.pinned import Region, Ring
from driftline.adapters.torch.device.places import CudaPlace, HostPlace, Place
from driftline.adapters.torch.device.sheets import Sheet, Tables, kind_of
from driftline.adapters.torch.device.transfers import Parcel, Transfers

LEFT_FREE = 1 / 16
"""Of a device's memory: below it no clones are made, so that the program can have it."""
_LONGEST_WAIT = 3600.0
_CHECK_EVERY = 0.5
DROPPED = "dropped: the run could not be written as fast as the program ran"


class Ticket(NamedTuple):
    """A summary on its way."""

    flight: Flight
    slot: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    width: int


class Device:
    """What capture keeps for one device."""

    def __init__(self, place: Place, budgets: Budgets) -> None:
        self.place = place
        self.tables = Tables(place)
        self.sheets: dict[int, Sheet] = {}
        self.transfers = Transfers(place, budgets.device)
        self.checked = 0.0

    def sheet(self) -> Sheet:
        stream = self.place.stream()
        sheet = self.sheets.get(stream)
        if sheet is None:
            sheet = self.sheets[stream] = Sheet(self.place, self.tables)
        return sheet


class Desk:
    """Takes tensors of devices in.

    Args:
        budgets: Memory that may be used.
        say: Takes the kind and message of an event, each once.

    Attributes:
        dropped: Tensors of which nothing was kept for lack of host memory.
        degraded: Full tensors are no longer kept, only their summaries.
    """

    def __init__(self, budgets: Budgets, say: Callable[[str, str], None]) -> None:
        self.budgets = budgets
        self.dropped = self.dropped_bytes = 0
        self.degraded = False
        self.waited = 0
        self._say = say
        self._devices: dict[int, Device] = {}
        self._ring: Ring | None = None
        self.usable = True
        if why_not := launching.why_not():
            self._do_without(why_not)

    def device_of(self, tensor: torch.Tensor) -> Device:
        index = -1 if tensor.is_cpu else tensor.get_device()
        device = self._devices.get(index)
        if device is None:
            place: Place = HostPlace() if index < 0 else CudaPlace(index)
            if index >= 0:
                graph_watch.watch_memory()
            device = self._devices[index] = Device(place, self.budgets)
        return device

    # --- summaries

    def summarise(self, tensor: torch.Tensor, dtype: str) -> Ticket | None:
        """Have a tensor summarised; None when that is the host's business."""
        kind = kind_of(dtype) if self.usable else None
        count = tensor.numel()
        if kind is None or not count:
            return None
        device = self.device_of(tensor)
        try:
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            if tensor.data_ptr() & 15:  # the kernel reads 16 bytes at a time
                tensor = tensor.clone()
            count *= kind.reals
            flight, slot = device.sheet().take(tensor, kind, count)
        except torch.OutOfMemoryError:
            self._free(device)
            return None
        except launching.CannotLaunch as error:
            self._do_without(str(error))
            return None
        return Ticket(flight, slot, count, kind.width)

    def _do_without(self, why_not: str) -> None:
        """No kernels: whatever is summarised is copied to the host for it."""
        self.usable = False
        self._say("device-path", f"tensors of devices are copied one by one, slowly: {why_not}")

    # --- whole tensors

    def carry(
        self, tensor: torch.Tensor, size: int, progress: Callable[[], None]
    ) -> Parcel | str | None:
        """Have a tensor's bytes copied to the host.

        Args:
            tensor: On a device.
            size: Bytes of it.
            progress: Called before anything is waited for: what was taken so far must go its way.

        Returns:
            The parcel; why it was dropped; or None when only its summary can be kept.
        """
        device = self.device_of(tensor)
        transfers, stream = device.transfers, device.place.stream()
        try:
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            address = tensor.data_ptr()
            parcel = transfers.put(tensor, address, size, stream, insist=True)
            if parcel is not None:
                return parcel
            self._leave_room(device)
            crate = transfers.room_for(size, self.budgets.host)
            region = self._lend(device, crate or size, size, progress)
            if isinstance(region, str) or region is None:
                return region
            try:
                if crate:
                    transfers.open(region)
                    parcel = transfers.put(tensor, address, size, stream, insist=True)
                    assert parcel is not None
                    return parcel
                return transfers.take_direct(tensor, region)
            except BaseException:
                region.give_back()
                raise
        except torch.OutOfMemoryError:
            self.out_of_memory(tensor)
            return None

    def every_nth(self, tensor: torch.Tensor, stride: int) -> torch.Tensor | None:
        """A sample of a tensor, side by side; None if there is no memory for it."""
        try:
            return tensor.reshape(-1)[::stride].contiguous()
        except torch.OutOfMemoryError:
            self.out_of_memory(tensor)
            return None

    def _lend(
        self, device: Device, size: int, tensor: int, progress: Callable[[], None]
    ) -> Region | str | None:
        """Host memory of a size for a tensor that has so many bytes of it."""
        ring = self._ring
        if ring is None:
            ring = self._ring = Ring(device.place, self.budgets.host)
        if size > ring.budget:
            self._say(
                "too-large",
                f"tensors beyond the host budget of {ring.budget} bytes are summarised; "
                "--host-budget sets it",
            )
            return None
        try:
            region = ring.lend(size)
            if region is not None:
                return region
            progress()
            if self.budgets.when_full == "wait":
                self.waited += 1
                region = ring.wait_for(size, _LONGEST_WAIT)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # pinning fails with a plain one
            if "memory" not in str(error).lower():
                raise
            ring.free()
            self._degrade("the host has no memory left to pin")
            return None
        if region is None:
            self.dropped += 1
            self.dropped_bytes += tensor
            return DROPPED
        return region

    def _leave_room(self, device: Device) -> None:
        """Now and then, whether the device is nearly full: then no more clones."""
        now = time.monotonic()
        if now < device.checked:
            return
        device.checked = now + _CHECK_EVERY
        place = device.place
        if place.index >= 0:
            total = int(torch.cuda.get_device_properties(place.index).total_memory)
            room = place.room() - int(total * LEFT_FREE)
            device.transfers.budget = max(0, min(self.budgets.device, room))

    # --- sending

    @property
    def waiting(self) -> bool:
        return any(
            device.transfers.waiting or any(sheet.waiting for sheet in device.sheets.values())
            for device in self._devices.values()
        )

    def send(self) -> None:
        """Start the copies of everything that was taken."""
        for device in self._devices.values():
            device.transfers.send()
            for stream, sheet in device.sheets.items():
                if sheet.waiting:
                    with _on(device.place, stream):
                        sheet.send()

    @property
    def pressure(self) -> bool:
        """Whether host memory is so far used up that the sink should not wait for a pause."""
        ring = self._ring
        return ring is not None and ring.lent * 2 > ring.budget

    def out_of_memory(self, tensor: torch.Tensor) -> None:
        """There was no memory for what a tensor needs beside itself: summaries from now on."""
        self._free(self.device_of(tensor))
        self._degrade("the device has no memory left for copies of tensors")

    def _free(self, device: Device) -> None:
        device.transfers.free()
        if device.place.index >= 0:
            torch.cuda.empty_cache()

    def _degrade(self, why: str) -> None:
        if not self.degraded:
            self.degraded = True
            self._say("degraded", f"{why}: from here on summaries are kept instead")

    def report(self, event: Callable[..., None]) -> None:
        """Say what was dropped, and how often the program waited."""
        if self.dropped:
            event(
                "dropped",
                f"{self.dropped} tensors ({self.dropped_bytes} bytes) were dropped: the run could "
                "not be written as fast as the program ran",
                tensors=self.dropped,
                bytes=self.dropped_bytes,
            )
        if self.waited:
            event(
                "waited",
                f"the program waited {self.waited} times for the run to be written",
                times=self.waited,
            )

    @property
    def is_sound(self) -> bool:
        """Whether every device in use still answers."""
        return all(device.place.is_sound() for device in self._devices.values())

    def close(self) -> None:
        """Nothing comes any more: give host memory back, as long as the device can be asked."""
        self._ring = None

    def memory_wanted(self) -> None:
        """The program itself has no memory left: let go of all that can be had."""
        for device in self._devices.values():
            device.transfers.budget = 0
            device.checked = float("inf")
            device.transfers.free()


def _on(place: Place, stream: int) -> Any:
    """Work of this thread goes to a queue of a device meanwhile."""
    if stream == place.stream() or not isinstance(place, CudaPlace):
        return nullcontext()
    return torch.cuda.stream(place.queue(stream))
