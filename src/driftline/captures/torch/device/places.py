# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
"""A device as capture uses it: marks in its work, copies beside its work, memory of both kinds.

`AcceleratorPlace` is any device that torch has streams and events for; it asks `torch.accelerator`
and nothing of CUDA. `CudaPlace` adds what only CUDA has: kernels of ours, graphs that are recorded,
memory that can be asked for. `HostPlace` is the CPU, and a device without streams: everything has
happened when a call returns. With it, and with Triton's interpreter, the whole path is tested
without a device. Also CUDA graphs, memory that runs out, and objects that must never be freed.
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
"""(host, device) tensors of bytes: the second is copied to the first."""


class Mark(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it has been."""
        ...


class Place(Protocol):
    """What capture asks of a device.

    Attributes:
        index: Its number; -1 for the CPU.
        name: As torch prints it.
    """

    index: int
    name: str

    def why_no_kernels(self) -> str:
        """Why Triton's kernels cannot run there; empty if they can."""
        ...

    def driver(self) -> launcher.Driver | None:
        """What copies and launches without torch; None where torch has to do it."""
        ...

    def stream(self) -> int:
        """Which queue of work the calling thread uses now."""
        ...

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Work of this thread goes to a queue meanwhile."""
        ...

    def mark(self) -> Mark: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def pinned(self, size: int) -> torch.Tensor:
        """So many bytes of host memory that the device can write to by itself."""
        ...

    def copy_here(self, copies: Copies) -> Mark:
        """Copy in the current queue: what comes after it there waits."""
        ...

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        """Copy beside a queue, once it has come as far as it is now."""
        ...

    def room(self) -> tuple[int, int] | None:
        """Bytes of device memory that nobody uses, and of all; None if nobody can say."""
        ...

    def free_cache(self) -> None:
        """Give back memory that torch keeps without a user."""
        ...

    def is_sound(self) -> bool:
        """Whether the device answers; after an error in one of its kernels it never does again."""
        ...


class _Reached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Everything has happened already."""


class HostPlace:
    """The CPU in a device's place, or a device without streams: every call waits for its end."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self.index = -1 if self._device.type == "cpu" else self._device.index
        self.name = str(self._device)

    def why_no_kernels(self) -> str:
        if self._device.type != "cpu":
            return _no_kernels(self.name)
        # Only Triton's interpreter carries kernels out on a CPU, where a test has switched it on.
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
        """Nothing is kept."""

    def is_sound(self) -> bool:
        return True


def _no_kernels(name: str) -> str:
    return f"there are no kernels of ours for {name}"


class AcceleratorPlace:
    """One device that torch has streams and events for."""

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
        # A stream can be used again only by the object that torch gave for it.
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
                # A backend need not be able to pin; one that can may have no memory left.
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
        """The queue that goes by a number."""
        return self._queues[stream]

    def room(self) -> tuple[int, int] | None:
        try:
            free, total = torch.accelerator.get_memory_info(self._device)
        # Not every backend keeps such figures.
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
            return "support" in str(error)  # it cannot be asked
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
        # Queue 0 is the default one and cannot be wrapped as an external one.
        if not stream:
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(stream, device=self._device)

    def is_sound(self) -> bool:
        try:
            torch.cuda.current_stream(self._device).query()
        except RuntimeError as error:
            # While a graph is recorded every question is refused; the device is sound all the same.
            return "captur" in str(error)
        return True

    def room(self) -> tuple[int, int] | None:
        """Free memory of the card, and what torch's allocator holds without a user."""
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
        # Blocking: a thread that waits for it must not spin on a core the program could use.
        mark = torch.cuda.Event(blocking=True)
        mark.record(stream)
        return mark


def is_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the accelerator of this process; asking wakes no device."""
    if tensor.is_cpu:
        return False
    device = torch.accelerator.current_accelerator()
    return device is not None and tensor.device.type == device.type


def place_of(device: torch.device) -> Place:
    """A device as capture uses it.

    Raises:
        RuntimeError: It cannot even copy bytes.
    """
    if device.type == "cpu":
        return HostPlace()
    if device.type == "cuda":
        watch_memory()
        return CudaPlace(device.index)
    try:
        place: Place = AcceleratorPlace(device)
        _try_out(place, device)
    # Backends implement as much of torch's interface as their users have asked for.
    except (RuntimeError, NotImplementedError):
        place = HostPlace(device)
        _try_out(place, device)
    return place


def _try_out(place: Place, device: torch.device) -> None:
    """Send some bytes the way that tensors will go."""
    numbers = torch.arange(16, dtype=torch.float32)
    staging = place.empty((128,), torch.uint8)
    staging[64:128].copy_(numbers.to(device).view(torch.uint8))
    host = place.pinned(64)
    place.copy_aside([(host, staging[64:128])], place.stream()).synchronize()
    if not torch.equal(host.view(torch.float32), numbers):
        raise RuntimeError(f"{place.name} does not copy bytes as they are")


# CUDA graphs, and memory that runs out.


_lock = threading.Lock()
_watching: list[TorchDeviceBackend] = []
_plain: dict[str, Any] = {}
_observed = False


def watch(device_backend: TorchDeviceBackend) -> None:
    """Tell this one from now on. No device is woken: a program may fork before it uses one."""
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
    """A device is in use: be told when its memory runs out."""
    global _observed
    observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    with _lock:
        if observe is not None and not _observed:
            _observed = True  # it cannot be taken off again, and does nothing without sessions
            with contextlib.suppress(RuntimeError):  # cudaMallocAsync tells nobody
                observe(_out_of_memory)


def unwatch(device_backend: TorchDeviceBackend) -> None:
    """Tell it no more; the last one leaves torch as it was."""
    with _lock:
        if device_backend in _watching:
            _watching.remove(device_backend)
        if not _watching and _plain:
            kind: Any = torch.cuda.CUDAGraph
            for name, method in _plain.items():
                # Somebody else may have wrapped it since; then ours stays below, doing nothing.
                if getattr(kind, name) is _INSTEAD[name]:
                    setattr(kind, name, method)
            _plain.clear()


def _out_of_memory(device: int, size: int, allocated: int, free: int) -> None:
    # A copy, because a session may stop while it is told.
    for device_backend in list(_watching):
        device_backend.memory_wanted()


def _capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
    for device_backend in list(_watching):
        device_backend.recording_begins()
    try:
        return _plain["capture_begin"](self, *args, **kwargs)
    except BaseException:  # nothing is recorded, and nobody will end it
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


# Objects that must never be freed, not even when the interpreter ends.


_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]
_keep.restype = None


def abandon(*things: object) -> None:
    """Hold these, and all that they hold, for as long as there is a process."""
    for thing in things:
        # An extra reference that nobody owns: the object outlives the interpreter.
        _keep(thing)
