"""Run a command line in the process of a test, and return its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from driftline.cli.main import main


class Said(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def word(self) -> str:
        """The first word of the output, which is the verdict, in capitals."""
        return self.out.split(maxsplit=1)[0].rstrip(":").upper() if self.out.strip() else ""


def caller(
    streams: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """A function that runs a command, with the width of a wide terminal.

    Args:
        streams: `capsys`, or `capfd` if other libraries write too.
        monkeypatch: The fixture of the same test.
    """
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: object) -> Said:
        streams.readouterr()
        code = main([str(word) for word in words])
        return Said(code, *streams.readouterr())

    return call
