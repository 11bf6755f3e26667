"""Events of torch's profiler → kernels with their operators, and times by operator and site.

On a GPU a kernel is what the device ran, and its operator the one that launched it. On a CPU it is
the innermost native function that computes something itself: views and allocations are none.
Reads results only; who ran the profiler, and when, is not known here.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from driftline.adapters.torch.schemas import Operator
from driftline.runs.sheets import Described, Timed

SITE = "driftline site:"
OWN = "driftline itself"
OUTSIDE = "(program)"
BACKWARD = "(backward)"
MOST_KERNELS = 1_000_000
_OPERATOR = re.compile(r"[A-Za-z_]\w*::[\w.]+")
_WATCHED = "PythonDispatchMode"
_ENGINE = "autograd::engine::evaluate_function"
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""What C++ calls the element types."""


class Kernel(NamedTuple):
    """One kernel that ran.

    Attributes:
        name: As the device, or torch, calls it.
        operator: Who called it.
        site: The module that was running; `(program)` outside of all.
        device: cpu, or cuda:0.
        microseconds: How long it took.
        inputs: Tensors of the operator that launched it.
    """

    name: str
    operator: str
    site: str
    device: str
    microseconds: float
    inputs: tuple[Described, ...]

    def param(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "site": self.site,
            "device": self.device,
            "time_us": round(self.microseconds, 3),
        }


class Profiled(NamedTuple):
    """What one profile holds."""

    kernels: tuple[Kernel, ...]
    times: tuple[Timed, ...]


class _Event:
    """An event of a thread, with those inside it."""

    __slots__ = (
        *("computing", "device_us", "end", "inner_us", "name", "own", "parent", "raw", "shell"),
        "site",
    )

    def __init__(self, raw: Any, parent: _Event | None) -> None:
        self.raw = raw
        self.name: str = raw.name()
        self.parent = parent
        self.end: int = raw.end_ns()
        self.inner_us = 0.0
        self.device_us = 0.0
        self.computing = False  # something inside it computes
        # Where operators are watched each appears twice, once as the call that the watcher sees.
        self.shell = False
        if parent is not None and parent.name == _WATCHED and parent.parent is not None:
            parent.parent.shell |= parent.parent.name == self.name
        self.own: bool = self.name == OWN or (parent is not None and parent.own)
        above = parent.site if parent is not None else ""
        if self.name.startswith(SITE):
            above = self.name[len(SITE) :]
        elif self.name.startswith(_ENGINE):
            above = BACKWARD
        self.site: str = above

    @property
    def microseconds(self) -> float:
        return self.raw.duration_ns() / 1000


def read_profile(results: Any) -> Profiled:
    """Everything of one profile."""
    host, device = [], []
    for raw in results.events():
        on_host = str(raw.device_type()).endswith("CPU")
        ours = raw.name().startswith(SITE) or raw.name() == OWN
        if on_host and (ours or not raw.is_user_annotation()):
            host.append(raw)
        elif not on_host and raw.duration_ns() >= 0:
            device.append(raw)
    events = _nested(host)
    launched = {event.raw.correlation_id(): event for event in events if _is_operator(event)}
    kernels: list[tuple[int, Kernel]] = []
    for raw in device:
        event = launched.get(raw.linked_correlation_id())
        if raw.is_user_annotation() or raw.name().startswith(SITE) or (event and event.own):
            continue
        if event is not None:
            event.device_us += raw.duration_ns() / 1000
        kernels.append((raw.start_ns(), _device_kernel(raw, event)))
    if not device:
        kernels = [
            (event.raw.start_ns(), _host_kernel(event)) for event in events if _is_kernel(event)
        ]
    kernels.sort(key=lambda one: one[0])
    return Profiled(tuple(kernel for _, kernel in kernels[:MOST_KERNELS]), tuple(_times(events)))


