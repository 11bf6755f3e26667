"""Files inside a run's folder, opened as a stranger's: no links out of it, no pipes, no giants."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast


def reason_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__


def is_inside(root: Path, path: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root) and path.is_dir()
    except (OSError, RuntimeError):
        return False


def folders_in(path: Path) -> list[str]:
    """Names of the folders in a folder; links are none, and what cannot be listed has none."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def open_inside(root: Path, path: Path) -> int:
    """Opens a regular file that lies, links followed, inside the run.

    Raises:
        OSError: It does not, or cannot be opened.
    """
    try:
        real = path.resolve(strict=True)
    except RuntimeError:  # a loop of links
        raise OSError(0, "a link that leads nowhere") from None
    if not real.is_relative_to(root):
        raise OSError(0, "leads out of the run's folder; not followed")
    # A named pipe would block here for ever without O_NONBLOCK.
    file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "is not a regular file")
    return file


def read_inside(root: Path, path: Path, limit: int | None) -> bytes:
    with os.fdopen(open_inside(root, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise OSError(0, f"has {size} bytes, more than anybody would write there")
        return file.read()


def read_object(root: Path, path: Path, limit: int) -> Mapping[str, Any]:
    value = json.loads(read_inside(root, path, limit))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("Mapping[str, Any]", value)
