"""What of a run has been sent elsewhere and is no longer here: `.sending.json`, while it is sent.

The sender (`remote/sending.py`) writes it; a reader of the folder asks what is gone, and where to.
It is a note about this machine's folder and goes away with it; nothing is fetched because of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

NOTE = ".sending.json"
_LARGEST = 64 << 20


def read_note(root: Path) -> dict[str, Any] | None:
    """What the sender wrote down; None where nothing is being sent, or the note is garbled."""
    try:
        with (root / NOTE).open("rb") as file:
            note = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", note) if isinstance(note, dict) else None


def write_note(root: Path, note: dict[str, Any]) -> None:
    """Replace the note at once.

    Raises:
        OSError: It cannot be written.
    """
    draft = root / f"{NOTE}.new"
    draft.write_text(json.dumps(note, indent=1), encoding="utf-8")
    draft.replace(root / NOTE)


def sent_to(root: Path, name: str) -> tuple[str, int] | None:
    """Where a file of a run was sent to, and how many bytes it had; None if it was not."""
    note = read_note(root) or {}
    sent: object = note.get("sent")
    size: object = cast("dict[str, object]", sent).get(name) if isinstance(sent, dict) else None
    return (str(note.get("url", "")), size) if type(size) is int else None