def _nested(host: Sequence[Any]) -> list[_Event]:
    """Events with their parents; those of one thread never overlap but by nesting."""
    threads: dict[int, list[Any]] = {}
    for raw in host:
        threads.setdefault(raw.start_thread_id(), []).append(raw)
    events: list[_Event] = []
    for those in threads.values():
        those.sort(key=lambda raw: (raw.start_ns(), -raw.end_ns()))
        stack: list[_Event] = []
        for raw in those:
            while stack and stack[-1].end <= raw.start_ns() and stack[-1].end < raw.end_ns():
                stack.pop()
            event = _Event(raw, stack[-1] if stack else None)
            events.append(event)
            stack.append(event)
    for event in events:
        if event.parent is not None:
            event.parent.inner_us += event.microseconds
        if _is_operator(event) and not _is_silent(event.name):
            above = event.parent
            while above is not None and not above.computing:
                above.computing = True
                above = above.parent
    return events


def _is_operator(event: _Event) -> bool:
    return (
        not event.own
        and not event.shell
        and not event.name.startswith((SITE, _ENGINE))
        and _OPERATOR.fullmatch(event.name) is not None
        and not event.name.startswith("torch::autograd")
    )


def _repeats(event: _Event) -> bool:
    """An overload that calls another of the same name: one call, not two."""
    above = event.parent
    return above is not None and above.name == event.name and not above.shell


def _is_kernel(event: _Event) -> bool:
    if not _is_operator(event) or _repeats(event) or _is_silent(event.name):
        return False
    return not event.computing or _has_own_kernel(event.name)


@functools.lru_cache(4096)
def _overloads(name: str) -> tuple[Any, ...]:
    space, _, short = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, space, None), short, None)
    try:
        return tuple(getattr(packet, overload) for overload in packet.overloads())
    except (AttributeError, RuntimeError):
        return ()


@functools.lru_cache(4096)
def _is_silent(name: str) -> bool:
    overloads = _overloads(name)
    return bool(overloads) and all(Operator(one).silent for one in overloads)


@functools.lru_cache(4096)
def _has_own_kernel(name: str) -> bool:
    has: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if has is None:
        return False
    for one in _overloads(name):
        try:
            if has(one.name(), "CPU"):
                return True
        except RuntimeError:  # known to TorchScript only
            continue
    return False


def _host_kernel(event: _Event) -> Kernel:
    operator = event
    above = event.parent
    while above is not None:
        if _is_operator(above):
            operator = above
        above = above.parent
    return Kernel(
        event.name,
        operator.name,
        event.site or OUTSIDE,
        "cpu",
        event.microseconds,
        _inputs(event.raw),
    )


def _device_kernel(raw: Any, event: _Event | None) -> Kernel:
    kind = str(raw.device_type()).rpartition(".")[2].lower()
    return Kernel(
        raw.name(),
        event.name if event is not None else "",
        (event.site if event is not None else "") or OUTSIDE,
        f"{kind}:{raw.device_index()}",
        raw.duration_ns() / 1000,
        _inputs(event.raw) if event is not None else (),
    )


def _inputs(raw: Any) -> tuple[Described, ...]:
    return tuple(
        Described(_DTYPES[dtype], tuple(shape))
        for dtype, shape in zip(raw.dtypes(), raw.shapes(), strict=False)
        if dtype in _DTYPES
    )


def _times(events: Sequence[_Event]) -> list[Timed]:
    found: dict[tuple[str, str], Timed] = {}
    for event in events:
        if not _is_operator(event):
            continue
        key = (event.site or OUTSIDE, event.name)
        before = found.get(key, Timed(*key, 0, 0.0, 0.0, 0.0))
        again = _repeats(event)
        found[key] = Timed(
            *key,
            before.calls + (not again),
            before.total + (0.0 if again else event.microseconds),
            before.own + max(0.0, event.microseconds - event.inner_us),
            before.device + event.device_us,
        )
    return list(found.values())
