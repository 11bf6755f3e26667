"""A shard's safetensors header, made entry by entry as its tensors come.

When the shard is full there is nothing left to do but to join them: to make twenty thousand entries
at the end took a tenth of a second, in which the captured program waited for the interpreter.
"""

from __future__ import annotations

from driftline.numerics.dtypes import DTYPES
from driftline.runs.layout import LONGEST_NAME
from driftline.runs.lines import json_string, shape_text
from driftline.runs.record import Record

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
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 20]}~{order}"
        if name in self._names:
            name = f"{name}~{order}"
        dtype = DTYPES[record.dtype]
        shape = record.shape
        if dtype.safetensors == "U8" and record.dtype != "uint8":
            shape = (length,)
        elif record.kept == "sample":
            shape = (length * 8 // dtype.bits,)
        at, reserved = self.end, self.reserved
        begin, end = start - reserved, start - reserved + length
        entry = (
            f'{json_string(name)}:{{"dtype":"{dtype.safetensors}","shape":[{shape_text(shape)}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        if start > at:
            entry = (
                f'"__pad{self._pads}":{{"dtype":"U8","shape":[{start - at}],'
                f'"data_offsets":[{at - reserved},{begin}]}},{entry}'
            )
        room = self._room - len(entry) - 1
        if room < 0:
            return False
        self._room = room
        self._pads += start > at
        self._names.add(name)
        self._entries.append(entry)
        self._ends.append(start + length)
        self.end = start + length
        return True

    def cut(self, good_end: int) -> None:
        """Forgets what reaches beyond an offset; nothing is added behind."""
        while self._ends and self._ends[-1] > good_end:
            self._ends.pop()
            self._entries.pop()
        self.end = self._ends[-1] if self._ends else self.reserved

    def content(self) -> bytes:
        """The shard's first `reserved` bytes: length, JSON, blanks."""
        text = ("{" + ",".join([_METADATA, *self._entries]) + "}").encode("ascii")
        size = self.reserved - 8
        return size.to_bytes(8, "little") + text.ljust(size, b" ")
