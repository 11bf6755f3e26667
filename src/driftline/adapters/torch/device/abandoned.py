"""Things that must never be given back, not even when the interpreter ends.

A process that was forked may not touch its parent's device, and after an error on the device no
call succeeds any more. But giving back pinned memory and events asks the device something, in
destructors, where a failure ends the process: so they stay where they are until it has ended.
"""

from __future__ import annotations

import ctypes

_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes = [ctypes.py_object]
_keep.restype = None


def abandon(*things: object) -> None:
    """Hold these, and all that they hold, for as long as there is a process."""
    for thing in things:
        _keep(thing)
