"""A shard's safetensors header, made entry by entry as its tensors come.

When the shard is full there is nothing left to do but to join them: to make twenty thousand entries
at the end took a tenth of a second, in which the captured program waited for the interpreter.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from driftline.numerics.dtypes import DTYPES
from driftline.runs.index_lines import json_string, shape_text
from driftline.runs.layout import LONGEST_NAME, align, header_bytes, shard_name
from driftline.runs.owned_file import OwnedFile
from driftline.runs.records import Record
from driftline.runs.sinks import Bytes

_METADATA = '"__metadata__":{"format":"driftline-run 1"}'


class Header:
    """The entries of one shard so far.

    Attributes:
        reserved: Bytes kept free for the header, its length field included; data begin there.
        end: Where the last listed tensor ends.
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
        """Lists a tensor behind those before it; False if there is no room for that.

        The format refuses holes, so a gap before it is an entry of its own, `__padN`; the names of
        tensors begin with their step.

        Args:
            record: What it is.
            order: Tells tensors of one name apart.
            start: Where its bytes begin, counted from the file's first.
            length: How many they are.
        """
        name = record.key.within_rank  # the folder says the rank
        # The order makes a shortened name unique again.
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 20]}~{order}"
        if name in self._names:
            name = f"{name}~{order}"
        dtype = DTYPES[record.dtype]
        shape = record.shape
        # Types that safetensors does not know are stored as their bytes; our index has the
        # real type.
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
        # Readers of safetensors refuse holes between tensors, so the alignment gap is a
        # tensor, too.
        if start > gap_start:
            entry = (
                f'"__pad{self._pads}":{{"dtype":"U8","shape":[{start - gap_start}],'
                f'"data_offsets":[{gap_start - reserved},{begin}]}},{entry}'
            )
        # One byte more for the comma between entries.
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
        """Forgets what reaches beyond an offset; nothing is added behind."""
        # Names are not removed: a shard that was cut is closed, and takes no more tensors.
        while self._ends and self._ends[-1] > good_end:
            self._ends.pop()
            self._entries.pop()
        self.end = self._ends[-1] if self._ends else self.reserved

    def content(self) -> bytes:
        """The shard's first `reserved` bytes: length, JSON, blanks."""
        text = ("{" + ",".join([_METADATA, *self._entries]) + "}").encode("ascii")
        size = self.reserved - 8
        return size.to_bytes(8, "little") + text.ljust(size, b" ")


# One shard file while it grows: reserved header, appended bytes, header written at the end.


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
