"""Run a command line in the process of a test, and what it answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from driftline.cli.main import main


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def word(self) -> str:
        """The verdict that the first line begins with."""
        return self.out.split(maxsplit=1)[0].rstrip(":").upper() if self.out.strip() else ""


def caller(
    streams: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """A function that runs a command, for a wide terminal whatever started the tests.

    Args:
        streams: `capsys`, or `capfd` where other libraries write, too.
        monkeypatch: Of the same test.
    """
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: object) -> Said:
        streams.readouterr()
        code = main([str(word) for word in words])
        return Said(code, *streams.readouterr())

    return call
