# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
"""The interface to a device: streams, events, concurrent copies, device memory and pinned memory.

`AcceleratorPlace` is any device for which torch has streams and events; it uses `torch.accelerator`
and nothing of CUDA. `CudaPlace` adds what only CUDA has: our kernels, the recording of graphs,
figures of the allocator. `HostPlace` is the CPU, or a device without streams: every call returns
when its work is done. With it, and with Triton's interpreter, the device backend is tested without
a device. This file also watches CUDA graphs and devices that run out of memory, and holds objects
that must never be freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from driftline.numerics.gpu import launcher

if TYPE_CHECKING:
    from driftline.captures.torch.device.backend import TorchDeviceBackend


Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(host, device) pairs of byte tensors; the second is copied to the first."""


class Mark(Protocol):
    """A point in a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


class Place(Protocol):
    """The interface of capture to one device.

    Attributes:
        index: Index of the device; -1 for the CPU.
        name: Name of the device as torch prints it.
    """

    index: int
    name: str

    def why_no_kernels(self) -> str:
        """Why Triton's kernels cannot run on the device; empty if they can."""
        ...

    def driver(self) -> launcher.Driver | None:
        """The driver that copies and launches without torch; None if torch has to do it."""
        ...

    def stream(self) -> int:
        """Number of the calling thread's current stream."""
        ...

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """A context in which the calling thread uses a stream."""
        ...

    def mark(self) -> Mark: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def pinned(self, size: int) -> torch.Tensor:
        """Pinned host memory of `size` bytes, to which the device can write by itself."""
        ...

    def copy_here(self, copies: Copies) -> Mark:
        """Copy in the current stream; later work in the stream waits for it."""
        ...

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        """Copy in a separate stream, after the work that is in `stream` now."""
        ...

    def room(self) -> tuple[int, int] | None:
        """Free and total bytes of device memory; None if unknown."""
        ...

    def free_cache(self) -> None:
        """Release the unused memory that torch caches."""
        ...

    def is_sound(self) -> bool:
        """Whether the device still works; after an error in a kernel it does not work any more."""
        ...


class _Reached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once, because all work is done."""


class HostPlace:
    """The CPU used as a device, or a device without streams; every call is synchronous."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self.index = -1 if self._device.type == "cpu" else self._device.index
        self.name = str(self._device)

    def why_no_kernels(self) -> str:
        if self._device.type != "cpu":
            return _no_kernels(self.name)
        # On a CPU kernels run only in Triton's interpreter, which tests switch on.
        return launcher.why_not() or ("" if launcher.interpreted() else "a CPU runs no kernels")

    def driver(self) -> launcher.Driver | None:
        return None

    def stream(self) -> int:
        return 0

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Mark:
        return _Reached()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy_here(self, copies: Copies) -> Mark:
        for host, device in copies:
            host.copy_(device)
        return _Reached()

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        return self.copy_here(copies)

    def room(self) -> tuple[int, int] | None:
        return None

    def free_cache(self) -> None:
        """Do nothing, because there is no cache."""

    def is_sound(self) -> bool:
        return True


def _no_kernels(name: str) -> str:
    return f"there are no kernels of ours for {name}"


