"""Where the bytes of a Python buffer lie, and pages of mapped files that are let go.

ctypes itself gives an address only of what may be written.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

from driftline.errors import BadInput

# Function objects of our own: the program may have declared these differently for itself.
_get_buffer: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
    ("PyBuffer_Release", ctypes.pythonapi)
)
_Buffer = ctypes.c_void_p * 16  # a Py_buffer, which begins with the address, and room to spare


def address_of(buffer: bytes | memoryview) -> int:
    """The address of a buffer's first byte; whoever asks must keep the buffer alive.

    >>> import ctypes
    >>> ctypes.string_at(address_of(b"driftline"), 5)
    b'drift'
    """
    view = _Buffer()
    if _get_buffer(buffer, view, 0):
        raise BadInput("only contiguous memory has an address")
    address = view[0]
    _release_buffer(view)
    return address or 0


_PIECE = 64 << 20


def let_go(address: int, length: int) -> None:
    """Let go of the pages of a mapped file, which come back when they are looked at.

    In pieces, and without the interpreter's lock: a file that is unmapped all at once takes 24 ms
    per gigabyte, as long as no other thread of the process is given memory.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)  # not on every system
    if advice is None:
        return
    advise = _madvise()
    for at in range(0, length, _PIECE):
        advise(address + at, min(_PIECE, length - at), advice)


@functools.cache
def _madvise() -> Any:
    # Once: a library that is opened is a class of its own, and stays until garbage is collected.
    takes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return ctypes.CFUNCTYPE(ctypes.c_int, *takes)(("madvise", ctypes.CDLL(None)))
