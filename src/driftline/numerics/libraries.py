"""Our C libraries: plain shared objects beside the modules that call them, loaded by ctypes."""

from __future__ import annotations

import ctypes
import os


def opened(path: str | os.PathLike[str], abi: str, version: int) -> ctypes.CDLL | None:
    """A library; None when it was not built, cannot be loaded here, or is of another version.

    Args:
        path: Where it lies.
        abi: Its function that says which version it is.
        version: The one that the caller knows.
    """
    try:
        library = ctypes.CDLL(os.fspath(path))
        return library if library[abi]() == version else None
    except (OSError, AttributeError):
        return None
