"""The lines of an index, as many as there are: a few thousand in memory, more where they lie.

A line takes a kilobyte as an object and four hundred bytes in its file, which is mapped and costs
no memory of ours. So of a long index only the places of its lines are kept, 20 bytes each, and a
line is decoded again when it is asked for: a microsecond.
"""

from __future__ import annotations

import io
import mmap
import sys
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from driftline.runs.lines import Line, decoder

_one = sys.intern

FEW = 10_000
"""So many lines of a run stay as they are."""


class Room:
    """How many lines more may stay in memory, over all indexes of a run."""

    def __init__(self, left: int = FEW) -> None:
        self.left = left
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}


class KeptLines:
    """Checked lines of one index; in the order of execution once `finish` was called."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._few: list[Line] | None = []
        self._starts = array("Q")
        self._lengths = array("Q")
        self._orders = array("Q")
        self._lost: dict[int, str] = {}
        self._in_order = True
        self._source: mmap.mmap | bytes = b""
        self._decode = decoder()
        self._shapes = room.shapes

    def append(self, line: Line, start: int, length: int) -> None:
        """A line that was checked, and where in the file its text lies."""
        if self._orders and line.order <= self._orders[-1]:
            self._in_order = False
        if line.lost:
            self._lost[start] = line.lost
        self._starts.append(start)
        self._lengths.append(length)
        self._orders.append(line.order)
        if self._few is not None:
            self._few.append(line)
            self._room.left -= 1
            if self._room.left < 0:
                self._few = None

    def finish(self, file: BinaryIO) -> None:
        """Sort, and hold on to the file where lines will be asked for again.

        Raises:
            OSError: It cannot be mapped.
        """
        if not self._in_order:
            orders = self._orders
            places = sorted(range(len(orders)), key=orders.__getitem__)
            self._starts = array("Q", (self._starts[at] for at in places))
            self._lengths = array("Q", (self._lengths[at] for at in places))
            if self._few is not None:
                self._few = [self._few[at] for at in places]
        self._orders = array("Q")
        if self._few is None:
            end = max(s + n for s, n in zip(self._starts, self._lengths, strict=True))
            try:
                self._source = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
            except io.UnsupportedOperation:  # bytes that came from elsewhere
                file.seek(0)
                self._source = file.read(end)
        else:
            self._starts = self._lengths = array("Q")

    def __len__(self) -> int:
        return len(self._starts) if self._few is None else len(self._few)

    def __getitem__(self, at: int) -> Line:
        if self._few is not None:
            return self._few[at]
        start = self._starts[at]
        return self._read(start, self._lengths[at])

    def __iter__(self) -> Iterator[Line]:
        if self._few is not None:
            return iter(self._few)
        return map(self._read, self._starts, self._lengths)

    def _read(self, start: int, length: int) -> Line:
        line = self._decode(self._source[start : start + length])
        # Each text comes as a new object, and most of them are the same few.
        line.site, line.port, line.slot = _one(line.site), _one(line.port), _one(line.slot)
        line.dtype, line.class_, line.shard = _one(line.dtype), _one(line.class_), _one(line.shard)
        line.device, line.alias = _one(line.device), _one(line.alias)
        shape = tuple(line.shape)
        line.shape = self._shapes.setdefault(shape, shape)
        if self._lost and start in self._lost:
            line.lost = self._lost[start]
        return line
