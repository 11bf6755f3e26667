"""The interface of a run for all readers: records in execution order, and their values.

A run may be on disk in our format, in memory, or a dump of another program; a subclass of `Run`
must only provide its records and `raw`. This file knows how bytes become numbers, but not how they
are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from driftline.errors import BadInput, NotInstalled, did_you_mean
from driftline.numerics.dtypes import DTYPES, to_float64, unpack_nibbles
from driftline.numerics.fields import Summary
from driftline.runs.records import Record, TensorKey, usual_moment, usual_phase

if TYPE_CHECKING:
    from driftline.runs.facts import Order, RunFacts
    from driftline.runs.sinks import JSON

Storage: TypeAlias = "npt.NDArray[np.generic]"


class Loss(NamedTuple):
    """Something that should be in a run, but is not.

    Attributes:
        where: The file, line or tensor concerned, inside the run.
        reason: The known reason, in words.
        key: The tensor that cannot be read; None if the loss is not a single tensor.
    """

    where: str
    reason: str
    key: TensorKey | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class TensorHandle(NamedTuple):
    """One captured tensor; its values are read on demand."""

    run: Run
    record: Record

    @property
    def key(self) -> TensorKey:
        return self.record.key

    @property
    def dtype(self) -> str:
        return self.record.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def summary(self) -> Summary | None:
        return self.record.summary

    @property
    def lost(self) -> str:
        """Why its values cannot be read although they should be stored; empty if they can."""
        return self.run.lost(self.record)

    @property
    def has_values(self) -> bool:
        return self.record.kept in ("full", "sample") and not self.lost

    def raw(self) -> Storage:
        """The kept values as a flat read-only array of the storage type, without a copy.

        Floats that numpy lacks are unsigned integers, and 4-bit types are packed bytes; see
        `numerics.dtypes`.
        """
        return self.run.raw(self.record)

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a read-only array of the tensor's shape; those of a sample are flat.

        bfloat16 and the 8- and 4-bit floats have ml_dtypes types; int4 and uint4 are unpacked to
        int8 and uint8, one element each; complex32 becomes complex64. All other types are numpy's
        own.
        """
        return as_numpy(self.raw(), self.record)

    def float64(self) -> npt.NDArray[Any]:
        """The values decoded to float64 (or complex128 for complex types), shaped as `numpy()`."""
        record = self.record
        decoded = to_float64(self.raw(), DTYPES[record.dtype], kept_elements(record))
        return decoded if record.kept == "sample" else decoded.reshape(record.shape)

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"<{self.key} {self.dtype}[{shape}]>"


class Memory(NamedTuple):
    """Address of a tensor's stored values, for callers that need no array.

    Attributes:
        address: Address of the first byte.
        length: Number of bytes.
        owner: Object that keeps the memory alive.
    """

    address: int
    length: int
    owner: object


