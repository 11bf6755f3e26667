"""What torch's own profiler sees of the selected steps: kernels with their operators, and times.

`dump --type kernel` and `--type cpu_profiling` are made of it. It runs from the first call of a
model in a step to the first call in the next; a program that calls no model is seen whole. A
profiler of the program's own goes first: ours ends when it begins. Modules leave marks in the
profile, which tell the sites; so does the capture itself, whose own work is left out. What a sheet
looks like is not known here.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from driftline.adapters.torch.profiled import OWN, SITE, Profiled, read_profile
from driftline.adapters.torch.taps import Frame
from driftline.runs.sheets import HEADER as KERNEL_HEADER
from driftline.runs.sheets import (
    KERNELS,
    STATISTIC,
    TIMES,
    Timed,
    added,
    operation_row,
    statistic_text,
    times_table,
)

Named = Sequence[tuple[str, str, torch.Tensor]]

_torch_profiler: Any = profiler
_C: Any = torch._C
_Mark: Any = getattr(_C._profiler, "_RecordFunctionFast", None)
_DOORS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch through which every profiler begins, looked up by name at each call."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.marks: list[tuple[Frame, Any]] = []


class ProfileTap:
    """Runs the profiler in the selected steps and writes what it saw.

    Args:
        session: The capture that it belongs to.
        write: Takes the name of a sheet and its text; `Sheets.sheet`.
        kernels: List every kernel that ran.
        times: Add up calls and times by operator.
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

    # --- life

    def install(self) -> None:
        self.active = True
        for name in _DOORS:
            self._before[name] = getattr(_torch_profiler, name)
            setattr(_torch_profiler, name, self._giving_way(self._before[name]))
        intake = self.session.intake
        for name in ("take", "take_all"):
            self._parts[name] = getattr(intake, name)
            setattr(intake, name, _marked(self._parts[name]))
        self.session.take = intake.take
        if not torch.cuda.is_initialized():
            lazily: Any = getattr(torch.cuda, "_lazy_call", None)
            if lazily is not None:
                lazily(self._device_came)
        # Steps count from 0: what runs before any model is a part of the first. The library below
        # wants to be woken by this thread, even where that step is of no interest.
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
        for name in self._parts:
            delattr(self.session.intake, name)
        self.session.take = self.session.intake.take

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `modules.py` around each call of a root module."""
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
        if self._running is not None and _Mark is not None:
            mark = _Mark(f"{SITE}{frame.site}")
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
            self._stop()  # what ran so far was the building of the model
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
        if getattr(_torch_profiler, "_is_profiler_enabled", False):
            self.session.event_once(
                "profiler",
                "the program runs torch's profiler itself: kernels and times are not listed",
            )
            return
        self._ours = True
        try:
            running = _torch_profiler.profile(
                # Asking whether there is a GPU would wake it, and a program that forks later could
                # no longer use it in its children.
                use_device="cuda" if device or torch.cuda.is_initialized() else None,
                use_kineto=True,  # without it, a device shows no kernels, only times between marks
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
        """The program begins to use a GPU: what runs there is to be seen too."""
        self.session.shielded("profile", self._start_again)

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
            self.session.shielded("profile", self._write_sheets, read_profile(results))

    def _giving_way(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def first(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None and not self._ours:
                with self._lock:
                    self._finish()
                self.session.event_once(
                    "profiler",
                    "the program began to profile itself: kernels and times after that are not "
                    "listed",
                )
            return begin(*args, **kwargs)

        return first

    # --- what it saw

    def _write_sheets(self, seen: Profiled) -> None:
        step = self._step
        if self._kernels and seen.kernels:
            # A second model of the program counts its own steps: it comes to this one again.
            before = self._listed.get(step, 0)
            self._listed[step] = before + len(seen.kernels)
            lines = [
                operation_row(number, kernel.name, kernel.param(), kernel.inputs, ())
                for number, kernel in enumerate(seen.kernels, before + 1)
            ]
            header = [] if before else [KERNEL_HEADER]
            self._write(KERNELS.format(step), "\n".join((*header, *lines)) + "\n")
        if self._times and seen.times:
            self._timed[step] = added(self._timed.get(step, ()), seen.times)
            self._write(STATISTIC.format(step), statistic_text(self._timed[step]), anew=True)
            self._write(TIMES.format(step), times_table(self._timed[step]), anew=True)
        if self._kernels and not seen.kernels and self._model_called:
            self.session.event_once("kernels", "torch's profiler saw no kernel in a step")


def _may_get_a_device() -> bool:
    """Whether the program may yet begin to use a GPU; found out without waking it.

    The library below decides at its first start whether it will ever see a device, and its start
    alone takes the device from children that are forked later: it has to wait for the program.
    """
    if torch.version.cuda is None or torch.cuda.is_initialized():
        return False
    count: Any = getattr(torch.cuda, "_device_count_nvml", None)
    return count is None or count() != 0


def _every_thread() -> Any | None:
    """What makes the profiler see every thread, and be ended by any; None in older versions."""
    try:
        return _C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        return None


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The capture's own work, with a mark around it."""
    if _Mark is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Mark(OWN):
            return function(*args, **kwargs)

    return call
