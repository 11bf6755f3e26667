"""How far a long command is: one line on stderr that rewrites itself, for terminals only."""

from __future__ import annotations

import sys
import time

_QUIET = 0.7
"""Seconds before anything is said; most comparisons are over by then."""
_PACE = 0.1


class Progress:
    """Counts things done; call it with (done, in all), and `close` it before other output."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.started = time.monotonic()
        self.said = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        spent = now - self.started
        if spent < _QUIET or now - self.said < _PACE:
            return
        self.said = now
        rate = done / spent
        left = (total - done) / rate if rate else 0.0
        line = f"{done} of {total} {self.noun}, {rate:.0f}/s, {left:.0f} s left"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def close(self) -> None:
        if self.said:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def on_terminal(noun: str) -> Progress | None:
    return Progress(noun) if sys.stderr.isatty() else None
