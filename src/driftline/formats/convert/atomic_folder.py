"""An output folder that appears under its name only when it is complete.

It is written under another name beside it and renamed at the end. A conversion that is stopped
half way leaves nothing under the name that was asked for, and what was there before stays. A killed
process leaves `.NAME.unfinished-PID`, which the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def atomic_folder(place: Path, inner: str = "") -> Generator[Path]:
    """An empty folder to write to, which becomes `place` if all goes well and else is deleted.

    Args:
        place: The name that is asked for.
        inner: The folder in it that becomes `place`, where writers make one of their own.

    Raises:
        OSError: The disk refused.
    """
    place = place.absolute()
    new = not place.parent.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    # In the same folder, hence on the same disk: renaming is then one step.
    working = place.with_name(f".{place.name}{_UNFINISHED}{os.getpid()}")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        yield working
        # The link stays and its target is replaced.
        if place.is_symlink():
            place = place.resolve()
        if place.exists():
            shutil.rmtree(place)
        (working / inner).rename(place)
        if inner:
            shutil.rmtree(working)
    # Also when the user interrupts: half a result must not stay.
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                place.parent.rmdir()
        raise


def _remove_leftovers(place: Path) -> None:
    """Take away what killed processes left of the same output."""
    begin = f".{place.name}{_UNFINISHED}"
    for path in place.parent.iterdir():
        number = path.name.removeprefix(begin)
        if path.name.startswith(begin) and number.isdecimal() and not _is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process of another user exists although it may not be signalled.
    except (OSError, OverflowError):
        return True
    return True
