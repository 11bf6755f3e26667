"""A progress bar on stderr for commands that take a while; shown on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# The bar appears after this time. Most comparisons end earlier and need not import rich.
QUIET_SECONDS = 0.7


class Bar:
    """Counts finished items; call it with (done, total). A lower `done` begins a new count."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._done = 0
        self._started: float | None = None
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < self._done:
            # A new count, such as the next generated text: the old timing does not apply to it.
            self.close()
            self._started = None
        self._done = done
        if self._started is None:
            # Time from the first item: loading a model says nothing about the speed of the rest.
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
    """A progress bar for the time the block runs; None if stderr is not a terminal, or quiet."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = Bar(noun)
    try:
        yield bar
    finally:
        bar.close()
