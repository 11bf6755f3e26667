"""ATB dump trees of every generation as runs, whichever of their folders is given.

Sites are the operations' folder names joined by `.`, a step is the number of the execution's
folder, a rank the device. What lies beside the tensors (topology, csv, profiling) is read when it
is asked for: see `AtbRun`.
"""

from __future__ import annotations

from pathlib import Path

from driftline.errors import BadRun, DriftlineError
from driftline.formats.atb_place import locate
from driftline.formats.atb_run import NAME, AtbRun

__all__ = ["NAME", "AtbRun", "open", "sniff"]


def sniff(path: Path) -> bool:
    """Looks at the names of a few folders."""
    try:
        return locate(path) is not None
    except DriftlineError:
        return True  # several dumps: `open` says which
    except OSError:
        return False


def open(path: Path) -> AtbRun:
    """The dump, or the part of it that the path points to.

    Raises:
        BadRun: There is none, or there are several.
    """
    place = locate(path)
    if place is None:
        raise BadRun(f"{path} is no ATB dump, and no part of one")
    return AtbRun(path, place)
