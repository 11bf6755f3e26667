"""A run of which only some steps and ranks are looked at; the rest is as if it were not there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from driftline.errors import BadInput
from driftline.runs.kept_records import KeptRecords
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Loss, Memory, ReadAhead, Run, Storage
from driftline.runs.sink import JSON


def narrowed(run: Run, *, steps: Collection[int] = (), ranks: Collection[int] = ()) -> Run:
    """The same run without the other steps and ranks; none given is all.

    Raises:
        BadInput: The run has none of the steps or none of the ranks.
    """
    if not steps and not ranks:
        return run
    if isinstance(run.records, KeptRecords) and not steps:
        # Whole parts of it: they stay where they lie.
        parts = [part for part in run.records.parts if len(part.lines)]
        _require(run, "rank", ranks, {part.rank for part in parts})
        return _NarrowedRun(run, KeptRecords([part for part in parts if part.rank in ranks]))
    known: tuple[set[int], set[int]] = (set(), set())
    kept: list[Record] = []
    for record in run.records:
        key = record.key
        known[0].add(key.step)
        known[1].add(key.rank)
        if (not steps or key.step in steps) and (not ranks or key.rank in ranks):
            kept.append(record)
    _require(run, "step", steps, known[0])
    _require(run, "rank", ranks, known[1])
    return _NarrowedRun(run, kept)


def _require(run: Run, what: str, wanted: Collection[int], known: Collection[int]) -> None:
    for number in sorted(wanted):
        if number not in known:
            have = ", ".join(str(n) for n in sorted(known)[:8])
            have += ", ..." if len(known) > 8 else ""
            raise BadInput(f"run '{run.name}' has no {what} {number}", hint=f"it has {what} {have}")


def only(run: Run, wanted: Callable[[Record], bool]) -> Run:
    """The same run without the tensors that are not wanted."""
    return _NarrowedRun(run, [record for record in run.records if wanted(record)])


class _NarrowedRun(Run):
    def __init__(self, whole: Run, records: Sequence[Record]) -> None:
        self.name = whole.name
        self.opened = whole.opened
        self.ordered = whole.ordered
        self.fetched = whole.fetched
        self._whole = whole
        self._records = records

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def raw(self, record: Record) -> Storage:
        return self._whole.raw(record)

    def memory(self, record: Record) -> Memory | None:
        return self._whole.memory(record)

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        return self._whole.window(record, start, stop)

    def read_ahead(self) -> ReadAhead | None:
        return self._whole.read_ahead()

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._whole.manifest

    @property
    def losses(self) -> Sequence[Loss]:
        named = {loss.key for loss in self._whole.losses if loss.key is not None}
        keys: set[TensorKey] = set()
        if named:
            keys = {record.key for record in self._records if record.key in named}
        return [loss for loss in self._whole.losses if loss.key is None or loss.key in keys]

    @property
    def growing(self) -> bool:
        return self._whole.growing

    def lost(self, record: Record) -> str:
        return self._whole.lost(record)

    def source(self, record: Record) -> str:
        return self._whole.source(record)

    def release(self) -> None:
        self._whole.release()

    def release_some(self) -> None:
        self._whole.release_some()

    def events(self) -> Iterator[Mapping[str, Any]]:
        return self._whole.events()

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        return self._whole.topology(rank, process)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self._whole.sheets(rank, process)

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        return self._whole.sheet(name, rank, process)
