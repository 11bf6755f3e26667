"""Tensor files and dump folders of other programs as runs, whose values are read on demand.

`Member` is one tensor of a file, `FileRun` a file as a run, `Leaf` one tensor of a dump, and
`TreeRun` a dump as a run. This file does not know any format: a format makes members or leaves, and
this file makes the run.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.errors import BadFile, BadInput, BadRun
from driftline.formats import read_ahead
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.facts import Order
from driftline.runs.files import mapped_file
from driftline.runs.records import Blob, Kept, Record, TensorKey, shape_trouble
from driftline.runs.run import Loss, Memory, ReadAhead, Run, Storage, no_values
from driftline.runs.sinks import JSON

if TYPE_CHECKING:
    import numpy as np


class Member(NamedTuple):
    """One tensor of a foreign file, not read yet.

    Attributes:
        name: Name in the file; empty for the only tensor of a file without names.
        dtype: A name of `numerics.dtypes.DTYPES`.
        shape: Logical shape.
        fetch: Returns the values as a flat array of the dtype's storage type, in C order; a view of
            the mapped file if possible.
        trouble: Why the values are unavailable although the file is valid; empty if they are
            available.
        kept: What the file was meant to hold. If it holds no values, `trouble` says so too.
        summary: The statistics that it holds instead of the values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray[Any, np.dtype[Any]]]
    trouble: str = ""
    kept: Kept = "full"
    summary: Summary | None = None


LONE = "tensor"
"""Site of the only tensor of a file, so that any two such files can be paired."""


class FileRun(Run):
    """A tensor file as a run: each tensor is the output of a site with its name, without a copy."""

    _order = "none"

    def __init__(self, path: Path, format_name: str, members: Sequence[Member]) -> None:
        self.name = str(path)
        self._format = format_name
        self._size = path.stat().st_size
        self._members = {_key(member, len(members)): member for member in members}
        # A dictionary would silently keep only the last of two tensors with the same name.
        if len(self._members) != len(members):
            raise BadFile(f"{path} holds two tensors of one name")
        self._records = [
            _record(path, key, member, order)
            for order, (key, member) in enumerate(self._members.items())
        ]

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def manifest(self) -> dict[str, Any]:
        return {"format": self._format, "path": self.name}

    @property
    def losses(self) -> Sequence[Loss]:
        return [
            Loss(record.key.site, record.lost, record.key)
            for record in self._records
            if record.lost
        ]

    def cut_off(self) -> Callable[[Record], str] | None:
        # Tensors of a file are views of one map; only their format knows which of them are cut.
        try:
            if Path(self.name).stat().st_size >= self._size:
                return None
        except OSError:  # deleted: mapped values stay available
            return None
        return lambda record: f"{self.name} became shorter while it was read"

    def raw(self, record: Record) -> Storage:
        if record.lost:
            raise BadInput(f"{record.key.site} of {self.name} has no values: {record.lost}")
        values = self._members[record.key].fetch()
        # Values may be a view of the mapped file, or shared by a cache: a caller that writes to
        # them would change the values of the next caller.
        values.flags.writeable = False
        return values


def _key(member: Member, count: int) -> TensorKey:
    return TensorKey.of(LONE if count == 1 else member.name or LONE, "output")


def _record(path: Path, key: TensorKey, member: Member, order: int) -> Record:
    dtype = DTYPES.get(member.dtype)
    length = dtype.byte_count(math.prod(member.shape)) if dtype else 0
    trouble = member.trouble or shape_trouble(member.shape)
    return Record(
        key,
        order,
        member.dtype,
        member.shape,
        blob=None if trouble else Blob(path.name, 0, length),
        lost=trouble,
    )


# ---- Dumps of many files


class Leaf(NamedTuple):
    """One tensor of a dump.

    Attributes:
        record: Known facts. The run sets `order`. `lost` says why its values are unavailable: an
            unreadable file is a leaf with a reason, and is never left out.
        source: Its file, relative to the dump.
        fetch: Returns its values as `Run.raw` does, as a view of the mapped file if possible. None
            if only a summary or a description was kept. It may have a method `memory`, which
            returns the same as `Run.memory`.
        offset: Distinguishes tensors of one file; it has no other meaning.
    """

    record: Record
    source: str = ""
    fetch: Callable[[], Storage] | None = None
    offset: int = 0


class DumpTable(NamedTuple):
    """A table next to the tensors of a dump, such as times of operations.

    Attributes:
        title: Description, with the name of the file.
        headings: Names of the columns.
        lines: Cells of each line; None if unknown.
    """

    title: str
    headings: tuple[str, ...]
    lines: Sequence[tuple[str | float | int | None, ...]]


