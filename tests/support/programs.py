"""Programs that a test communicates with while they run, and that end with the test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def running(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program that is killed, if it still runs, when the block is left.

    `with subprocess.Popen` would wait for the program instead. If the test failed or exceeded its
    time limit, the program may wait for input that never comes, and nothing would end that wait.
    """
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()  # does nothing if the program has ended
