# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
"""A device as capture uses it: marks in its work, copies beside its work, memory of both kinds.

`CudaPlace` is the real one. `HostPlace` is the CPU, where everything has happened when a call
returns: with it, and with Triton's interpreter, the whole path is tested without a device. Also
CUDA graphs, memory that runs out, and objects that must never be freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

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

    def stream(self) -> int:
        """Which queue of work the calling thread uses now."""
        ...

    def recording(self) -> bool:
        """Whether what is launched now becomes part of a CUDA graph instead of running."""
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

    def room(self) -> int:
        """Bytes of device memory that nobody uses."""
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
    """The CPU in a device's place."""

    index = -1
    name = "cpu"

    def stream(self) -> int:
        return 0

    def recording(self) -> bool:
        return False

    def mark(self) -> Mark:
        return _Reached()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy_here(self, copies: Copies) -> Mark:
        for host, device in copies:
            host.copy_(device)
        return _Reached()

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        return self.copy_here(copies)

    def room(self) -> int:
        return 1 << 40

    def is_sound(self) -> bool:
        return True


class CudaPlace:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._aside: Any = None

    def stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def recording(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def mark(self) -> Mark:
        # Blocking: a thread that waits for it must not spin on a core the program could use.
        made = torch.cuda.Event(blocking=True)
        made.record(torch.cuda.current_stream(self._device))
        return made

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy_here(self, copies: Copies) -> Mark:
        for host, device in copies:
            host.copy_(device, non_blocking=True)
        return self.mark()

    def copy_aside(self, copies: Copies, stream: int) -> Mark:
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._device)
        # The copy starts after what the program has put into its queue so far.
        so_far = torch.cuda.Event()
        so_far.record(self.queue(stream))
        self._aside.wait_event(so_far)
        with torch.cuda.stream(self._aside):
            for host, device in copies:
                host.copy_(device, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._aside)
        return done

    def queue(self, stream: int) -> torch.cuda.Stream:
        """The queue that goes by a number."""
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

    def room(self) -> int:
        """Free memory of the card, and what torch's allocator holds without a user."""
        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + held)


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
