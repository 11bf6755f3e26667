"""A way to run commands in this process, and one thread for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

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


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """Run a command line in this process, for a wide terminal whatever started the tests."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words: object) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
