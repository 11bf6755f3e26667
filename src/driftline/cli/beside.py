"""What `driftline compare` does at the same time: it loads what follows, lets go."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

from driftline.cli import script

if TYPE_CHECKING:
    from driftline.runs.run import Run

_LATER = (
    "driftline.comparison.evidence.rules",
    "driftline.comparison.verdict.judge",
    "driftline.comparison.table.files",
    "driftline.reporting.views.comparison",
    "driftline.reporting.writers",
    "driftline.reporting.terminal",
)


def load_meanwhile() -> None:
    """Load what comes after the measuring while the kernel's own threads measure.

    Here and not in a thread of its own: the two would take Python's lock from each other.
    """
    if not script.asked():
        # Whoever needs them imports them again, and hears what may be wrong with them.
        with contextlib.suppress(Exception):
            for name in _LATER:
                importlib.import_module(name)


def release(*runs: Run) -> None:
    """Unmap the files while the report is written: 12 ms per gigabyte, which the exit would take.

    The system does it without Python's lock, so on another core; the exit waits for the thread.
    """
    import threading

    def let_go() -> None:
        for run in runs:
            run.release()

    threading.Thread(target=let_go, name="driftline-release").start()
