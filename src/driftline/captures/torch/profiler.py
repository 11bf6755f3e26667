# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""torch's profiler in a capture: kernels with their operators, and times by operator and site.

`read_profile` turns the profiler's events into values; `ProfileTap` runs the profiler in the
selected steps. On a GPU a kernel is whatever the device ran, and its operator is the one that
launched it. On a CPU a kernel is the innermost native function that computes something itself;
views and allocations do not count.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import profiler

from driftline.captures.torch.operators.schema import Operator
from driftline.captures.torch.session import Frame
from driftline.runs.sidecars.operator_sheets import HEADER as KERNEL_HEADER
from driftline.runs.sidecars.operator_sheets import (
    KERNELS,
    STATISTIC,
    TIMES,
    Described,
    Timed,
    added,
    operation_row,
    statistic_text,
    times_table,
)

SITE_MARK = "driftline site:"
OWN_MARK = "driftline itself"
OUTSIDE = "(program)"
BACKWARD = "(backward)"
# A CSV file of this length is already more than a person or a spreadsheet can read.
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
"""Element types by their C++ names."""


class Kernel(NamedTuple):
    """One kernel that ran.

    Attributes:
        name: Its name on the device, or that of the native function on a CPU.
        operator: The operator that launched it; on a CPU, the outermost operator around it.
        site: The module that was running; `(program)` outside of all modules.
        device: The device, such as `cpu` or `cuda:0`.
        microseconds: Its duration.
        inputs: The tensors that were passed to the operator, or to the native function.
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
    """The contents of one profile."""

    kernels: tuple[Kernel, ...]
    times: tuple[Timed, ...]


class _Event:
    """An event of a thread, with the event around it and the sums of those inside it."""

    __slots__ = (
        *("computing", "device_us", "end", "inner_us", "is_wrapper", "name", "own", "parent"),
        *("raw", "site"),
    )

    def __init__(self, raw: Any, parent: _Event | None) -> None:
        self.raw = raw
        self.name: str = raw.name()
        self.parent = parent
        self.end: int = raw.end_ns()
        self.inner_us = 0.0
        self.device_us = 0.0
        self.computing = False  # whether something inside it computes
        # If a dispatch mode watches the operators, each call appears twice: as the call that the
        # mode receives, and inside it as the call that the mode makes.
        self.is_wrapper = False
        if parent is not None and parent.name == _WATCHED and parent.parent is not None:
            parent.parent.is_wrapper |= parent.parent.name == self.name
        self.own: bool = self.name == OWN_MARK or (parent is not None and parent.own)
        above = parent.site if parent is not None else ""
        if self.name.startswith(SITE_MARK):
            above = self.name[len(SITE_MARK) :]
        elif self.name.startswith(_ENGINE):
            above = BACKWARD
        self.site: str = above

    @property
    def microseconds(self) -> float:
        return self.raw.duration_ns() / 1000


def read_profile(results: Any) -> Profiled:
    """The kernels and times of one profile."""
    host, device = [], []
    for raw in results.events():
        on_host = str(raw.device_type()).endswith("CPU")
        is_own_mark = raw.name().startswith(SITE_MARK) or raw.name() == OWN_MARK
        # The program's annotations are not operations of torch.
        if on_host and (is_own_mark or not raw.is_user_annotation()):
            host.append(raw)
        elif not on_host and raw.duration_ns() >= 0:
            device.append(raw)
    events = _nested(host)
    launched = {event.raw.correlation_id(): event for event in events if _is_operator(event)}
    kernels: list[tuple[int, Kernel]] = []
    for raw in device:
        event = launched.get(raw.linked_correlation_id())
        # Copies that the capture itself made are not the program's kernels.
        if raw.is_user_annotation() or raw.name().startswith(SITE_MARK) or (event and event.own):
            continue
        if event is not None:
            event.device_us += raw.duration_ns() / 1000
        kernels.append((raw.start_ns(), _device_kernel(raw, event)))
    # If a device ran anything, the host's functions only launched kernels; otherwise they are the
    # kernels.
    if not device:
        kernels = [
            (event.raw.start_ns(), _host_kernel(event)) for event in events if _is_kernel(event)
        ]
    kernels.sort(key=lambda started: started[0])
    return Profiled(tuple(kernel for _, kernel in kernels[:MOST_KERNELS]), tuple(_times(events)))


def _nested(host: Sequence[Any]) -> list[_Event]:
    """Events with their parents. Events of one thread overlap only if one contains the other."""
    threads: dict[int, list[Any]] = {}
    for raw in host:
        threads.setdefault(raw.start_thread_id(), []).append(raw)
    events: list[_Event] = []
    for raws in threads.values():
        # Of two events that start together, the longer one contains the other.
        raws.sort(key=lambda raw: (raw.start_ns(), -raw.end_ns()))
        stack: list[_Event] = []
        for raw in raws:
            # An event of no duration at the end of another one is inside it, not after it.
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
        and not event.is_wrapper
        and not event.name.startswith((SITE_MARK, _ENGINE))
        and _OPERATOR.fullmatch(event.name) is not None
        and not event.name.startswith("torch::autograd")
    )


def _repeats(event: _Event) -> bool:
    """Whether an overload was called by another of the same name, so that both are one call."""
    above = event.parent
    return above is not None and above.name == event.name and not above.is_wrapper


def _is_kernel(event: _Event) -> bool:
    if not _is_operator(event) or _repeats(event) or _is_silent(event.name):
        return False
    # A composite operator without a kernel only calls others, which are listed themselves.
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
    return bool(overloads) and all(Operator(overload).silent for overload in overloads)


@functools.lru_cache(4096)
def _has_own_kernel(name: str) -> bool:
    has: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    if has is None:
        return False
    for overload in _overloads(name):
        try:
            if has(overload.name(), "CPU"):
                return True
        except RuntimeError:  # the operator exists in TorchScript only
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
    times_by_place: dict[tuple[str, str], Timed] = {}
    for event in events:
        if not _is_operator(event):
            continue
        key = (event.site or OUTSIDE, event.name)
        before = times_by_place.get(key, Timed(*key, 0, 0.0, 0.0, 0.0))
        again = _repeats(event)
        times_by_place[key] = Timed(
            *key,
            # An overload that another of its name called is not counted, but its own time is.
            before.calls + (not again),
            before.total + (0.0 if again else event.microseconds),
            before.own + max(0.0, event.microseconds - event.inner_us),
            before.device + event.device_us,
        )
    return list(times_by_place.values())


# Running the profiler in the selected steps.


Named = Sequence[tuple[str, str, torch.Tensor]]

_torch_profiler: Any = profiler
_C: Any = torch._C
_Mark: Any = getattr(_C._profiler, "_RecordFunctionFast", None)
_ENTRY_POINTS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch with which every profiler begins. torch looks them up at each call."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.marks: list[tuple[Frame, Any]] = []


class ProfileTap:
    """Runs the profiler in the selected steps and writes kernels and times.

    Args:
        session: The session of the capture.
        write: Writes a sheet, from its name and text; see `Sheets.sheet`.
        kernels: Whether to list every kernel that ran.
        times: Whether to add up calls and times by operator.
    """

    def __init__(
        self, session: Any, write: Callable[..., None], *, kernels: bool, times: bool
    ) -> None:
        self.session = session
        self.active = False
        self._write = write
        self._kernels = kernels
        self._times = times
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._running: Any | None = None
        self._step = 0
        self._ours = False
        self._forked = False
        self._model_called = False
        self._waiting = False
        self._process = os.getpid()
        self._before: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._listed: dict[int, int] = {}
        self._timed: dict[int, tuple[Timed, ...]] = {}

    # --- begin and end

    def install(self) -> None:
        self.active = True
        # torch runs one profiler at a time: this one must stop before the program's begins.
        for name in _ENTRY_POINTS:
            self._before[name] = getattr(_torch_profiler, name)
            setattr(_torch_profiler, name, self._after_ours_stops(self._before[name]))
        recorder = self.session.recorder
        # The capture's work is marked, so that its kernels and times can be left out.
        for name in ("take", "take_all"):
            self._parts[name] = getattr(recorder, name)
            setattr(recorder, name, _marked(self._parts[name]))
        self.session.take = recorder.take
        if not torch.cuda.is_initialized():
            lazily: Any = getattr(torch.cuda, "_lazy_call", None)
            if lazily is not None:
                lazily(self._device_came)
        # Whatever runs before the first model call belongs to step 0. Kineto, the library with
        # which torch profiles, must be initialised by this thread, even if step 0 is not selected.
        if self.session.global_scope:
            self._waiting = _may_get_a_device()
            if not self._waiting:
                self._begin()

    def _begin(self, *, device: bool = False) -> None:
        self._start(0, device=device)
        if not self.session.wants_step(0):
            self._stop()

    def remove(self) -> None:
        self.active = False
        with self._lock:
            self._finish()
        if self._waiting and not self._model_called and self._process == os.getpid():
            self.session.event_once(
                "profiler",
                "no model was called and the GPU of this machine was not used, for which the "
                "profiler waits: no kernels or times are listed; with CUDA_VISIBLE_DEVICES= in the "
                "environment those of the CPU are",
            )
        for name, function in self._before.items():
            setattr(_torch_profiler, name, function)
        # The wrapped methods were set on the instance. Without them, those of the class are used.
        for name in self._parts:
            delattr(self.session.recorder, name)
        self.session.take = self.session.recorder.take

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `module_calls` around each call of a root module."""
        frame = self.session.current_frame()
        if self.active and frame is not None and not frame.place.root.helper:
            with self._lock:
                self._at_step(frame.step)
        open_ = len(self._thread.marks)
        try:
            yield
        finally:
            self._close_marks(open_)

    def before_forward(self, frame: Frame, inputs: Named) -> None:
        # Older versions of torch have no fast marks, and kernels have no sites there.
        if self._running is not None and _Mark is not None:
            mark = _Mark(f"{SITE_MARK}{frame.site}")
            mark.__enter__()
            self._thread.marks.append((frame, mark))

    def on_forward(self, frame: Frame, inputs: Named, outputs: Named) -> None:
        marks = self._thread.marks
        for index in range(len(marks) - 1, -1, -1):
            if marks[index][0] is frame:
                self._close_marks(index)
                return

    def _close_marks(self, downto: int) -> None:
        marks = self._thread.marks
        while len(marks) > downto:
            marks.pop()[1].__exit__(None, None, None)

    # --- the profiler

    def _at_step(self, step: int) -> None:
        if self._process != os.getpid():  # a forked child: the profiler is its parent's
            self._process = os.getpid()
            self._forked, self._running = self._running is not None, None
        first, self._model_called = not self._model_called, True
        if first:
            self._stop()  # only the model was built so far
        elif self._running is not None and step == self._step:
            return
        else:
            self._finish()
        if self.session.wants_step(step):
            self._start(step)

    def _start(self, step: int, *, device: bool = False) -> None:
        self._waiting = False
        if self._forked:
            self.session.event_once(
                "profiler",
                "this process was forked while its parent was profiled: its kernels and times are "
                "not listed",
            )
            return
        # Kineto supports one profiler at a time.
        if getattr(_torch_profiler, "_is_profiler_enabled", False):
            self.session.event_once(
                "profiler",
                "the program runs torch's profiler itself: kernels and times are not listed",
            )
            return
        self._ours = True
        try:
            running = _torch_profiler.profile(
                # Checking for a GPU would initialise it, and then the children that a program forks
                # later could not use it.
                use_device="cuda" if device or torch.cuda.is_initialized() else None,
                use_kineto=True,  # without it, there are only times between marks on a device
                record_shapes=True,
                experimental_config=_every_thread(),
            )
            running.__enter__()
            self._running, self._step = running, step
        except Exception as error:
            self.session.event_once("profiler", f"torch's profiler could not start: {error}")
        finally:
            self._ours = False

    def _device_came(self) -> None:
        """The program begins to use a GPU: start again, so that its kernels are profiled too."""
        self.session.guarded("profile", self._start_again)

    def _start_again(self) -> None:
        with self._lock:
            if not self.active or self._process != os.getpid():
                return
            if self._running is not None:
                self._finish()
                self._start(self._step, device=True)
            elif self.session.global_scope and not self._model_called:
                self._begin(device=True)

    def _stop(self) -> Any | None:
        running, self._running = self._running, None
        if running is None or self._process != os.getpid():
            return None
        self._ours = True
        try:
            running.__exit__(None, None, None)
            return running.kineto_results
        except Exception as error:
            self.session.event_once("profiler", f"torch's profiler could not stop: {error}")
            return None
        finally:
            self._ours = False

    def _finish(self) -> None:
        results = self._stop()
        if results is not None:
            self.session.guarded("profile", self._write_sheets, read_profile(results))

    def _after_ours_stops(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """A function that begins a profiler, and stops this one before it."""

        @functools.wraps(begin)
        def stop_and_begin(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None and not self._ours:
                with self._lock:
                    self._finish()
                self.session.event_once(
                    "profiler",
                    "the program began to profile itself: kernels and times after that are not "
                    "listed",
                )
            return begin(*args, **kwargs)

        return stop_and_begin

    # --- sheets

    def _write_sheets(self, seen: Profiled) -> None:
        step = self._step
        if self._kernels and seen.kernels:
            # A second model of the program counts its own steps, so a number may come again.
            before = self._listed.get(step, 0)
            self._listed[step] = before + len(seen.kernels)
            lines = [
                operation_row(number, kernel.name, kernel.param(), kernel.inputs, ())
                for number, kernel in enumerate(seen.kernels, before + 1)
            ]
            header = [] if before else [KERNEL_HEADER]
            self._write(KERNELS.format(step), "\n".join((*header, *lines)) + "\n")
        if self._times and seen.times:
            # The sums have changed, so the whole file is written again.
            self._timed[step] = added(self._timed.get(step, ()), seen.times)
            self._write(STATISTIC.format(step), statistic_text(self._timed[step]), anew=True)
            self._write(TIMES.format(step), times_table(self._timed[step]), anew=True)
        if self._kernels and not seen.kernels and self._model_called:
            self.session.event_once("kernels", "torch's profiler saw no kernel in a step")


def _may_get_a_device() -> bool:
    """Whether the program may begin to use a GPU later; this does not initialise the GPU.

    Kineto decides at its first start whether it can profile a device. Its start also prevents
    children that are forked later from using the device, so it must wait for the program.
    """
    if torch.version.cuda is None or torch.cuda.is_initialized():
        return False
    count: Any = getattr(torch.cuda, "_device_count_nvml", None)
    return count is None or count() != 0


def _every_thread() -> Any | None:
    """The configuration with which the profiler covers every thread and any thread may stop it.

    None in versions of torch that do not have it.
    """
    try:
        return _C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        return None


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a mark around it, which identifies work of the capture."""
    if _Mark is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Mark(OWN_MARK):
            return function(*args, **kwargs)

    return call
