"""Programs that a test talks to while they run, and that never outlive it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def running(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program, killed at the latest when the block is left.

    `with subprocess.Popen` waits instead, also for a program that no longer gets what it waits for,
    because the test failed or its time was over; nothing ends that wait a second time.
    """
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()  # does nothing to one that has ended
