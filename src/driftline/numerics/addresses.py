"""Where the bytes of a Python buffer lie. ctypes itself gives that only of what may be written."""

from __future__ import annotations

import ctypes
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
