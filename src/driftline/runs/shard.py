"""One shard file while it grows: reserved header, appended bytes, header written at the end.

It knows offsets and entries, nothing of records' meaning, and raises OSError as it comes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from driftline.numerics.dtypes import DTYPES
from driftline.runs.layout import (
    LONGEST_NAME,
    Entry,
    align,
    build_header,
    entry_cost,
    header_bytes,
    metadata_cost,
    shard_name,
)
from driftline.runs.record import Blob, Record
from driftline.runs.sink import Bytes


@dataclass(slots=True)
class Shard:
    """A file being filled.

    Attributes:
        reserved: Bytes kept free for the header; data begin there.
        end: Where the next byte goes, counting what is still staged.
        room: Header bytes left for entries.
        stored: What the header will list.
    """

    number: int
    name: str
    file: int
    reserved: int
    end: int
    room: int
    stored: list[tuple[Record, int, Blob]] = field(default_factory=list[tuple[Record, int, Blob]])

    @classmethod
    def create(cls, folder: Path, number: int, first_header: int, most: int) -> Shard:
        name = shard_name(number)
        reserved = min(header_bytes(number, first_header), align(most))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(folder / name, flags, 0o666)
        # So that sealing succeeds on a disk that is full by then. Not every file system can.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fallocate(file, 0, reserved)
        return cls(number, name, file, reserved, reserved, reserved - 8 - metadata_cost())

    def write(self, data: Bytes, offset: int) -> int:
        """Writes at an offset; returns how many bytes the system took."""
        return os.pwrite(self.file, data.data, offset)

    def seal(self, good_end: int | None) -> None:
        """Writes the header and closes the file.

        Args:
            good_end: Set after a failed write: nothing from there on is on disk.
        """
        try:
            stored = self.stored
            end = self.end
            if good_end is not None:
                stored = [s for s in stored if s[2].offset + s[2].length <= good_end]
                end = max((s[2].offset + s[2].length for s in stored), default=self.reserved)
            os.ftruncate(self.file, end)
            header = build_header(_entries(stored), reserved=self.reserved, end=end)
            view = memoryview(header)
            # The length field goes last: a file is either an ordinary safetensors file or says
            # header length 0.
            done = 8
            while done < len(view):
                done += os.pwrite(self.file, view[done:], done)
            os.pwrite(self.file, view[:8], 0)
        finally:
            os.close(self.file)


_REST_OF_A_NAME = len("step/#///@recompute@before~optimizer_grad") + 3 * 20


def cost_of(record: Record) -> int:
    """Header bytes that a record's entry may take."""
    key = record.key
    name = key.site + key.slot
    if len(name) > LONGEST_NAME:
        name = "\u00e9" * LONGEST_NAME  # the dearest name that is still written in full
    return entry_cost(name, len(record.shape) + 1) + _REST_OF_A_NAME


def _entries(stored: list[tuple[Record, int, Blob]]) -> list[Entry]:
    taken: set[str] = set()
    entries: list[Entry] = []
    for record, order, blob in stored:
        name = str(record.key).partition("/")[2]  # the folder says the rank
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 20]}~{order}"
        if name in taken or name.startswith("__"):
            name = f"{name}~{order}"
        taken.add(name)
        dtype = DTYPES[record.dtype]
        shape = record.shape
        if dtype.safetensors == "U8" and record.dtype != "uint8":
            shape = (blob.length,)
        elif record.kept == "sample":
            shape = (blob.length * 8 // dtype.bits,)
        entries.append(Entry(name, dtype.safetensors, shape, blob.offset, blob.length))
    return entries
