"""What is done for every tensor of a device, in C: launching, copying, and lines of summaries.

`launch.c` is built into a plain shared library beside this file. Without it, or without a CUDA
driver, callers do the same in Python, several times as slowly.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from driftline.numerics.kernel import opened

_ABI = 1
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
        notes: Address of the words, step and visit of each.
        rows: Where their rows of figures begin.
        order: Number of the first.
    """
    found = library()
    if found is None:
        return None
    many = len(notes) // 3
    at, _ = notes.buffer_info()
    room = ctypes.create_string_buffer(found.driftline_lines_room(at, many))
    used = found.driftline_lines(at, rows, many, order, room)
    return ctypes.string_at(room, used)
