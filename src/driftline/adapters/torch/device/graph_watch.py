"""CUDA graphs and memory that runs out, as far as capture must know of them.

While a graph is recorded no thread may ask the device anything, and nothing runs; when it is
replayed no module is called. Both are noticed here, for the sessions that run: capture keeps still
during the first, and says of the second that nothing of it was seen. A program that runs out of
device memory is told of too, so that capture lets go of its own.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from driftline.adapters.torch.device.arrivals import Arrivals

_lock = threading.Lock()
_watching: list[Arrivals] = []
_plain: dict[str, Any] = {}
_observed = False


def watch(arrivals: Arrivals) -> None:
    """Tell this one from now on. No device is woken: a program may fork before it uses one."""
    with _lock:
        _watching.append(arrivals)
        kind: Any = getattr(torch.cuda, "CUDAGraph", None)
        if kind is None or not torch.backends.cuda.is_built():
            return
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


def unwatch(arrivals: Arrivals) -> None:
    """Tell it no more; the last one leaves torch as it was."""
    with _lock:
        if arrivals in _watching:
            _watching.remove(arrivals)
        if not _watching and _plain:
            kind: Any = torch.cuda.CUDAGraph
            for name, method in _plain.items():
                if getattr(kind, name) is _INSTEAD[name]:
                    setattr(kind, name, method)
            _plain.clear()


def _out_of_memory(device: int, size: int, allocated: int, free: int) -> None:
    for arrivals in list(_watching):
        arrivals.memory_wanted()


def _capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
    for arrivals in list(_watching):
        arrivals.recording_begins()
    try:
        return _plain["capture_begin"](self, *args, **kwargs)
    except BaseException:  # nothing is recorded, and nobody will end it
        for arrivals in list(_watching):
            arrivals.recording_ends()
        raise


def _capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _plain["capture_end"](self, *args, **kwargs)
    finally:
        for arrivals in list(_watching):
            arrivals.recording_ends()


def _replay(self: Any, *args: Any, **kwargs: Any) -> Any:
    for arrivals in list(_watching):
        arrivals.graph_replayed()
    return _plain["replay"](self, *args, **kwargs)


_INSTEAD = {"capture_begin": _capture_begin, "capture_end": _capture_end, "replay": _replay}
