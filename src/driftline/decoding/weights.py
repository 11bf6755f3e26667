"""Which weights a model has: a short text that is another one as soon as a single number changes.

Of a folder all weights and the config are read, whole; of an id it is the hub's commit, as far as
it is known without the weights. Whether two such texts must agree is decided elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import numpy as np

from driftline.decoding.hub import commit_of
from driftline.numerics import kernel

_PIECE = 64 << 20
_SUFFIXES = (".safetensors", ".bin")


def weights_of(source: str) -> str | None:
    """Tells a model from one that was trained on, or is set up in another way.

    Args:
        source: A folder, or an id.

    Returns:
        None where nothing is known: an id that this machine does not keep and the hub does not
        tell.
    """
    folder = Path(source)
    if not folder.is_dir():
        commit = commit_of(source)
        return f"commit {commit}" if commit else None
    made = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES or path.name == "config.json":
            about = path.stat()
            made.update(f"{path.name} {about.st_size} ".encode("utf-8", "surrogateescape"))
            made.update(_digest(path, about.st_size, about.st_mtime_ns).encode())
    return made.hexdigest()[:32]


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> str:
    """Of a file's bytes, all of them; known again while size and time stay what they are."""
    del size, changed
    room = np.empty(min(_PIECE, max(path.stat().st_size, 1)), np.uint8)
    parts: list[str] = []
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(room.data):
            parts.append(kernel.digest(room[:count]))
    return " ".join(parts)
