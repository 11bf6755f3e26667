"""The rows of a long table, stored in a temporary file of this process to save memory.

The rows are written once, in blocks, and read again for every pass over them. The file has no name,
so no other process can read or change it, and it disappears with the process. That makes marshal
safe here, although it must never read untrusted bytes; it is three times as fast as JSON.
"""

from __future__ import annotations

import bisect
import itertools
import marshal
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

from driftline.comparison.table.row import Number, Row
from driftline.comparison.table.table import Coverage
from driftline.errors import DriftlineError
from driftline.runs.files.owned_file import UnnamedFile
from driftline.runs.records import TensorKey

_BLOCK = 256
_ERROR = "relative_l2"
"""The metric by which rows are judged; its largest values are recorded."""
_METRICS = Row._fields.index("metrics")
_NUMBERS = frozenset({float, int, bool})


class RowSpool(Sequence[Row]):
    """Rows stored in a file, made by `keep`, or block by block in any order by `SpoolWriter`."""

    def __init__(self, file: UnnamedFile, places: array[int], about: _About) -> None:
        self._file = file
        self._places = places
        self._ends = array("Q", itertools.accumulate(places[2::3]))
        self._about = about
        self._known: tuple[int, list[Row]] = (-1, [])

    @property
    def coverage(self) -> Coverage:
        return self._about.coverage

    @property
    def metric_names(self) -> set[str]:
        """Names of all metrics that occur in the rows."""
        return {name for names in self._about.names for name in names}

    @property
    def ports(self) -> set[str]:
        return self._about.ports

    @property
    def dtypes(self) -> set[str]:
        """Element types of both sides."""
        return self._about.dtypes

    @property
    def has_recipes(self) -> bool:
        """Whether any row has a recipe on either side."""
        return self._about.recipes

    @property
    def has_operators(self) -> bool:
        """Whether any site is that of an operator rather than a module."""
        return self._about.operators

    @property
    def processes(self) -> set[tuple[int, int]]:
        """Ranks and processes of the reference."""
        return self._about.processes

    @property
    def largest(self) -> Mapping[tuple[str, str], float]:
        """The largest finite relative L2, by the element types of both sides."""
        return self._about.largest

    @property
    def after_the_first_step(self) -> bool:
        """Whether any row belongs to a step after step 0."""
        return any(self._about.steps)

    @property
    def several_steps(self) -> bool:
        return len(self._about.steps) > 1

    @property
    def in_turn(self) -> bool:
        """Whether rows are sorted by process, then step, apart from rows only in the candidate."""
        return self._about.in_turn

    def changed_by_process(self, change: Callable[[Sequence[Row]], Sequence[Row]]) -> RowSpool:
        """Return the rows that a function gives for the rows of each process."""
        groups = itertools.groupby(self, key=lambda row: (row.key.rank, row.key.process))
        return keep(row for _, group in groups for row in change(list(group)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError("the table has no such row")
        which = bisect.bisect_right(self._ends, place)
        block = self._known
        if block[0] != which:
            block = self._known = which, list(self._block(which))
        return block[1][place - (self._ends[which - 1] if which else 0)]

    def __iter__(self) -> Iterator[Row]:
        for which in range(len(self._ends)):
            yield from self._block(which)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (RowSpool, tuple)):
            return NotImplemented
        others = cast("Sequence[Row]", other)
        return len(self) == len(others) and all(a == b for a, b in zip(self, others, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} rows>"

    def _block(self, which: int) -> Iterator[Row]:
        start, length = self._places[3 * which : 3 * which + 2]
        names = self._about.names
        try:
            content = self._file.read(start, length)
        except OSError as trouble:
            raise DriftlineError(
                f"the rows of a long table cannot be read again: {trouble.strerror}",
                hint="they are in TMPDIR: is it full? Set it to a larger disk and compare again",
            ) from trouble
        for key, kind, numbers, before, after in marshal.loads(content):
            metrics: dict[str, Number] = dict(zip(names[cast(int, kind)], numbers, strict=True))
            yield Row._make((TensorKey._make(key), *before, metrics, *after))


class _About:
    """Facts about all rows together."""

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []
        self.kinds: dict[tuple[str, ...], int] = {}
        self.coverage = Coverage()
        self.ports: set[str] = set()
        self.dtypes: set[str] = set()
        self.processes: set[tuple[int, int]] = set()
        self.steps: set[int] = set()  # at most the first block that has two
        self.largest: dict[tuple[str, str], float] = {}
        self.recipes = self.operators = False
        self.in_turn = True
        self._moment = (-1, -1, -1)

    def look_at(self, block: Sequence[Row]) -> None:
        self.coverage = Coverage(*map(operator.add, self.coverage, Coverage.of(block)))
        self.ports.update(row.key.port for row in block)
        self.dtypes.update(row.reference_dtype for row in block)
        self.dtypes.update(row.candidate_dtype for row in block)
        self.processes.update((row.key.rank, row.key.process) for row in block)
        if len(self.steps) < 2:
            self.steps.update(row.key.step for row in block)
        self.recipes = self.recipes or any(
            row.reference_recipe or row.candidate_recipe for row in block
        )
        self.operators = self.operators or any("/" in row.key.site for row in block)
        largest = self.largest
        for row in block:
            error = row.metrics.get(_ERROR, 0.0)
            types = row.reference_dtype, row.candidate_dtype
            if largest.get(types, 0.0) < error < math.inf:
                largest[types] = error
            if row.status != "extra":
                moment = (row.key.rank, row.key.process, row.key.step)
                self.in_turn = self.in_turn and self._moment <= moment
                self._moment = moment

    def kind(self, names: tuple[str, ...]) -> int:
        number = self.kinds.get(names)
        if number is None:
            number = self.kinds[names] = len(self.names)
            self.names.append(names)
        return number


class SpoolWriter:
    """Receives rows block by block; their final order is fixed by `rows`."""

    def __init__(self) -> None:
        try:
            self._file = UnnamedFile("driftline-rows-")
        except OSError as trouble:
            raise _no_room(trouble) from trouble
        self._about = _About()
        # Start, length and row count of each block, in flat arrays by share. Small objects among
        # those of the rows would each keep a page of freed memory from being returned.
        self._places: dict[int, array[int]] = {}

    def put(self, rows: Iterable[Row], share: int = 0) -> None:
        """Append rows to a share; the shares are finally ordered by their numbers."""
        more = iter(rows)
        while block := list(itertools.islice(more, _BLOCK)):
            self._about.look_at(block)
            self._write([self._plain(row) for row in block], share)

    def rows(self) -> RowSpool:
        """Return all rows; nothing can be added afterwards."""
        places = array("Q")
        for share in sorted(self._places):
            places.extend(self._places[share])
        return RowSpool(self._file, places, self._about)

    def _plain(self, row: Row) -> tuple[Any, ...]:
        metrics = row.metrics
        numbers = tuple(metrics.values())
        if not _NUMBERS.issuperset(map(type, numbers)):  # such as those of numpy
            numbers = tuple(_number(value) for value in numbers)
        kind = self._about.kind(tuple(metrics))
        return (tuple(row.key), kind, numbers, row[1:_METRICS], row[_METRICS + 1 :])

    def _write(self, block: list[tuple[Any, ...]], share: int) -> None:
        content = marshal.dumps(block)
        try:
            start = self._file.append(content)
        except OSError as trouble:
            raise _no_room(trouble) from trouble
        self._places.setdefault(share, array("Q")).extend((start, len(content), len(block)))


def keep(rows: Iterable[Row]) -> RowSpool:
    """Store rows in a file as they arrive, and return them."""
    keeper = SpoolWriter()
    keeper.put(rows)
    return keeper.rows()


def _number(value: Number) -> Number:
    """Convert a number of numpy to a number of Python."""
    plain: Any = value if type(value) in _NUMBERS else getattr(value, "item", lambda: value)()
    return plain if type(plain) in _NUMBERS else float(plain)


def _no_room(trouble: OSError) -> DriftlineError:
    import tempfile

    return DriftlineError(
        f"the rows of a long table cannot be kept in {tempfile.gettempdir()}: {trouble.strerror}",
        hint="TMPDIR=DIR names a folder with more room: about a kilobyte for each tensor",
    )
