"""One shard file while it grows: reserved header, appended bytes, header written at the end.

It knows offsets, nothing of records, and raises OSError as it comes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from driftline.runs.header import Header
from driftline.runs.layout import align, header_bytes, shard_name
from driftline.runs.owned_file import OwnedFile
from driftline.runs.sink import Bytes


@dataclass(slots=True)
class Shard:
    """A file being filled.

    Attributes:
        header: What it lists so far, and room for more.
        end: Where the next byte goes, counting what is still staged.
    """

    number: int
    name: str
    file: OwnedFile
    header: Header
    end: int

    @classmethod
    def create(cls, folder: Path, number: int, first_header: int, most: int) -> Shard:
        name = shard_name(number)
        reserved = min(header_bytes(number, first_header), align(most))
        file = OwnedFile(folder / name, "new")
        # So that sealing succeeds on a disk that is full by then. Not every file system can.
        with contextlib.suppress(OSError):
            file.reserve(reserved)
        return cls(number, name, file, Header(reserved), reserved)

    def write(self, data: Bytes, offset: int) -> int:
        """Writes at an offset; returns how many bytes the system took."""
        return self.file.write_at(data.data, offset)

    def seal(self, good_end: int | None) -> None:
        """Writes the header and closes the file.

        Args:
            good_end: Set after a failed write: nothing from there on is on disk.
        """
        try:
            header = self.header
            if good_end is not None:
                header.cut(good_end)
            self.file.truncate(header.end)
            view = memoryview(header.content())
            # The length field goes last: a file is either an ordinary safetensors file or says
            # header length 0.
            done = 8
            while done < len(view):
                done += self.file.write_at(view[done:], done)
            self.file.write_at(view[:8], 0)
        finally:
            self.file.close()
