"""The records of a run, made of its lines when they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from driftline.runs.lines import record_of
from driftline.runs.record import Record

if TYPE_CHECKING:
    from driftline.runs.places import Listed

_KEPT_RECORDS = 10_000


class KeptRecords(Sequence[Record]):
    """The records of a run, built from its lines when asked for.

    A hundred thousand cost nothing until then. They are kept when all are asked for a second time,
    a few thousand at once: whoever pairs them walks over them often, and holds most of them anyway.
    """

    def __init__(self, parts: Sequence[Listed]) -> None:
        self.parts = parts
        self._ends = list(itertools.accumulate(len(part.lines) for part in parts))
        self.hold = True  # whether records that are asked for again and again may be kept
        self._built: list[Record] = []
        self._walked = False

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if self._built:
            return self._built[index]
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError("the run has no such record")
        import bisect  # few ask for one by its number

        which = bisect.bisect_right(self._ends, at)
        part = self.parts[which]
        line = part.lines[at - (self._ends[which - 1] if which else 0)]
        return record_of(line, part.rank, part.process)

    def __iter__(self) -> Iterator[Record]:
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