class ReadAhead(Protocol):
    """Reads the values of records in the background; only one thread may use it."""

    def begin(self, records: Sequence[Record]) -> None:
        """Begin to read these records; memory returned before the last `take` may be reused."""
        ...

    def take(self) -> list[Memory | None]:
        """The values of the records that were begun; None means that `Run.memory` must be used."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


def kept_elements(record: Record) -> int:
    """Number of elements whose values a record keeps."""
    elements = 1
    for extent in record.shape:
        elements *= extent
    if record.kept == "sample":
        return -(-elements // record.sample_stride)
    return elements


def as_numpy(raw: Storage, record: Record) -> npt.NDArray[Any]:
    """Storage values in the type that a person expects; see `TensorHandle.numpy`."""
    dtype = DTYPES[record.dtype]
    values: npt.NDArray[Any] = raw
    if dtype.bits == 4:
        codes = unpack_nibbles(raw.view(np.uint8), kept_elements(record))
        if dtype.kind == "int":
            signed = codes.view(np.int8)
            # Two's complement of four bits: codes above 7 are negative.
            values = np.where(signed > 7, signed - 16, signed).astype(np.int8)
        else:
            values = codes
    if DTYPES[record.dtype].ml_dtypes:
        values = values.view(_ml_dtype(DTYPES[record.dtype].ml_dtypes))
    elif record.dtype == "complex32":
        values = raw.view("<f2").astype(np.float32).view(np.complex64)
    if record.kept != "sample":
        values = values.reshape(record.shape)
    # Mapped bytes cannot be written; a caller must not be able to change copied ones either.
    if values.flags.writeable:
        values.flags.writeable = False
    return values


def _ml_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise NotInstalled(
            f"numpy has no {name}, and the package that adds it is missing",
            hint="pip install ml_dtypes",
        ) from None
    return getattr(ml_dtypes, name)


def no_values(record: Record) -> Storage:
    """The values of a record without bytes: an empty array for an empty tensor, else an error.

    Raises:
        BadInput: The tensor had values, which were not kept or are lost.
    """
    if record.lost:
        raise BadInput(f"{record.key} has no values: {record.lost}")
    if record.kept not in ("full", "sample"):
        raise BadInput(
            f"{record.key} has no values: only its {record.kept} was kept",
            hint="dump it with the reduction 'full'",
        )
    if 0 not in record.shape:
        raise BadInput(f"{record.key} has no values: the index does not say where they are")
    nothing = np.empty(0, np.dtype(DTYPES[record.dtype].storage))
    nothing.flags.writeable = False
    return nothing


class Run(ABC):
    """The tensors of one execution.

    Subclasses define `records` and `raw`; the rest has defaults.
    """

    name: str = "run"
    """Name in messages, usually a path."""

    opened: str = ""
    """Path or address for `open_run` in any process; empty for a run of this process only."""

    _order: Order = "execution"
    """Meaning of the records' order, unless the manifest or a process declares it."""

    fetched: bool = False
    """Whether values come from another machine.

    Then reading a part of a tensor is cheaper than reading all of it, and parallel reads are faster
    than sequential ones.
    """

    _sites: dict[str, list[int]] | None = None
    _facts_read: RunFacts | None = None

    @property
    def facts(self) -> RunFacts:
        """Facts about the whole run; a view has the same facts."""
        if self._facts_read is not None:
            return self._facts_read
        from driftline.runs.facts import read_facts  # a capture never needs them

        facts = read_facts(self, self._order)
        if not self.growing:  # a running process may add facts
            self._facts_read = facts
        return facts

    @property
    def ordered(self) -> bool:
        """Whether the order of records has a meaning; in a file of named tensors it has none."""
        return self.facts.order != "none"

    @property
    @abstractmethod
    def records(self) -> Sequence[Record]:
        """All records, sorted by rank, process and execution order."""

    @abstractmethod
    def raw(self, record: Record) -> Storage:
        """The kept values of a record: flat, of the storage type, read-only.

        Raises:
            DriftlineError: The values were not stored, or are lost; the message says why.
        """

    def memory(self, record: Record) -> Memory | None:
        """Address of the bytes that `raw` would return; None if `raw` must be used instead.

        Raises:
            DriftlineError: As for `raw`.
        """
        del record
        return None

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        """As `memory`, for a caller that reads only the bytes from `start` to `stop`.

        Raises:
            DriftlineError: As for `raw`.
        """
        del start, stop
        return self.memory(record)

    def read_ahead(self) -> ReadAhead | None:
        """A background reader of many small tensors; None if that would gain nothing."""
        return None

    @property
    def manifest(self) -> Mapping[str, Any]:
        return {}

    @property
    def growing(self) -> bool:
        """Whether a process was still writing the run when it was read."""
        return False

    @property
    def losses(self) -> Sequence[Loss]:
        """Tensors and files that should be in the run, but are not."""
        return ()

    def lost(self, record: Record) -> str:
        """Why a record's values cannot be read; empty if they can, or should not be stored."""
        return record.lost

    def cut_off(self) -> Callable[[Record], str] | None:
        """A function that says how a record was cut off while it was read; None if no file was.

        Call it after reading, because a mapped file that is cut inside its last page reads as
        zeros.
        """
        return None

    def source(self, record: Record) -> str:
        """The file a record was read from, relative to the run; empty if many records share it."""
        del record
        return ""

    def release(self) -> None:  # noqa: B027 - most runs map nothing
        """Unmap the files of values; a later read maps them again."""

    def release_some(self) -> None:  # noqa: B027 - most runs map nothing
        """As `release`, while other threads are reading: files that they use stay mapped."""

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Warnings, findings and labels, each with its rank and process."""
        return iter(())

    def processes(self) -> list[Mapping[str, Any]]:
        """The facts that each process stored: versions, devices, seeds; empty for a file."""
        return []

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        """The module tree of a process, if it was captured."""
        del rank, process
        return None

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        """Names of a process's side tables: calls, operators, kernels, times."""
        del rank, process
        return []

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        """The text of a side table; empty if there is none of that name."""
        del name, rank, process
        return ""

    def __len__(self) -> int:
        return len(self.records)

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        from driftline.reporting.notebook import run_html

        return run_html(self)

    def tensors(self) -> Iterator[TensorHandle]:
        """Every tensor, by rank and process, in execution order."""
        for record in self.records:
            yield TensorHandle(self, record)

    def sites(self) -> list[str]:
        """Every site, in the order of its first appearance."""
        return list(self._positions())

    def get(
        self,
        site: str,
        port: str = "output",
        slot: str = "0",
        step: int = 0,
        rank: int = 0,
        visit: int = 0,
        *,
        process: int = 0,
        phase: str | None = None,
        moment: str | None = None,
    ) -> TensorHandle:
        """Return one tensor by its address; the slot may be its name or its position.

        Args:
            site: Module path, graph node or operator call.
            port: Input, output, parameter or gradient of the site.
            slot: Name or position of the tensor at that port.
            step: Training step or generated token.
            rank: Rank of the process.
            visit: Number of the call within the step, from 0.
            process: Number of the process of that rank.
            phase: forward, backward or recompute; by default the port's usual one.
            moment: before or after the call; by default the port's usual one.

        Raises:
            BadInput: There is no such tensor; the hint names the nearest one.
        """
        positions = self._positions().get(site)
        if positions is None:
            raise BadInput(
                f"run '{self.name}' has no site '{site}'",
                hint=did_you_mean(site, self._positions()),
            )
        wanted = {"port": port, "slot": slot, "step": step, "rank": rank, "visit": visit}
        wanted |= {"process": process}
        wanted["phase"] = phase if phase is not None else usual_phase(port)
        wanted["moment"] = moment if moment is not None else usual_moment(port)
        records = [self.records[p] for p in positions]
        # Names first: an alias that is another slot's name must not hide that slot.
        by_name = [r for r in records if all(getattr(r.key, n) == v for n, v in wanted.items())]
        if by_name:
            return TensorHandle(self, by_name[0])
        del wanted["slot"]
        for record in records:
            if record.alias == slot and all(getattr(record.key, n) == v for n, v in wanted.items()):
                return TensorHandle(self, record)
        asked = str(
            TensorKey(
                site,
                cast("Any", port),
                slot,
                step,
                visit,
                rank,
                process,
                cast("Any", wanted["phase"]),
                cast("Any", wanted["moment"]),
            )
        )
        raise BadInput(
            f"run '{self.name}' has no {asked}",
            hint=did_you_mean(asked, (str(record.key) for record in records)),
        )

    def _site_names(self) -> Iterator[str]:
        for record in self.records:
            yield record.key.site

    def _positions(self) -> dict[str, list[int]]:
        if self._sites is None:
            # Positions instead of records, because a long run builds its records on demand.
            sites: dict[str, list[int]] = {}
            for position, site in enumerate(self._site_names()):
                sites.setdefault(site, []).append(position)
            self._sites = sites
        return self._sites
