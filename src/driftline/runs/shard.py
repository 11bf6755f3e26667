"""One shard file while it grows: reserved header, appended bytes, header written at the end.

It knows offsets, nothing of records, and raises OSError as it comes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from driftline.runs.header import Header
from driftline.runs.layout import align, header_bytes, shard_name
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
    file: int
    header: Header
    end: int

    @classmethod
    def create(cls, folder: Path, number: int, first_header: int, most: int) -> Shard:
        name = shard_name(number)
        reserved = min(header_bytes(number, first_header), align(most))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(folder / name, flags, 0o666)
        # So that sealing succeeds on a disk that is full by then. Not every file system can.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fallocate(file, 0, reserved)
        return cls(number, name, file, Header(reserved), reserved)

    def write(self, data: Bytes, offset: int) -> int:
        """Writes at an offset; returns how many bytes the system took."""
        return os.pwrite(self.file, data.data, offset)

    def seal(self, good_end: int | None) -> None:
        """Writes the header and closes the file.

        Args:
            good_end: Set after a failed write: nothing from there on is on disk.
        """
        try:
            header = self.header
            if good_end is not None:
                header.cut(good_end)
            os.ftruncate(self.file, header.end)
            view = memoryview(header.content())
            # The length field goes last: a file is either an ordinary safetensors file or says
            # header length 0.
            done = 8
            while done < len(view):
                done += os.pwrite(self.file, view[done:], done)
            os.pwrite(self.file, view[:8], 0)
        finally:
            os.close(self.file)
