# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false
"""Kernels, compiled once for each kind of element and launched with as few words as possible.

Triton looks at every argument of every launch to choose among its compiled variants: 10 to 20 µs,
several times what a small kernel takes. Ours take plain numbers only, of one type, so that there is
nothing to choose: the compiled kernel is asked directly. Where that is not possible (the
interpreter, a Triton whose inside has changed) the ordinary way is taken.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from driftline import settings
from driftline.numerics.kernel import opened

LEAST_TRITON = (3, 2)
"""Below it `tl` lacks what the kernels use; every torch since 2.6 brings a newer one along."""


_broken = ""
_compiling = threading.Lock()
"""Whoever needs a kernel that another thread is compiling waits for it."""


class CannotLaunch(Exception):
    """A kernel could not be compiled or started for the first time; none is tried again."""


def why_not() -> str:
    """Why kernels cannot run in this process; empty if they can, as far as is known."""
    return _broken or _missing()


@functools.cache
def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton
    except Exception as error:  # a broken installation is nobody's fault here
        return f"Triton cannot be imported: {error}"
    found = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    if found < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"Triton {triton.__version__} is too old, {least} is needed"
    return ""


def interpreted() -> bool:
    """Whether kernels are carried out by Triton's interpreter, on the CPU."""
    return settings.triton_interprets()


@functools.cache
def level() -> int:
    """What kernels may use: 0 in the interpreter, 2 from compute capability 8.0 on, 3 from 9.0 on.

    Of several devices the oldest counts. 0 also where instructions of NVIDIA's mean nothing.
    """
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    oldest = min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))
    return 3 if oldest >= (9, 0) else 2 if oldest >= (8, 0) else 1


class Made(NamedTuple):
    """A compiled kernel as the driver knows it: its handle, threads of a program, shared bytes."""

    function: int
    threads: int
    shared: int


