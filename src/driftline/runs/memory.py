"""A run in memory: the sink of `compare_models` and of tests. Does not use the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from driftline.numerics.dtypes import DTYPES
from driftline.runs.provenance import plain_json
from driftline.runs.records import Blob, Record
from driftline.runs.run import Loss, Memory, Run, Storage, no_values
from driftline.runs.sinks import JSON, Bytes
from driftline.runs.writer import OVER_LIMIT, digest_for


class MemorySink:
    """Keeps records and their values, equal bytes only once; see `Sink` for the contract."""

    def __init__(
        self, *, rank: int = 0, max_bytes: int | None = None, name: str = "memory"
    ) -> None:
        self.name = name
        self.rank = rank
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._blobs: dict[tuple[str, int], Bytes] = {}
        self._bytes = 0
        self._events: list[dict[str, Any]] = []
        self._facts: dict[str, JSON] = {}
        self._tree: Mapping[str, JSON] | None = None
        self._sheets: dict[str, str] = {}

    @property
    def bytes_written(self) -> int:
        return self._bytes

    @property
    def tensors_written(self) -> int:
        return len(self._records)

    def put(self, record: Record, data: Bytes | None) -> None:
        digest = digest_for(record, data)
        with self._lock:
            blob, lost = None, record.lost if data is None else ""
            if data is not None and data.nbytes and record.kept in ("full", "sample"):
                # Keyed by digest and length, so that equal bytes are copied once.
                place = (digest, data.nbytes)
                if place in self._blobs or self._fits(data.nbytes):
                    if place not in self._blobs:
                        # The program may overwrite its tensor right after the call.
                        copy = data.copy()
                        copy.flags.writeable = False
                        self._blobs[place] = copy
                        self._bytes += data.nbytes
                    blob = Blob("memory", 0, data.nbytes)
                else:
                    lost = OVER_LIMIT
            # A sink has one rank, which replaces another rank or process in the record.
            key = record.key
            if key.rank != self.rank or key.process != 0:
                key = key._replace(rank=self.rank, process=0)
            self._records.append(
                Record(  # positional: `_replace` takes three times as long
                    key,
                    len(self._records),
                    record.dtype,
                    record.shape,
                    record.alias,
                    record.class_name,
                    record.device,
                    record.kept,
                    digest,
                    blob,
                    record.sample_stride,
                    record.summary,
                    record.placement,
                    lost,
                )
            )

    def event(self, kind: str, message: str, **details: JSON) -> None:
        event: dict[str, Any] = {"kind": kind, "message": message, "rank": self.rank, "process": 0}
        event["order"] = len(self._records)
        if details:
            event["details"] = plain_json(details)
        self._events.append(event)

    def describe(self, **facts: JSON) -> None:
        self._facts.update(facts)

    def topology(self, tree: Mapping[str, JSON]) -> None:
        self._tree = tree

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        """Add text to a side file of this process."""
        with self._lock:
            self._sheets[name] = text if anew else self._sheets.get(name, "") + text

    def step_done(self, step: int) -> None:
        self.event("step", f"step {step} done", step=step)

    def flush(self) -> None:
        """Nothing needs to be written."""

    def close(self) -> None:
        """Nothing needs to be sealed."""

    def run(self) -> Run:
        """The records so far, as a run."""
        return _MemoryRun(
            self.name,
            list(self._records),
            self._blobs,
            list(self._events),
            self._tree,
            dict(self._facts),
            dict(self._sheets),
        )

    def _fits(self, length: int) -> bool:
        return self._max_bytes is None or self._bytes + length <= self._max_bytes


class _MemoryRun(Run):
    def __init__(
        self,
        name: str,
        records: list[Record],
        blobs: dict[tuple[str, int], Bytes],
        events: list[dict[str, Any]],
        tree: Mapping[str, JSON] | None,
        facts: Mapping[str, JSON],
        sheets: Mapping[str, str],
    ) -> None:
        self.name = name
        self._records = records
        self._blobs = blobs
        self._events = events
        self._tree = tree
        self._facts = facts
        self._sheets = sheets

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._facts

    @property
    def losses(self) -> Sequence[Loss]:
        return [Loss(str(r.key), r.lost, r.key) for r in self._records if r.lost]

    def raw(self, record: Record) -> Storage:
        storage = np.dtype(DTYPES[record.dtype].storage)
        if record.blob is None:
            return no_values(record)
        return self._blobs[(record.digest, record.blob.length)].view(storage)

    def memory(self, record: Record) -> Memory | None:
        if record.blob is None:
            return None
        values = self._blobs[(record.digest, record.blob.length)]
        return Memory(values.ctypes.data, values.nbytes, values)

    def events(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._events)

    def processes(self) -> list[Mapping[str, Any]]:
        # A run that was not captured here was converted or assembled; no process made it.
        if "capture" not in self._facts:
            return []
        rank = self._records[0].key.rank if self._records else 0
        return [{**self._facts, "rank": rank, "process": 0, "sealed": True}]

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        del rank, process
        return self._tree

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        del rank, process
        return self._sheets.get(name, "")
