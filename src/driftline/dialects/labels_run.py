"""A program that labels tensors is run, its labels kept for the comparison afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from driftline import settings
from driftline.launch.child import require_command, run_child


def run_labelled(argv: Sequence[str], store: Path) -> int:
    """Run a program whose labels go into a folder; returns its exit status.

    Args:
        argv: The program, word by word.
        store: Where the labels go; the program makes the folder with its first label.

    Raises:
        BadInput: There is no such program.
    """
    environment = {
        **settings.environment(),
        settings.LABELS: str(store),
        settings.LABELS_AWAITED: "1",
    }
    require_command(argv, environment)
    return run_child(argv, environment)