class TreeRun(Run):
    """A dump of many files."""

    def __init__(
        self,
        path: Path,
        format_name: str,
        leaves: Sequence[Leaf],
        *,
        order: Order = "execution",
        topologies: Mapping[tuple[int, int], Mapping[str, JSON]] | None = None,
        events: Sequence[Mapping[str, Any]] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the leaves.

        Args:
            path: Folder (or file) that was opened.
            format_name: The format's NAME.
            leaves: In execution order within each rank and process.
            order: Meaning of this order.
            topologies: Module tree by (rank, process), in the form of `topology.json`.
            events: Warnings about the dump itself, such as files that were not understood.
            facts: Added to the manifest.

        Raises:
            BadFile: Two leaves have the same key.
        """
        self.name = str(path)
        self._order = order
        self._format = format_name
        self._topologies = dict(topologies or {})
        self._events = list(events)
        self._facts = dict(facts or {})
        self._leaves: dict[TensorKey, Leaf] = {}
        records: list[Record] = []
        # Sorting keeps the order inside a process. Most dumps have one process and need no sort.
        ranked = leaves
        if len({leaf.record.key[5:7] for leaf in leaves}) > 1:  # rank and process
            ranked = sorted(leaves, key=lambda leaf: leaf.record.key[5:7])
        leaf_by_key = self._leaves
        for position, leaf in enumerate(ranked):
            record = leaf.record.placed(position, _blob_of(leaf))
            # Other shapes are limited by the bytes of their file, but a shape without elements is
            # not.
            if 0 in record.shape and not record.lost and (no := shape_trouble(record.shape)):
                record = record._replace(lost=no)
            earlier = leaf_by_key.setdefault(record.key, leaf)
            if earlier is not leaf:
                raise BadFile(
                    f"{path} holds {record.key} twice: {earlier.source} and {leaf.source}"
                )
            records.append(record)
        self._records = records

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def manifest(self) -> Mapping[str, Any]:
        return {"format": self._format, "path": self.name, **self._facts}

    @property
    def losses(self) -> Sequence[Loss]:
        return [
            Loss(self.source(record), record.lost, record.key)
            for record in self._records
            if record.lost
        ]

    def source(self, record: Record) -> str:
        """The file a record was read from, relative to the dump."""
        return self._leaves[record.key].source

    def raw(self, record: Record) -> Storage:
        fetch = self._leaves[record.key].fetch
        if record.lost or fetch is None:
            return no_values(record)
        values = fetch()
        values.flags.writeable = False
        return values

    def cut_off(self) -> Callable[[Record], str] | None:
        names = set(mapped_file.cut_files())

        def reason(record: Record) -> str:
            cut = f"{self.name}/{self.source(record)}" in names
            return f"{self.source(record)} became shorter while it was read" if cut else ""

        return reason if names else None

    def memory(self, record: Record) -> Memory | None:
        # Only plain values in a file have an address; rearranged values exist only as arrays.
        where = getattr(self._leaves[record.key].fetch, "memory", None)
        return None if where is None or record.lost else where()

    def read_ahead(self) -> ReadAhead | None:
        if not read_ahead.available():
            return None
        return _BackgroundReader(self._leaves)

    def events(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._events)

    def tables(self) -> Sequence[DumpTable]:
        """Tables that the dump has in addition to its tensors."""
        return ()

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        return self._topologies.get((rank, process))


class _BackgroundReader:
    """Reads values of small files in the background, into memory that is reused."""

    def __init__(self, leaves: Mapping[TensorKey, Leaf]) -> None:
        self._leaves = leaves
        self._now, self._next = read_ahead.Read(), read_ahead.Read()
        self._starts: list[int | None] = []
        self._lengths: array[int] = array("q")

    def begin(self, records: Sequence[Record]) -> None:
        self._starts = []
        folder, names = "", list[str]()
        starts, self._lengths = array("q"), array("q")
        begins = 0
        leaves = self._leaves
        for record in records:
            ahead = getattr(leaves[record.key].fetch, "ahead", None)
            file_range = None if ahead is None or record.lost else ahead()
            # One request to the C thread covers one folder; files elsewhere are read in the
            # ordinary way later.
            if file_range is None or (names and file_range[0] != folder):
                self._starts.append(None)
                continue
            folder, name, start, length = file_range
            self._starts.append(begins)
            names.append(name)
            starts.append(start)
            self._lengths.append(length)
            begins += length
        self._next.begin(read_ahead.Ranges(folder, names, starts, self._lengths))

    def take(self) -> list[Memory | None]:
        self._next.wait()
        # Two buffers alternate: the caller uses one while the thread fills the other.
        self._now, self._next = self._next, self._now
        read, lengths = self._now, self._lengths
        memories: list[Memory | None] = []
        index = 0
        address, room, got = read.address, read.room, read.got
        for begins in self._starts:
            if begins is None:
                memories.append(None)
                continue
            length = lengths[index]
            # A short read means that the file shrank or could not be opened; the ordinary way of
            # reading reports the reason.
            complete = got[index] == length
            memories.append(Memory(address + begins, length, room) if complete else None)
            index += 1
        return memories

    def close(self) -> None:
        self._now.wait()
        self._next.wait()


def _blob_of(leaf: Leaf) -> Blob | None:
    record = leaf.record
    if record.lost or leaf.fetch is None:
        return None
    return Blob(leaf.source, leaf.offset, _byte_count(record.dtype, record.shape))


@functools.lru_cache(1024)
def _byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPES[dtype].byte_count(math.prod(shape))


# ---- Helpers that several dump formats share


_SHOWN = 8


def refuse_several(path: Path, dumps: Iterable[str]) -> None:
    """Refuse a folder with several dumps: the user must choose, because dumps are never mixed.

    Args:
        path: The opened path.
        dumps: Folders of its dumps, relative to the path.

    Raises:
        BadRun: There is more than one.
    """
    names = sorted(dumps)
    if len(names) > 1:
        shown = ", ".join(name or "." for name in names[:_SHOWN])
        raise BadRun(
            f"{path} holds {len(names)} dumps: {shown}" + (" …" if len(names) > _SHOWN else ""),
            hint=f"give one of them: {path / next(filter(None, names))}",
        )


def partial_summary(
    count: int,
    *,
    low: float = math.nan,
    high: float = math.nan,
    mean: float = math.nan,
    std: float = math.nan,
    l2: float = math.nan,
) -> Summary:
    """A summary with only a few known numbers, as in dumps that store only statistics.

    All other fields are NaN, including the counts of zeros and non-finite elements. There is no
    sketch.
    """
    # The fields are integers in a measured summary; NaN marks a count that was not taken.
    unknown = cast("int", math.nan)
    return Summary(count, low, high, mean, std, l2, unknown, unknown, unknown, unknown)
