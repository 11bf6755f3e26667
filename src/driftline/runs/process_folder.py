"""The small files of one process's part of a run: folder, facts, tree, events, index.

Each write goes to the disk at once, and succeeds on a full disk if possible. `journal` writes the
shards; `writer` decides the content of the small files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from driftline.runs.files.owned_file import OwnedFile, write_file
from driftline.runs.jobs import membership
from driftline.runs.layout import (
    EVENTS,
    INDEX,
    PROCESS,
    RESERVE,
    RESERVE_BYTES,
    TOPOLOGY,
    folder_name,
)
from driftline.runs.provenance import dump_json, ensure_manifest, process_facts
from driftline.runs.sinks import JSON

# Blanks after the facts, for the numbers that are added when the part is closed.
_ROOM = 4096


class Part:
    """The folder `rankN` or `rankN.pM`, which only this process writes."""

    def __init__(
        self, path: Path, rank: int, world_size: int, command: Sequence[str] | None
    ) -> None:
        """Create the folder, and the run around it unless that exists.

        Raises:
            OSError: The folder cannot be created or written.
        """
        ensure_manifest(path, command, world_size=world_size)
        process = 0
        # Creating the folder decides the race: the process that creates it owns it, on every file
        # system.
        while True:
            folder = path / folder_name(rank, process)
            try:
                folder.mkdir()
                break
            except FileExistsError:
                process += 1
        self.folder = folder
        self.process = process
        self._events: OwnedFile | None = None
        # Locked while this process lives, so that readers see that it is still writing.
        self._index = OwnedFile(folder / INDEX, locked=True)
        self._facts = {**process_facts(rank, process, world_size), **membership(path)}
        self._make_reserve()

    def append_index(self, text: memoryview) -> tuple[memoryview, OSError | None]:
        """Append lines; returns the text that the disk refused, and the reason."""
        try:
            while text:
                text = text[self._index.append(text) :]
        except OSError as error:
            return text, error
        return text, None

    def append_event(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # an event about a full disk may not fit on it either
            if self._events is None:
                self._events = OwnedFile(self.folder / EVENTS)
            self._events.append(line)

    def append_sheet(self, name: str, text: bytes, *, anew: bool) -> None:
        """Append to another file of this folder, or replace its content.

        Raises:
            OSError: The disk is full.
        """
        with OwnedFile(self.folder / name, "replace" if anew else "append") as file:
            file.append_all(text)

    def write_facts(self, facts: Mapping[str, JSON]) -> None:
        """Replace process.json.

        Raises:
            OSError: The disk is full, and the new text is longer than the old.
        """
        text = dump_json({**self._facts, **facts})
        # Padded with blanks, so that the final facts can be written in place on a full disk.
        room = 0 if facts.get("sealed") else len(text) + _ROOM
        _replace(self.folder / PROCESS, text.ljust(room))

    def write_topology(self, tree: Mapping[str, JSON]) -> None:
        """Replace topology.json.

        Raises:
            OSError: The disk is full.
        """
        _replace(self.folder / TOPOLOGY, dump_json(tree))

    def give_up_reserve(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / RESERVE).unlink(missing_ok=True)

    def take_away(self) -> list[bytes]:
        """Remove the folder, which has no tensor; returns the lines of its events."""
        self.close()
        events: list[bytes] = []
        with contextlib.suppress(OSError):
            events = (self.folder / EVENTS).read_bytes().splitlines(keepends=True)
        with contextlib.suppress(OSError):
            for name in (EVENTS, INDEX, PROCESS, TOPOLOGY, RESERVE):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()
        return events

    def close(self) -> None:
        """Close the files; events may still be appended afterwards."""
        self._index.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _make_reserve(self) -> None:
        with contextlib.suppress(OSError), OwnedFile(self.folder / RESERVE) as file:
            file.reserve(RESERVE_BYTES)


def _replace(path: Path, content: bytes) -> None:
    """Replace a small file in one step; on a full disk, in place if it fits."""
    # Written to a draft that is renamed: readers see the old or the new content, never half of it.
    draft = path.with_name(f".{path.name}.new")
    try:
        write_file(draft, content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        # On a full disk, an existing file that is large enough can still be overwritten in place.
        if not path.exists() or path.stat().st_size < len(content):
            raise
        with OwnedFile(path) as file:
            done = 0
            while done < len(content):
                done += file.write_at(content[done:], done)
            file.truncate(done)
