"""The index of a run: its lines, and the records that are built from them on demand.

A line takes a kilobyte as an object and four hundred bytes in its file. So a few thousand lines
stay in memory. Of a longer index, only the offset of every 64th line is kept; lines are read and
decoded again when they are needed, a microsecond each. No file is kept open, because a run may have
a thousand indexes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator, MutableSequence, Sequence
from typing import TYPE_CHECKING, BinaryIO, overload

from driftline.errors import BadRun
from driftline.runs.files.owned_file import FileTaken, UnnamedFile
from driftline.runs.index_lines import Line, decoder, record_of
from driftline.runs.records import Record

if TYPE_CHECKING:
    from driftline.runs.files.local_files import Listed


_interned = sys.intern

FEW = 4_096
"""Number of lines of a run that stay in memory."""
_STRETCH = 64
"""Number of consecutive lines for which one offset is kept."""


_Read = Callable[[int, int], bytes]
"""Function of a start and a length that reads bytes of an index."""


class MemoryBudget:
    """Number of lines that may still stay in memory, shared by all indexes of a run."""

    def __init__(self, left: int = FEW) -> None:
        self.left = left
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.spool: UnnamedFile | None = None

    def spooled(self, content: bytes) -> tuple[UnnamedFile, int]:
        """Store fetched bytes in a temporary file; returns the file and their offset in it."""
        if self.spool is None:
            self.spool = UnnamedFile("driftline-")
        return self.spool, self.spool.append(content)


class IndexLines:
    """Checked lines of one index, in execution order after `finish`.

    Args:
        room: Budget shared by all indexes of the run.
        reopen: Opens the file again, for lines that did not stay in memory.
    """

    def __init__(self, room: MemoryBudget, reopen: Callable[[], BinaryIO]) -> None:
        self.last_step: int | None = None
        self._room = room
        self._reopen = reopen
        self._few: list[Line] | None = []
        self._count = 0
        self._order = -1
        self._in_order = True
        # Stretches of consecutive lines: the number of the first line, and its offset in the file.
        self._firsts: MutableSequence[int] = []
        self._starts: MutableSequence[int] = []
        self._end = -1
        self._places: Sequence[int] | None = None
        self._lost: dict[int, str] = {}
        self._spool: tuple[UnnamedFile, int] | None = None
        self._size = 0
        # The stretch that was read last, because consecutive lines are usually needed in turn.
        self._last_stretch: tuple[int, list[bytes]] = (-1, [])

    def append(self, line: Line, start: int, length: int, *, ended: bool = True) -> None:
        """Add a checked line, with the location of its text and whether a line end follows."""
        # Threads of one process may write their lines slightly out of order.
        if line.order <= self._order:
            self._in_order = False
        self._order = line.order
        if self.last_step is None or line.step > self.last_step:
            self.last_step = line.step
        if line.lost:
            self._lost[self._count] = line.lost
        # After a blank or bad line, a new stretch begins.
        if start != self._end or self._count - self._firsts[-1] >= _STRETCH:
            self._firsts.append(self._count)
            self._starts.append(start)
        self._end = start + length if ended else -1  # -1: the next line begins a stretch
        self._size = start + length
        self._count += 1
        if self._few is not None:
            self._few.append(line)
            self._room.left -= 1
            # The index is now too long: its lines are dropped, and only offsets are kept.
            if self._room.left < 0:
                from array import array

                self._few = None
                self._firsts, self._starts = array("Q", self._firsts), array("Q", self._starts)

    def take(self, lines: list[Line]) -> bool:
        """Take all lines at once, already checked; returns False without room.

        Replaces `finish`.
        """
        if self._count or len(lines) > self._room.left:
            return False
        self._room.left -= len(lines)
        self._count = len(lines)
        orders = [line.order for line in lines]
        self._few = (
            lines if orders == sorted(orders) else sorted(lines, key=lambda line: line.order)
        )
        self.last_step = max((line.step for line in lines), default=None)
        return True

    def finish(self, file: BinaryIO) -> None:
        """Sort the lines. The file is not needed afterwards.

        Raises:
            OSError: The file cannot be read again.
        """
        # A fetched index would have to be fetched again, so it is copied to a temporary file.
        if self._few is None and not _can_be_reopened(file):
            file.seek(0)
            self._spool = self._room.spooled(file.read())
        if not self._in_order:
            orders = [line.order for line in self]
            places = sorted(range(self._count), key=orders.__getitem__)
            if self._few is not None:
                self._few = [self._few[place] for place in places]
            else:
                from array import array

                self._places = array("Q", places)
        if self._few is not None:
            self._firsts = self._starts = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Line:
        if self._few is not None:
            return self._few[index]
        import bisect  # with `array` half a millisecond, which a short index does not need

        place = index if self._places is None else self._places[index]
        number = bisect.bisect_right(self._firsts, place) - 1
        stretch = self._last_stretch
        if stretch[0] != number:
            with self._opened() as read:
                stretch = self._last_stretch = number, self._stretch(read, number)
        return self._decoded(place, stretch[1][place - self._firsts[number]])

    def __iter__(self) -> Iterator[Line]:
        if self._few is not None:
            return iter(self._few)
        return self._each() if self._places is None else map(self.__getitem__, range(self._count))

    def _each(self) -> Iterator[Line]:
        place = 0
        with self._opened() as read:
            for which in range(len(self._firsts)):
                for text in self._stretch(read, which):
                    yield self._decoded(place, text)
                    place += 1

    @contextlib.contextmanager
    def _opened(self) -> Generator[_Read]:
        if self._spool is not None:
            spool, begin = self._spool
            try:
                yield lambda start, length: spool.read(begin + start, length)
            except FileTaken as trouble:
                raise BadRun(f"an index cannot be read again: {trouble.strerror}") from None
            return
        try:
            file = self._reopen()
        except OSError as trouble:
            raise BadRun(
                f"an index went away while it was read: {trouble.strerror}",
                hint="is something deleting the run?",
            ) from None
        with file:
            yield lambda start, length: os.pread(file.fileno(), length, start)

    def _stretch(self, read: _Read, which: int) -> list[bytes]:
        """The texts of the lines of a stretch."""
        start = self._starts[which]
        last = which + 1 == len(self._firsts)
        end = self._size if last else self._starts[which + 1]
        count = (self._count if last else self._firsts[which + 1]) - self._firsts[which]
        # At most `count` lines, because a growing index may have more by now.
        return read(start, end - start).split(b"\n", count)[:count]

    def _decoded(self, place: int, text: bytes) -> Line:
        try:
            line = _decode(text)
        except ValueError:
            raise BadRun("an index was changed while it was read") from None
        # Decoding makes new strings each time, most of which are the same few names.
        line.site, line.port, line.slot = (
            _interned(line.site),
            _interned(line.port),
            _interned(line.slot),
        )
        line.dtype, line.class_, line.shard = (
            _interned(line.dtype),
            _interned(line.class_),
            _interned(line.shard),
        )
        line.device, line.alias = _interned(line.device), _interned(line.alias)
        shape = tuple(line.shape)
        line.shape = self._room.shapes.setdefault(shape, shape)
        # Errors that the check of the index found are not in the text of the line.
        if self._lost and place in self._lost:
            line.lost = self._lost[place]
        return line


def _decode(text: bytes) -> Line:
    return decoder()(text)


def _can_be_reopened(file: BinaryIO) -> bool:
    """Whether this is a file of this machine, rather than fetched bytes."""
    try:
        file.fileno()
    except (io.UnsupportedOperation, OSError):
        return False
    return True


# Up to this number, keeping all records is cheaper than building them twice.
_KEPT_RECORDS = 10_000


class IndexRecords(Sequence[Record]):
    """The records of a run, built from its lines on demand.

    The first iteration keeps the records if they are a few thousand; the second keeps any number,
    because pairing iterates over the records often, and keeps most of them anyway.

    Attributes:
        parts: The lines of each process.
        hold: Whether records may be kept after a second walk.
    """

    def __init__(self, parts: Sequence[Listed]) -> None:
        self.parts = parts
        self._ends = list(itertools.accumulate(len(part.lines) for part in parts))
        self.hold = True
        self._built: list[Record] = []
        self._walked = False

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        # Existing records are returned as they are, so that identity means the same tensor.
        if self._built:
            return self._built[index]
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError("the run has no such record")
        import bisect  # few callers need a single record

        part_index = bisect.bisect_right(self._ends, position)
        part = self.parts[part_index]
        line = part.lines[position - (self._ends[part_index - 1] if part_index else 0)]
        return record_of(line, part.rank, part.process)

    def __iter__(self) -> Iterator[Record]:
        # A second iteration shows that all records are needed; building them again would take
        # longer.
        again = self._walked and self.hold
        if not self._built and (len(self) <= _KEPT_RECORDS or again):
            self._built = list(self._each())
        self._walked = True
        return iter(self._built) if self._built else self._each()

    def _each(self) -> Iterator[Record]:
        for part in self.parts:
            rank, process = part.rank, part.process
            for line in part.lines:
                yield record_of(line, rank, process)

    def firsts(self) -> list[Record]:
        """The first record of each process that has any."""
        return [
            record_of(part.lines[0], part.rank, part.process)
            for part in self.parts
            if len(part.lines)
        ]

    def sites(self) -> Iterator[str]:
        for part in self.parts:
            for line in part.lines:
                yield line.site


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Turn the cyclic garbage collector off; a user's code must not run inside the block."""
    if not gc.isenabled():  # turned off by the program, or by an outer block
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
