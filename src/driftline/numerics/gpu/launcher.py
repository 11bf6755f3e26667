# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false
"""Compile kernels once for each kind of element, and launch them with little overhead.

On every launch, Triton inspects all arguments to choose among its compiled variants. That takes 10
to 20 µs, several times as long as a small kernel. Our kernels take only numbers of one type, so
there is nothing to choose, and the compiled kernel is launched directly. If that is not possible
(in the interpreter, or after internal changes of Triton), the ordinary launch is used.
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
"""Older versions lack functions that the kernels use; torch 2.6 and later install a newer one."""


_broken = ""
_compiling = threading.Lock()
"""A thread that needs a kernel waits while another thread compiles it."""


class CannotLaunch(Exception):
    """A kernel could not be compiled or launched for the first time; no other is tried."""


def why_not() -> str:
    """Why kernels cannot run in this process; empty if no reason is known."""
    return _broken or _missing()


@functools.cache
def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton
    except Exception as error:  # a broken installation must not end the program
        return f"Triton cannot be imported: {error}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    if version < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"Triton {triton.__version__} is too old, {least} is needed"
    return ""


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU."""
    return settings.triton_interprets()


@functools.cache
def level() -> int:
    """LEVEL of the kernels: 0 in the interpreter, 2 from compute capability 8.0 on, 3 from 9.0 on.

    The oldest of several devices counts. It is 0 on devices that are not NVIDIA's.
    """
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    oldest = min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))
    return 3 if oldest >= (9, 0) else 2 if oldest >= (8, 0) else 1


class Made(NamedTuple):
    """A compiled kernel as the driver knows it: handle, threads of a program, shared bytes."""

    function: int
    threads: int
    shared: int


class Kernel:
    """One kernel, compiled once for all devices of a process.

    The variant that the first launch compiles serves all others. By default, Triton would
    specialise it for the first arguments, for example for a count that is a multiple of 16, and
    omit checks that others need. So every argument except addresses is marked `do_not_specialize`;
    addresses are always multiples of 16.

    Args:
        function: The jitted function. Its arguments are numbers; the constants come last.
        constants: Values of the constants, in order.
        warps: Number of warps of a program.
        registers: Largest number of registers per thread; 0 lets the compiler choose.
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
        """Launch on the current stream of a device, without waiting."""
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
        """The compiled kernel of a device; None before the first launch or if it is hidden."""
        return self._made.get(device)

    def compile(self, device: int) -> None:
        """Compile for a device before the first launch, which then takes milliseconds.

        Raises:
            Exception: Triton cannot compile it; the first launch will report that.
        """
        arguments = len(self._function.arg_names) - len(self._constants)
        with _compiling, torch.cuda.device(device):
            # All arguments have one declared type, so their values make no difference.
            self._function.warmup(*[0] * arguments, grid=(1,), **self._constants, **self._options)

    def _begin(self, programs: int, device: int, numbers: tuple[int, ...]) -> None:
        """Compile and launch for the first time on a device; remember how to launch directly."""
        if device < 0:  # the interpreter has no devices
            self._function[(programs,)](*numbers, **self._constants, **self._options)
            return
        if interpreted():  # it would look for device addresses in host memory
            raise CannotLaunch("TRITON_INTERPRET is set, and Triton's interpreter reads no device")
        try:
            with _compiling, torch.cuda.device(device):
                made = self._function[(programs,)](*numbers, **self._constants, **self._options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no cache folder, no such target
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
    """The ordinary launch, with the arguments of the direct one."""

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._function = function
        self._constants = constants
        self._options = options

    def __call__(self, programs: int, *rest: Any) -> None:
        numbers = rest[8 : len(rest) - len(self._constants)]
        self._function[(programs,)](*numbers, **self._constants, **self._options)


# The work of launch.c: launching, copying, and lines of summaries.


_ABI = 2
NUMBERS = 10
"""Number of arguments of the kernel that reads a tensor."""


class Launch(ctypes.Structure):
    """A kernel and its arguments for tensors of one kind; the call adds address, row and slot."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("programs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * NUMBERS),
    )


class Words(ctypes.Structure):
    """The constant parts of all index lines of one tensor; see `runs.index_lines.line_ends`."""

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
    """Functions of the CUDA driver.

    Attributes:
        launch: Takes the address of a `Launch`, a stream, a tensor's address, a row and a slot.
            Returns 0 if the kernel was launched; otherwise nothing was done.
        copy: Takes a context, a stream, a target, a source and a number of bytes; returns likewise.
        context: Returns the calling thread's context; 0 if there is none.
    """

    launch: Callable[[int, int, int, int, int], int]
    copy: Callable[[int, int, int, int, int], int]
    context: Callable[[], int]


@functools.cache
def library() -> Any:
    """The library of launch.c; None if it was not built."""
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
    """The CUDA driver, through the library; None if either is missing."""
    found = library()
    if found is None or found.driftline_open_driver():
        return None
    return Driver(found.driftline_launch, found.driftline_copy, found.driftline_context)


def context_of(device: int) -> int:
    """The driver's context of a device; 0 if there is none."""
    found = driver()
    if found is None or device < 0:
        return 0
    with torch.cuda.device(device):
        return found.context()


def lines(notes: array[int], rows: int, order: int) -> bytes | None:
    """Index lines of summaries; None if the library is missing, so that Python must write them.

    Args:
        notes: Address of the words, step, visit and slot of each line.
        rows: Address of the row of figures of slot 0.
        order: Order of the first line.
    """
    found = library()
    if found is None:
        return None
    many = len(notes) // 4
    at, _ = notes.buffer_info()
    room = ctypes.create_string_buffer(found.driftline_lines_room(at, many))
    used = found.driftline_lines(at, rows, many, order, room)
    return ctypes.string_at(room, used)
