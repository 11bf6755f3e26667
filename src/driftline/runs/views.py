"""Views of runs: a selection of steps, ranks or tensors of a run, or tensors under other names.

A view delegates everything that it does not change on purpose, so that no fact of a run (framework,
meshes, events) is lost. `Run` has defaults for most members, so every member is delegated by name
here, and a test checks that none is forgotten.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.errors import BadInput
from driftline.runs.index import IndexRecords
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Loss, Memory, ReadAhead, Run, Storage
from driftline.runs.sinks import JSON

if TYPE_CHECKING:
    from driftline.runs.facts import RunFacts


def narrowed(run: Run, *, steps: Collection[int] = (), ranks: Collection[int] = ()) -> Run:
    """The run with only these steps and ranks; an empty collection means all.

    Raises:
        BadInput: The run has none of the steps or none of the ranks.
    """
    if not steps and not ranks:
        return run
    # The records of a long run are not built only to leave out ranks.
    if isinstance(run.records, IndexRecords) and not steps:
        # Complete parts of the run, whose lines can stay in their files.
        parts = [part for part in run.records.parts if len(part.lines)]
        _require(run, "rank", ranks, {part.rank for part in parts})
        return NarrowedRun(run, IndexRecords([part for part in parts if part.rank in ranks]))
    existing: tuple[set[int], set[int]] = (set(), set())
    kept: list[Record] = []
    for record in run.records:
        key = record.key
        existing[0].add(key.step)
        existing[1].add(key.rank)
        if (not steps or key.step in steps) and (not ranks or key.rank in ranks):
            kept.append(record)
    _require(run, "step", steps, existing[0])
    _require(run, "rank", ranks, existing[1])
    return NarrowedRun(run, kept)


def _require(run: Run, what: str, wanted: Collection[int], existing: Collection[int]) -> None:
    for number in sorted(wanted):
        if number not in existing:
            have = ", ".join(str(n) for n in sorted(existing)[:8])
            have += ", ..." if len(existing) > 8 else ""
            plural = "s" if len(existing) > 1 else ""
            hint = f"it has {what}{plural} {have}"
            raise BadInput(f"run '{run.name}' has no {what} {number}", hint=hint)


def only(run: Run, wanted: Callable[[Record], bool]) -> Run:
    """The run with only the tensors for which `wanted` is true."""
    return NarrowedRun(run, [record for record in run.records if wanted(record)])


def of_ports(run: Run, globs: Sequence[str]) -> Run:
    """The run with only the ports that match, such as `output` or `grad_*`.

    Raises:
        BadInput: A glob matches no port of the run.
    """
    ports = {record.key.port for record in run.records}
    for glob in globs:
        if not fnmatch.filter(ports, glob):
            raise BadInput(
                f"run '{run.name}' has no port '{glob}'", hint=f"it has {', '.join(sorted(ports))}"
            )
    return only(run, lambda record: any(fnmatch.fnmatchcase(record.key.port, g) for g in globs))


class RunView(Run):
    """A view of a run; members that a subclass does not override are those of the run.

    Attributes:
        base: The run that is viewed.
    """

    def __init__(self, base: Run) -> None:
        self.name = base.name
        self.opened = base.opened
        self.fetched = base.fetched
        self.base = base

    @property
    def facts(self) -> RunFacts:
        return self.base.facts

    @property
    def records(self) -> Sequence[Record]:
        return self.base.records

    def raw(self, record: Record) -> Storage:
        return self.base.raw(record)

    def memory(self, record: Record) -> Memory | None:
        return self.base.memory(record)

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        return self.base.window(record, start, stop)

    def read_ahead(self) -> ReadAhead | None:
        return self.base.read_ahead()

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.base.manifest

    @property
    def growing(self) -> bool:
        return self.base.growing

    @property
    def losses(self) -> Sequence[Loss]:
        return self.base.losses

    def lost(self, record: Record) -> str:
        return self.base.lost(record)

    def source(self, record: Record) -> str:
        return self.base.source(record)

    def cut_off(self) -> Callable[[Record], str] | None:
        return self.base.cut_off()

    def release(self) -> None:
        self.base.release()

    def release_some(self) -> None:
        self.base.release_some()

    def events(self) -> Iterator[Mapping[str, Any]]:
        return self.base.events()

    def processes(self) -> list[Mapping[str, Any]]:
        return self.base.processes()

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        return self.base.topology(rank, process)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self.base.sheets(rank, process)

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        return self.base.sheet(name, rank, process)


class NarrowedRun(RunView):
    """Some records of a run."""

    def __init__(self, base: Run, records: Sequence[Record]) -> None:
        super().__init__(base)
        self._records = records

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def losses(self) -> Sequence[Loss]:
        """Losses of its own tensors, and those that are not about a tensor."""
        # Iterating over all records is worthwhile only if a loss names a tensor.
        named = {loss.key for loss in self.base.losses if loss.key is not None}
        keys: set[TensorKey] = set()
        if named:
            keys = {record.key for record in self._records if record.key in named}
        return [loss for loss in self.base.losses if loss.key is None or loss.key in keys]
