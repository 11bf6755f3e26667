"""Who is writing: a lock of the system on a file that is written, which ends with its process.

No file of its own, so nothing is left behind: a killed process's lock is gone with it, whatever it
could not clean up. Clocks and process numbers are not looked at. File systems without such locks
(some network ones) tell nothing, and then nobody is held up.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None


def hold(file: int) -> bool:
    """Take the lock of an open file for as long as it stays open; False if somebody has it."""
    if fcntl is None:
        return True
    for wait in (0.01, 0.05, 0.0):  # who only asks whether it is held has it for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait)
        except OSError:  # no locks here
            return True
        else:
            return True
    return False


def hold_path(path: Path) -> int | None:
    """Open a file and take its lock; None if somebody has it. Closing what is returned ends it.

    Raises:
        OSError: It cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hold(file):
        return file
    os.close(file)
    return None


def is_held(path: Path) -> bool | None:
    """Whether a living process holds a file's lock; None where that cannot be told."""
    if fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        return False
    finally:
        os.close(file)
