"""The files of a run that lies in a folder of this machine; `runs/places.py` says what is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from driftline.runs.inside import open_inside, read_inside
from driftline.runs.layout import INDEX
from driftline.runs.shards import Mapped, Shards

if TYPE_CHECKING:
    from driftline.runs.places import Files
    from driftline.runs.run import ReadAhead


def object_in(files: Files, name: str, limit: int) -> Mapping[str, Any]:
    """A file that is one JSON object.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none.
    """
    value = json.loads(files.read(name, limit))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("Mapping[str, Any]", value)


class FolderFiles:
    """Files in a folder of this machine."""

    fetched = False

    def __init__(self, root: Path) -> None:
        """root: The run's folder, links followed."""
        self.root = root
        self._mapped = Mapped()

    def open(self, name: str) -> BinaryIO:
        return os.fdopen(open_inside(self.root, self.root / name), "rb")

    def read(self, name: str, limit: int) -> bytes:
        return read_inside(self.root, self.root / name, limit)

    def names(self, folder: str) -> list[str]:
        try:
            place = self.root / folder
            return sorted(path.name for path in place.iterdir() if not path.is_symlink())
        except OSError:
            return []

    def shards(self, folder: str) -> Shards:
        return Shards(self.root, folder, self._mapped)

    def is_written(self, folder: str) -> bool | None:
        from driftline.runs.liveness import is_held  # only of runs that were not closed

        return is_held(self.root / folder / INDEX)

    def read_ahead(self, parts: Mapping[tuple[int, int], str]) -> ReadAhead | None:
        """Mapped files gain nothing by it."""
        del parts
        return None
