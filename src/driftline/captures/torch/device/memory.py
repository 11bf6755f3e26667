# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Memory for capturing device tensors: budgets, a pool of pinned host memory, staging buffers.

`PinnedPool` lends regions of pinned memory. It fills its blocks one after the other, and reuses a
block when all its regions have been returned. `Transfers` copies tensors into staging buffers on
the device, which are sent to the host concurrently with the program's work. `DeviceMemory` decides
how each tensor is captured, and what is done when memory runs short.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from driftline.captures.options import Budgets
from driftline.captures.torch.device.places import Mark, Place, place_of
from driftline.captures.torch.device.summaries import SummaryBatch, SummaryTransfer, Tables, kind_of
from driftline.numerics.gpu import launcher

# Pinning is slow, so it is done in large blocks. The first blocks are smaller, because pinning a
# large one could take longer than a small program runs.
BLOCK, _FIRST_BLOCK, _GROWTH = 128 << 20, 8 << 20, 2
# Alignment of vector loads on host and device.
ALIGNMENT = 64


class _Block:
    __slots__ = ("memory", "out", "size", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size = memory.numel()
        self.used = 0
        self.out = 0


class Region:
    """A region of borrowed memory; it must be returned exactly once."""

    __slots__ = ("_block", "_pool", "memory", "size")

    def __init__(self, pool: PinnedPool, block: _Block, memory: torch.Tensor, size: int) -> None:
        self._pool = pool
        self._block = block
        self.memory = memory
        self.size = size

    def give_back(self) -> None:
        self._pool.give_back(self._block, self.size)


class PinnedPool:
    """Lends regions of pinned memory, at most `budget` bytes in all.

    Attributes:
        lent: Number of bytes that are lent now.
    """

    def __init__(self, place: Place, budget: int) -> None:
        self._place = place
        self.budget = budget
        self.lent = 0
        self._blocks: list[_Block] = []
        self._current: _Block | None = None
        self._usual = _FIRST_BLOCK
        self._changed = threading.Condition(threading.Lock())

    def lend(self, size: int) -> Region | None:
        """Lend a region of `size` bytes; None if there is no room now.

        Raises:
            RuntimeError: The system has no more memory to pin.
        """
        step = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        with self._changed:
            block = self._with_room(step)
            if block is None:
                return None
            start = block.used
            block.used += step
            block.out += 1
            self.lent += size
            return Region(self, block, block.memory[start : start + size], size)

    def wait_for(self, size: int, seconds: float) -> Region | None:
        """Lend a region of `size` bytes; wait up to `seconds` for memory to be returned."""
        until = time.monotonic() + seconds
        while True:
            region = self.lend(size)
            if region is not None:
                return region
            with self._changed:
                left = until - time.monotonic()
                if left <= 0:
                    return None
                # The wait ends at least this often, in case a notification was missed.
                self._changed.wait(min(left, 0.05))

    def give_back(self, block: _Block, size: int) -> None:
        with self._changed:
            block.out -= 1
            self.lent -= size
            # Regions are returned in any order; a block is reused only as a whole.
            if not block.out:
                block.used = 0
            self._changed.notify_all()

    def free(self) -> None:
        """Free the blocks from which nothing is lent."""
        with self._changed:
            self._blocks = [block for block in self._blocks if block.out]
            self._current = None

    def _with_room(self, step: int) -> _Block | None:
        current = self._current
        if current is not None and current.size - current.used >= step:
            return current
        for block in self._blocks:
            if not block.out and block.size >= step:
                block.used = 0
                self._current = block
                return block
        held = sum(block.size for block in self._blocks)
        # A tensor larger than the usual block gets a block of its own size.
        size = min(max(step, self._usual), self.budget)
        if size < step:
            return None
        if held + size > self.budget:
            # Idle blocks are too small, so they are freed to make room for a larger one.
            idle = [block for block in self._blocks if not block.out]
            if held - sum(block.size for block in idle) + step > self.budget:
                return None
            for block in idle:
                self._blocks.remove(block)
                held -= block.size
            size = min(size, self.budget - held)
        self._usual = min(BLOCK, self._usual * _GROWTH)
        block = _Block(self._place.pinned(size))
        self._blocks.append(block)
        self._current = block
        return block


# Staging: whole tensors are copied on the device at once, and sent concurrently with the program's
# work.


STAGING_BYTES, _FIRST_BYTES = 64 << 20, 4 << 20
"""Usual size of a staging buffer: the largest and the first."""
_SHARE = 8
"""Number of usual staging buffers that must fit into a budget; a small budget has smaller ones."""


class StagingBuffer:
    """Copies of tensors on the device, and the region of host memory to which they are sent.

    Attributes:
        mark: Is reached when all copies have arrived; None while the buffer is open.
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

    def add(self, size: int) -> StagedTensor:
        staged = StagedTensor(self, self.used, size)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._out += 1
        return staged

    def again(self) -> bool:
        """Add a use of one of its tensors; False if its bytes may have been released."""
        with self._lock:
            if self._out:
                self._out += 1
                return True
            return False

    def staged_done(self) -> None:
        """End a use of one of its tensors; call it only after the copies have arrived."""
        with self._lock:
            self._out -= 1
            last = not self._out
        if last:
            self.region.give_back()


class StagedTensor:
    """The bytes of one tensor in transfer to host memory.

    Call `done` when they are no longer needed, and once more for each `again` that returned True.
    """

    __slots__ = ("_offset", "_staging", "again", "done", "size")

    def __init__(self, staging: StagingBuffer, offset: int, size: int) -> None:
        self._staging = staging
        self._offset = offset
        self.size = size
        self.again = staging.again
        self.done = staging.staged_done

    @property
    def mark(self) -> Mark | None:
        return self._staging.mark

    @property
    def address(self) -> int:
        """The host address of the bytes; they are valid after their arrival."""
        return self._staging.region.memory.data_ptr() + self._offset


class Transfers:
    """Copies tensors of one device to the host.

    Attributes:
        budget: Largest number of bytes of staging buffers on the device at a time.
        direct: Number of tensors that were copied without a staging buffer.
    """

    def __init__(self, place: Place, budget: int) -> None:
        self._place = place
        self.budget = budget
        self.direct = 0
        self._usual = _FIRST_BYTES
        self._open: StagingBuffer | None = None
        self._under_way: deque[StagingBuffer] = deque()
        self._alive = 0
        driver = place.driver()
        self._copy = driver.copy if driver is not None else None
        self._context = launcher.context_of(place.index) if driver is not None else 0

    @property
    def waiting(self) -> bool:
        """Whether a staging buffer is open, so that its copies have not been sent."""
        return self._open is not None

    def put(
        self, tensor: torch.Tensor, address: int, size: int, stream: int, *, insist: bool
    ) -> StagedTensor | None:
        """Copy a contiguous tensor, in its present state, into the open staging buffer.

        Args:
            tensor: The tensor; it may change as soon as this returns.
            address: Address of its elements.
            size: Its number of bytes.
            stream: The current stream.
            insist: Let torch make the copy if the driver cannot, as for a device that is not the
                current one.

        Returns:
            None if no staging buffer has room for it, or the copy is not possible.
        """
        staging = self._open
        # A buffer belongs to one stream, because only there its copies follow the program's work.
        if staging is None or staging.stream != stream or staging.used + size > staging.region.size:
            return None
        to = staging.used
        # The driver's copy takes a fraction of the time of torch's.
        if self._copy is None or self._copy(self._context, stream, staging.at + to, address, size):
            if not insist:
                return None
            assert staging.memory is not None
            staging.memory[to : to + size].copy_(_bytes(tensor))
        return staging.add(size)

    def room_for(self, size: int, host_budget: int) -> int:
        """Size of the next staging buffer, for a tensor of `size` bytes; 0 if there is no room."""
        # The open staging buffer has no room for this tensor and is sent as if it were full.
        self.send()
        self._bury()
        left = self.budget - self._alive
        usual = min(self._usual, host_budget // _SHARE, self.budget // _SHARE, left)
        return max(size, usual) if size <= left else 0

    def open(self, region: Region) -> None:
        """Open a staging buffer as large as a region of host memory.

        Raises:
            torch.OutOfMemoryError: The device has no memory for it.
        """
        self._usual = min(STAGING_BYTES, self._usual * _GROWTH)
        memory = self._place.empty((region.size,), torch.uint8)
        self._open = StagingBuffer(region, memory, self._place.stream())
        # The size counts until the copy has arrived, not only until it is sent.
        self._alive += region.size

    def take_direct(self, tensor: torch.Tensor, region: Region) -> StagedTensor:
        """Copy a contiguous tensor to a region of its size, without a staging buffer."""
        self.direct += 1
        staging = StagingBuffer(region, None, 0)
        staged = staging.add(region.size)
        staging.mark = self._place.copy_here([(region.memory, _bytes(tensor))])
        return staged

    def send(self) -> None:
        """Start the copy of the open staging buffer."""
        staging, self._open = self._open, None
        if staging is None:
            return
        assert staging.memory is not None
        used = min(staging.used, staging.region.size)
        copies = [(staging.region.memory[:used], staging.memory[:used])]
        staging.mark = self._place.copy_aside(copies, staging.stream)
        self._under_way.append(staging)

    def free(self) -> None:
        """Release staging buffers whose copies have arrived; call it when memory is short."""
        self._bury()

    def _bury(self) -> None:
        """Release staging buffers whose copies have arrived.

        Until then they must be kept, because the allocator does not know about the copies.
        """
        while self._under_way:
            staging = self._under_way[0]
            if staging.mark is not None and not staging.mark.query():
                return
            self._under_way.popleft()
            staging.memory = None
            self._alive -= staging.region.size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes."""
    # Flattened first, because `view` to another dtype can fail for axes of size 1.
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


# Device tensors: how each is captured, and what is done when memory runs short.


LEFT_FREE = 1 / 16
"""Fraction of a device's memory that is left to the program; with less free, no copies are made."""
# No disk should stall so long; after that the tensor is dropped, so that the program continues.
_LONGEST_WAIT = 3600.0
_CHECK_EVERY = 0.5
DROPPED = "dropped: the run could not be written as fast as the program ran"


def spare_memory(place: Place) -> int | None:
    """Bytes of a device's memory that copies may take, without `LEFT_FREE`; None if unknown."""
    memory = place.room()
    if memory is None:
        return None
    free, total = memory
    return max(0, free - int(total * LEFT_FREE))


class PendingSummary(NamedTuple):
    """A summary that has not arrived yet."""

    transfer: SummaryTransfer
    slot: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in this tuple
    width: int


class Device:
    """The state of capture for one device.

    Attributes:
        without_kernels: Why the device cannot summarise tensors; empty if it can.
    """

    def __init__(self, place: Place, budgets: Budgets) -> None:
        self.place = place
        self.without_kernels = place.why_no_kernels()
        self.tables = Tables(place)
        self.batches: dict[int, SummaryBatch] = {}
        self.transfers = Transfers(place, budgets.device)
        self.checked = 0.0

    def batch(self) -> SummaryBatch:
        stream = self.place.stream()
        batch = self.batches.get(stream)
        if batch is None:
            batch = self.batches[stream] = SummaryBatch(self.place, self.tables)
        return batch


class DeviceMemory:
    """Summarises and copies device tensors within the budgets.

    Args:
        budgets: Memory that may be used.
        say: Called with the kind and message of an event; reports each event once.

    Attributes:
        dropped: Number of tensors of which nothing was kept for lack of host memory.
        degraded: Whether only summaries are kept from now on, for lack of memory.
        waited: How often the program waited for host memory.
    """

    def __init__(self, budgets: Budgets, say: Callable[[str, str], None]) -> None:
        self.budgets = budgets
        self.dropped = self.dropped_bytes = 0
        self.degraded = False
        self.waited = 0
        self._say = say
        self._devices: dict[torch.device, Device] = {}
        self._useless: set[torch.device] = set()
        self._pool: PinnedPool | None = None

    def can_use(self, tensor: torch.Tensor) -> bool:
        """Whether this class can handle the tensor's device; if not, the host copies tensors."""
        where = tensor.device
        if where in self._devices:
            return True
        if where in self._useless:
            return False
        try:
            self._devices[where] = Device(place_of(where), self.budgets)
        except (RuntimeError, NotImplementedError) as error:
            self._useless.add(where)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._say("device-path", f"tensors of {where} are copied one by one, slowly: {reason}")
            return False
        return True

    def device_of(self, tensor: torch.Tensor) -> Device:
        """The state for a tensor's device, which `can_use` must have made."""
        return self._devices[tensor.device]

    # --- summaries

    def summarise(self, tensor: torch.Tensor, dtype: str) -> PendingSummary | None:
        """Launch the summary of a tensor on its device; None if the host must compute it."""
        device = self.device_of(tensor)
        if device.without_kernels:
            self._say(
                "device-path",
                f"tensors of {device.place.name} are copied to the host in batches and summarised "
                f"there: {device.without_kernels}",
            )
            return None
        kind = kind_of(dtype)
        count = tensor.numel()
        if kind is None or not count:
            return None
        try:
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            if tensor.data_ptr() & 15:  # the kernel reads 16 bytes at a time
                tensor = tensor.clone()
            # A complex element is read as two numbers.
            count *= kind.reals
            transfer, slot = device.batch().take(tensor, kind, count)
        except torch.OutOfMemoryError:
            self._free(device)
            return None
        except launcher.CannotLaunch as error:
            device.without_kernels = str(error)
            return self.summarise(tensor, dtype)
        return PendingSummary(transfer, slot, count, kind.width)

    # --- whole tensors

    def carry(
        self, tensor: torch.Tensor, size: int, progress: Callable[[], None]
    ) -> StagedTensor | str | None:
        """Start to copy a tensor's bytes to the host.

        Args:
            tensor: A tensor on a device.
            size: Its number of bytes.
            progress: Sends the open staging buffers; called before waiting for memory.

        Returns:
            The staged tensor; the reason why it was dropped; or None if only its summary can be
            kept.
        """
        device = self.device_of(tensor)
        transfers, stream = device.transfers, device.place.stream()
        try:
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            address = tensor.data_ptr()
            staged = transfers.put(tensor, address, size, stream, insist=True)
            if staged is not None:
                return staged
            # Done only before a new staging buffer, because querying the driver takes time.
            self._leave_room(device)
            staging = transfers.room_for(size, self.budgets.host)
            region = self._lend(device, staging or size, size, progress)
            if isinstance(region, str) or region is None:
                return region
            try:
                if staging:
                    transfers.open(region)
                    staged = transfers.put(tensor, address, size, stream, insist=True)
                    assert staged is not None
                    return staged
                return transfers.take_direct(tensor, region)
            # The region is returned if the copy could not be started.
            except BaseException:
                region.give_back()
                raise
        except torch.OutOfMemoryError:
            self.out_of_memory(tensor)
            return None

    def every_nth(self, tensor: torch.Tensor, stride: int) -> torch.Tensor | None:
        """A contiguous sample of a tensor; None if there is no memory for it."""
        try:
            return tensor.reshape(-1)[::stride].contiguous()
        except torch.OutOfMemoryError:
            self.out_of_memory(tensor)
            return None

    def _lend(
        self, device: Device, size: int, tensor: int, progress: Callable[[], None]
    ) -> Region | str | None:
        """A region of host memory.

        Args:
            device: Device of the tensor.
            size: Size of the region.
            tensor: Number of bytes of the tensor for which it is needed.
            progress: Sends the open staging buffers.

        Returns:
            The region; the reason why the tensor is dropped; or None if only its summary can be
            kept.
        """
        pool = self._pool
        if pool is None:
            pool = self._pool = PinnedPool(device.place, self.budgets.host)
        if size > pool.budget:
            self._say(
                "too-large",
                f"tensors beyond the host budget of {pool.budget} bytes are summarised; "
                "--host-budget sets it",
            )
            return None
        try:
            region = pool.lend(size)
            if region is not None:
                return region
            # Open staging buffers must be sent first, or their memory would never be returned.
            progress()
            if self.budgets.when_full == "wait":
                self.waited += 1
                region = pool.wait_for(size, _LONGEST_WAIT)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a failure to pin has no class of its own
            if "memory" not in str(error).lower():
                raise
            pool.free()
            self._degrade("the host has no memory left to pin")
            return None
        if region is None:
            self.dropped += 1
            self.dropped_bytes += tensor
            return DROPPED
        return region

    def _leave_room(self, device: Device) -> None:
        """Reduce the budget for copies if the device is nearly full; checked twice a second."""
        now = time.monotonic()
        # The query takes microseconds, so it is not made for every tensor.
        if now < device.checked:
            return
        device.checked = now + _CHECK_EVERY
        spare = spare_memory(device.place)
        if spare is not None:
            device.transfers.budget = min(self.budgets.device, spare)

    # --- sending

    @property
    def waiting(self) -> bool:
        return any(
            device.transfers.waiting or any(batch.waiting for batch in device.batches.values())
            for device in self._devices.values()
        )

    def send(self) -> None:
        """Start all copies to the host that have not been started."""
        for device in self._devices.values():
            device.transfers.send()
            for stream, batch in device.batches.items():
                if batch.waiting:
                    with device.place.on(stream):
                        batch.send()

    @property
    def pressure(self) -> bool:
        """Whether so little host memory is left that delivery should not wait for a pause."""
        pool = self._pool
        return pool is not None and pool.lent * 2 > pool.budget

    def out_of_memory(self, tensor: torch.Tensor) -> None:
        """Free memory of a device that has none for copies, and keep only summaries from now on."""
        self._free(self.device_of(tensor))
        self._degrade("the device has no memory left for copies of tensors")

    def _free(self, device: Device) -> None:
        device.transfers.free()
        # torch caches freed memory; the program may need it in blocks of another size.
        device.place.free_cache()

    def _degrade(self, why: str) -> None:
        if not self.degraded:
            self.degraded = True
            self._say("degraded", f"{why}: from here on summaries are kept instead")

    def report(self, event: Callable[..., None]) -> None:
        """Report what was dropped, and how often the program waited."""
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
        """Release the host memory; call it only if all devices still work."""
        self._pool = None

    def memory_wanted(self) -> None:
        """Release all memory that can be released, because the program itself has none left."""
        for device in self._devices.values():
            device.transfers.budget = 0
            # The budget stays zero, because the program has shown that it needs the memory.
            device.checked = float("inf")
            device.transfers.free()
