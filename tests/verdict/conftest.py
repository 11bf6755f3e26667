"""A way to run commands in this process, and one thread for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.commands import Said, caller


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """Run a command line in this process."""
    return caller(capsys, monkeypatch)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