class AcceleratorPlace:
    """One device for which torch has streams and events."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.name = str(device)
        self._device = device
        self._aside: Any = None
        self._queues: dict[int, Any] = {}
        self._pins = True

    def why_no_kernels(self) -> str:
        return _no_kernels(self.name)

    def driver(self) -> launcher.Driver | None:
        return None

    def stream(self) -> int:
        current = self._current()
        # A stream can be entered later only by the object that torch returned for it.
        self._queues.setdefault(current.stream_id, current)
        return int(current.stream_id)

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return nullcontext() if stream == self.stream() else self._within(self.queue(stream))

    def mark(self) -> Mark:
        return self._mark_in(self._current())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        if self._pins:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except (RuntimeError, NotImplementedError) as error:
                # A backend may not support pinning; one that does may have no memory left.
                if "memory" in str(error).lower() and "support" not in str(error).lower():
                    raise
                self._pins = False
        return torch.empty(size, dtype=torch.uint8)

    def copy_here(self, copies: Copies) -> Mark:
        for host, device in copies:
            host.copy_(device, non_blocking=self._pins)
        return self.mark()

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        if self._aside is None:
            self._aside = self._new_stream()
        # The copy starts after what the program has put into its queue so far.
        self._aside.wait_event(self._mark_in(self.queue(stream)))
        with self._within(self._aside):
            for host, device in copies:
                host.copy_(device, non_blocking=self._pins)
            return self._mark_in(self._aside)

    def queue(self, stream: int) -> Any:
        """The stream with this number."""
        return self._queues[stream]

    def room(self) -> tuple[int, int] | None:
        try:
            free, total = torch.accelerator.get_memory_info(self._device)
        # Not every backend has these figures.
        except (RuntimeError, NotImplementedError, AttributeError):
            return None
        return int(free), int(total)

    def free_cache(self) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            torch.accelerator.empty_cache()

    def is_sound(self) -> bool:
        try:
            torch.accelerator.synchronize(self._device)
        except (RuntimeError, NotImplementedError) as error:
            return "support" in str(error)  # the backend does not support the query
        return True

    def _current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def _new_stream(self) -> Any:
        return torch.Stream(self._device)

    def _within(self, stream: Any) -> AbstractContextManager[Any]:
        return stream

    def _mark_in(self, stream: Any) -> Any:
        mark = torch.Event(self._device)
        mark.record(stream)
        return mark


class CudaPlace(AcceleratorPlace):
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index))

    def why_no_kernels(self) -> str:
        return launcher.why_not()

    def driver(self) -> launcher.Driver | None:
        return launcher.driver()

    def stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def queue(self, stream: int) -> torch.cuda.Stream:
        if stream == self.stream():
            return torch.cuda.current_stream(self._device)
        # Stream 0 is the default stream, which cannot be wrapped as an external one.
        if not stream:
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(stream, device=self._device)

    def is_sound(self) -> bool:
        try:
            torch.cuda.current_stream(self._device).query()
        except RuntimeError as error:
            # While a graph is recorded every query is refused, although the device works.
            return "captur" in str(error)
        return True

    def room(self) -> tuple[int, int] | None:
        """Free bytes, including the unused memory that torch's allocator caches, and all bytes."""
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + held), int(total)

    def free_cache(self) -> None:
        torch.cuda.empty_cache()

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def _within(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _mark_in(self, stream: Any) -> Any:
        # A thread that waits for a blocking event sleeps, and leaves its core to the program.
        mark = torch.cuda.Event(blocking=True)
        mark.record(stream)
        return mark


def is_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the accelerator of this process; initialises no device."""
    if tensor.is_cpu:
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and tensor.device.type == device.type


def place_of(device: torch.device) -> Place:
    """The interface to a device.

    Raises:
        RuntimeError: The device cannot even copy bytes.
    """
    if device.type == "cpu":
        return HostPlace()
    if device.type == "cuda":
        watch_memory()
        return CudaPlace(device.index)
    try:
        place: Place = AcceleratorPlace(device)
        _try_out(place, device)
    # A backend may implement only a part of torch's interface.
    except (RuntimeError, NotImplementedError):
        place = HostPlace(device)
        _try_out(place, device)
    return place


def _try_out(place: Place, device: torch.device) -> None:
    """Copy some bytes from the device as tensors will be copied.

    Raises:
        RuntimeError: The bytes do not arrive unchanged.
    """
    numbers = torch.arange(16, dtype=torch.float32)
    staging = place.empty((128,), torch.uint8)
    staging[64:128].copy_(numbers.to(device).view(torch.uint8))
    host = place.pinned(64)
    place.copy_aside([(host, staging[64:128])], place.stream()).synchronize()
    if not torch.equal(host.view(torch.float32), numbers):
        raise RuntimeError(f"{place.name} does not copy bytes as they are")


# CUDA graphs, and devices that run out of memory.


_lock = threading.Lock()
_watching: list[TorchDeviceBackend] = []
_plain: dict[str, Any] = {}
_observed = False


def watch(device_backend: TorchDeviceBackend) -> None:
    """Notify a backend of CUDA graphs and lack of memory from now on.

    No device is initialised, because the program may fork before it uses one.
    """
    with _lock:
        _watching.append(device_backend)
        kind: Any = getattr(torch.cuda, "CUDAGraph", None)
        if kind is None or not torch.backends.cuda.is_built():
            return
        # torch's methods are wrapped for the first session only.
        if not _plain:
            for name, instead in _INSTEAD.items():
                method = getattr(kind, name, None)
                if method is not None:
                    _plain[name] = method
                    setattr(kind, name, instead)


def watch_memory() -> None:
    """Observe when a CUDA device runs out of memory; call it when one is in use."""
    global _observed
    observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    with _lock:
        if observe is not None and not _observed:
            _observed = True  # an observer cannot be removed; without sessions it does nothing
            with contextlib.suppress(RuntimeError):  # cudaMallocAsync supports no observers
                observe(_out_of_memory)


def unwatch(device_backend: TorchDeviceBackend) -> None:
    """Stop notifying a backend; after the last one, restore torch's methods."""
    with _lock:
        if device_backend in _watching:
            _watching.remove(device_backend)
        if not _watching and _plain:
            kind: Any = torch.cuda.CUDAGraph
            for name, method in _plain.items():
                # If another library has wrapped our method since, ours stays and does nothing.
                if getattr(kind, name) is _INSTEAD[name]:
                    setattr(kind, name, method)
            _plain.clear()


def _out_of_memory(device: int, size: int, allocated: int, free: int) -> None:
    # The list is copied, because a session may stop while it is notified.
    for device_backend in list(_watching):
        device_backend.memory_wanted()


def _capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
    for device_backend in list(_watching):
        device_backend.recording_begins()
    try:
        return _plain["capture_begin"](self, *args, **kwargs)
    except BaseException:  # the recording did not begin, so `capture_end` will not be called
        for device_backend in list(_watching):
            device_backend.recording_ends()
        raise


def _capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _plain["capture_end"](self, *args, **kwargs)
    finally:
        for device_backend in list(_watching):
            device_backend.recording_ends()


def _replay(self: Any, *args: Any, **kwargs: Any) -> Any:
    for device_backend in list(_watching):
        device_backend.graph_replayed()
    return _plain["replay"](self, *args, **kwargs)


_INSTEAD = {"capture_begin": _capture_begin, "capture_end": _capture_end, "replay": _replay}


# Objects that must never be freed, not even at the end of the interpreter.


_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]
_keep.restype = None


def abandon(*things: object) -> None:
    """Keep objects, and all objects that they refer to, until the process ends."""
    for thing in things:
        # The extra reference is never released, so the object outlives the interpreter.
        _keep(thing)
