"""How far a long command is: a bar on stderr, on a terminal only, and only if it takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Nothing is shown before; most comparisons are over by then, and rich need not be loaded.
QUIET_SECONDS = 0.7


class Bar:
    """Counts finished items; call it with (done, in all). A lower number begins a new count."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._done = 0
        self._started: float | None = None
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < self._done:
            # The next text that is generated, say: the time of the last one says nothing about it.
            self.close()
            self._started = None
        self._done = done
        if self._started is None:
            # From the first item on: how long a model loads says nothing about the rest.
            self._started = now
        if self._shown is None:
            if now - self._started < QUIET_SECONDS:
                return
            self._shown = self._show()
        display, task = self._shown
        display.update(task, completed=done, total=total)

    def _show(self) -> tuple[Progress, TaskID]:
        # Only a command that takes a while pays for this import.
        from rich import progress
        from rich.console import Console

        display = progress.Progress(
            progress.MofNCompleteColumn(),
            progress.TextColumn(self.noun),
            progress.BarColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # results must not go where the bar is
        )
        display.start()
        return display, display.add_task(self.noun, total=None)

    def close(self) -> None:
        """Take the bar away, before anything else is printed."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None


@contextmanager
def progress_bar(noun: str, *, quiet: bool = False) -> Generator[Bar | None, None, None]:
    """A bar to report to while the block runs; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = Bar(noun)
    try:
        yield bar
    finally:
        bar.close()
