"""Write one shard: a safetensors file whose header is reserved first and written last.

Header entries are made one by one as tensors arrive, so that only a join remains at the end: making
twenty thousand entries at once took a tenth of a second, during which the captured program waited
for the interpreter. This file does not know which tensors are stored, or in which shard.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.owned_file import OwnedFile
from driftline.runs.index_lines import json_string, shape_text
from driftline.runs.layout import LONGEST_NAME, align, header_bytes, shard_name
from driftline.runs.records import Record
from driftline.runs.sinks import Bytes

_METADATA = '"__metadata__":{"format":"driftline-run 1"}'


class Header:
    """The header entries of one shard so far.

    Attributes:
        reserved: Bytes reserved for the header, including its length field; data begin after them.
        end: Offset of the end of the last listed tensor.
    """

    __slots__ = ("_ends", "_entries", "_names", "_pads", "_room", "end", "reserved")

    def __init__(self, reserved: int) -> None:
        self.reserved = reserved
        self.end = reserved
        # Eight bytes hold the header's length; braces and metadata are always written.
        self._room = reserved - 8 - len(_METADATA) - len("{}")
        self._entries: list[str] = []
        self._ends: list[int] = []
        self._names: set[str] = set()
        self._pads = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, record: Record, order: int, start: int, length: int) -> bool:
        """Add an entry for a tensor; returns False if the header has no room for it.

        The format allows no gaps, so a gap before the tensor gets its own entry, `__padN`. No
        tensor has such a name, because names of tensors begin with their step.

        Args:
            record: The tensor.
            order: Order of the tensor, which makes a repeated name unique.
            start: Offset of its first byte in the file.
            length: Number of its bytes.
        """
        name = record.key.within_rank  # the folder names the rank
        # The order makes a shortened name unique again.
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 20]}~{order}"
        if name in self._names:
            name = f"{name}~{order}"
        dtype = DTYPES[record.dtype]
        shape = record.shape
        # Types that safetensors does not know are stored as bytes; our index has the real type.
        if dtype.safetensors == "U8" and record.dtype != "uint8":
            shape = (length,)
        elif record.kept == "sample":
            shape = (length * 8 // dtype.bits,)
        gap_start, reserved = self.end, self.reserved
        begin, end = start - reserved, start - reserved + length
        entry = (
            f'{json_string(name)}:{{"dtype":"{dtype.safetensors}","shape":[{shape_text(shape)}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        # Readers of safetensors refuse gaps between tensors, so an alignment gap becomes a tensor.
        if start > gap_start:
            entry = (
                f'"__pad{self._pads}":{{"dtype":"U8","shape":[{start - gap_start}],'
                f'"data_offsets":[{gap_start - reserved},{begin}]}},{entry}'
            )
        # One more byte for the comma between entries.
        room = self._room - len(entry) - 1
        if room < 0:
            return False
        self._room = room
        self._pads += start > gap_start
        self._names.add(name)
        self._entries.append(entry)
        self._ends.append(start + length)
        self.end = start + length
        return True

    def cut(self, good_end: int) -> None:
        """Drop entries that extend beyond an offset; no entry may be added afterwards."""
        # Names stay: a shard that was cut is closed, and takes no more tensors.
        while self._ends and self._ends[-1] > good_end:
            self._ends.pop()
            self._entries.pop()
        self.end = self._ends[-1] if self._ends else self.reserved

    def content(self) -> bytes:
        """The first `reserved` bytes of the shard: length, JSON, blanks."""
        text = ("{" + ",".join([_METADATA, *self._entries]) + "}").encode("ascii")
        size = self.reserved - 8
        return size.to_bytes(8, "little") + text.ljust(size, b" ")


@dataclass(slots=True)
class Shard:
    """A shard file that is being written.

    Attributes:
        number: Index of the shard in its folder.
        name: Name of the file.
        file: The file.
        header: Entries of the header so far.
        end: Offset of the next byte, including bytes in buffers.
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
        # Space is reserved so that sealing succeeds on a full disk; not every file system can do
        # that.
        with contextlib.suppress(OSError):
            file.reserve(reserved)
        return cls(number, name, file, Header(reserved), reserved)

    def write(self, data: Bytes, offset: int) -> int:
        """Write at an offset; returns the number of bytes that the system took."""
        return self.file.write_at(data.data, offset)

    def seal(self, good_end: int | None) -> None:
        """Write the header and close the file.

        Args:
            good_end: Offset up to which bytes are on disk, if a write failed.
        """
        try:
            header = self.header
            if good_end is not None:
                header.cut(good_end)
            self.file.truncate(header.end)
            view = memoryview(header.content())
            # The length field goes last: a file is either a valid safetensors file, or has header
            # length 0.
            done = 8
            while done < len(view):
                done += self.file.write_at(view[done:], done)
            self.file.write_at(view[:8], 0)
        finally:
            self.file.close()