class Kernel:
    """One compiled kernel for all devices of a process.

    What is compiled for the first launch serves all others. Left to itself Triton would compile for
    what it sees in the first one, such as a count that is a multiple of 16, and leave out checks
    that others need; so every argument but addresses is marked `do_not_specialize`. Addresses are
    always multiples of 16.

    Args:
        function: The jitted function; its arguments are numbers, constants come last.
        constants: Their values, in order.
        warps: Warps of a program.
        registers: At most so many for each thread; 0 leaves it to the compiler.
    """

    def __init__(
        self, function: Any, constants: dict[str, Any], *, warps: int, registers: int = 0
    ) -> None:
        self._function = function
        self._constants = constants
        self._options: dict[str, Any] = {"num_warps": warps}
        if registers and not interpreted():
            self._options["maxnreg"] = registers
        self._rest = tuple(constants.values())
        self._ready: dict[int, tuple[Any, Any, Any]] = {}
        self._made: dict[int, Made] = {}

    def __call__(self, programs: int, device: int, *numbers: int) -> None:
        """Launch on the current stream of a device; nothing is waited for."""
        ready = self._ready.get(device)
        if ready is None:
            self._begin(programs, device, numbers)
            return
        run, function, metadata = ready
        run(
            programs,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(device),
            function,
            metadata,
            None,
            None,
            None,
            *numbers,
            *self._rest,
        )

    def made(self, device: int) -> Made | None:
        """What was compiled for a device; None before its first launch, or if nobody can tell."""
        return self._made.get(device)

    def compile(self, device: int) -> None:
        """Compile for a device ahead of the first launch, which then takes milliseconds.

        Raises:
            Exception: Triton cannot; the first launch will say so.
        """
        arguments = len(self._function.arg_names) - len(self._constants)
        with _compiling, torch.cuda.device(device):
            # Numbers of one declared type: which ones they are makes no difference.
            self._function.warmup(*[0] * arguments, grid=(1,), **self._constants, **self._options)

    def _begin(self, programs: int, device: int, numbers: tuple[int, ...]) -> None:
        """The first launch on a device: compile, launch, and remember how to do it at once."""
        if device < 0:  # the interpreter knows no devices
            self._function[(programs,)](*numbers, **self._constants, **self._options)
            return
        if interpreted():  # it would look for the device's addresses in host memory
            raise CannotLaunch("TRITON_INTERPRET is set, and Triton's interpreter reads no device")
        try:
            with _compiling, torch.cuda.device(device):
                made = self._function[(programs,)](*numbers, **self._constants, **self._options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no folder for what it makes, no such target
            raise CannotLaunch(_give_up(error)) from error
        try:
            self._ready[device] = made.run, made.function, made.packed_metadata
        except AttributeError:
            self._ready[device] = _Usual(self._function, self._constants, self._options), None, None
            return
        about = made.metadata
        plain = getattr(about, "num_ctas", 1) == 1 and not getattr(about, "launch_pdl", False)
        if plain and not getattr(about, "launch_cooperative_grid", False):
            self._made[device] = Made(int(made.function), about.num_warps * 32, int(about.shared))


def _give_up(error: Exception) -> str:
    global _broken
    lines = str(error).strip().splitlines() or [""]
    _broken = f"Triton made no kernel ({type(error).__name__}: {lines[0][:200]})"
    return _broken


class _Usual:
    """The ordinary launch, called like the short one."""

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._function = function
        self._constants = constants
        self._options = options

    def __call__(self, programs: int, *rest: Any) -> None:
        numbers = rest[8 : len(rest) - len(self._constants)]
        self._function[(programs,)](*numbers, **self._constants, **self._options)


# What is done for every tensor of a device, in C: launching, copying, and lines of summaries.


_ABI = 2
NUMBERS = 10
"""Arguments of the kernel that reads a tensor."""


class Launch(ctypes.Structure):
    """A kernel and its arguments for tensors of one kind; address, row and slot come later."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("programs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * NUMBERS),
    )


class Words(ctypes.Structure):
    """What is the same in all index lines of one place; see `runs.lines.line_ends`."""

    _fields_ = (
        ("head", ctypes.c_char_p),
        ("tail", ctypes.c_char_p),
        ("head_size", ctypes.c_int64),
        ("tail_size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("brief", ctypes.c_int64),
    )


class Driver(NamedTuple):
    """What is asked of the CUDA driver.

    Attributes:
        launch: Takes the address of a `Launch`, a stream, a tensor's address, a row and a slot;
            returns 0 when the kernel was launched, and does nothing otherwise.
        copy: Takes a context, a stream, where to, where from and how many bytes; likewise.
        context: The calling thread's, 0 without one.
    """

    launch: Callable[[int, int, int, int, int], int]
    copy: Callable[[int, int, int, int, int], int]
    context: Callable[[], int]


@functools.cache
def library() -> Any:
    """The library; None where it was not built."""
    found = opened(Path(__file__).with_name("_launch.so"), "driftline_launch_abi", _ABI)
    if found is None:
        return None
    pointer, number, whole = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
    found.driftline_launch.argtypes = [pointer, number, whole, whole, whole]
    found.driftline_copy.argtypes = [number] * 5
    found.driftline_context.argtypes = []
    found.driftline_context.restype = number
    found.driftline_lines_room.argtypes = [pointer, whole]
    found.driftline_lines_room.restype = whole
    found.driftline_lines.argtypes = [pointer, pointer, whole, whole, pointer]
    found.driftline_lines.restype = whole
    return found


@functools.cache
def driver() -> Driver | None:
    """The CUDA driver by way of the library; None where either is not there."""
    found = library()
    if found is None or found.driftline_open_driver():
        return None
    return Driver(found.driftline_launch, found.driftline_copy, found.driftline_context)


def context_of(device: int) -> int:
    """The driver's context of a device; 0 without one."""
    found = driver()
    if found is None or device < 0:
        return 0
    with torch.cuda.device(device):
        return found.context()


def lines(notes: array[int], rows: int, order: int) -> bytes | None:
    """Index lines of summaries; None where only Python can write them.

    Args:
        notes: Address of the words, step, visit and slot of each.
        rows: Where the row of figures of slot 0 begins.
        order: Number of the first.
    """
    found = library()
    if found is None:
        return None
    many = len(notes) // 4
    at, _ = notes.buffer_info()
    room = ctypes.create_string_buffer(found.driftline_lines_room(at, many))
    used = found.driftline_lines(at, rows, many, order, room)
    return ctypes.string_at(room, used)
