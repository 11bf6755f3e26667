"""Write a run: the part of one process, `rankN/` with its index, shards, events and facts.

Bytes are written before the line that names them: a killed process leaves a run that can be opened,
and loses at most the bytes that were still in buffers. A full disk or an unwritable folder never
stops the captured program; the run then lists what is missing. The caller decides which tensors are
stored.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from driftline.numerics.kernel import digest as digest_of
from driftline.runs.files.owned_file import OwnedFile, print_to_stderr
from driftline.runs.journal import Journal
from driftline.runs.layout import FIRST_HEADER, ORPHAN_EVENTS, SHARD_BYTES
from driftline.runs.process_folder import Part
from driftline.runs.provenance import ensure_manifest, event_line, library_versions, now
from driftline.runs.records import Blob, Record
from driftline.runs.sinks import JSON, Bytes, Group

# Digests that are remembered, so that equal bytes are stored once; each takes some hundred bytes.
_LONGEST_MEMORY = 500_000
# A program may warn in an endless loop before its first tensor.
_EARLY_EVENTS = 1000

OVER_LIMIT = "beyond the size limit of the dump"


def digest_for(record: Record, data: Bytes | None) -> str:
    """The record's own digest, or the digest of the bytes.

    The digest of a sample is always that of the bytes that are kept.
    """
    if data is None or record.kept == "describe" or (record.digest and record.kept != "sample"):
        return record.digest
    return digest_of(data)


class RunWriter:
    """The sink that writes the part of one process; see `Sink` for the contract of its methods.

    The folder `rankN` (or `rankN.p1`, ... if that exists) is created at the first watched call or
    the first tensor, so that launchers and helper processes leave nothing behind. After a fork, the
    child's copy creates its own folder.

    Attributes:
        first_header: Bytes reserved at the start of the first shard; tests make it small.
    """

    first_header: int = FIRST_HEADER

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        command: Sequence[str] | None = None,
        max_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
        seal_at_exit: bool = True,
    ) -> None:
        """Write nothing before the first tensor.

        Args:
            path: The run's folder; other processes may be writing their parts of it.
            rank: Rank of this process in its job.
            world_size: Number of ranks of the job.
            command: The user's command, if it is not this process's own command line.
            max_bytes: Limit of stored tensor bytes of this process; lines and summaries are still
                written.
            shard_bytes: Size beyond which a new shard file is started.
            seal_at_exit: Close at interpreter exit; pass False if the owner closes the writer.
        """
        self.path = Path(path).absolute()
        self.rank = rank
        self.process = 0
        self.world_size = world_size
        self._command = list(command) if command is not None else None
        self._max_bytes = max_bytes
        self._shard_bytes = shard_bytes

        self._seal_at_exit = seal_at_exit
        self._facts: dict[str, JSON] = {}
        self._tree: Mapping[str, JSON] | None = None
        self._reset()
        _LIVE.add(self)
        if seal_at_exit:
            atexit.register(self.close)

    def _reset(self) -> None:
        """Set the state of a writer that has written nothing: a new one, or a forked child's."""
        self._pid = os.getpid()
        self._no_folder = ""
        self._part: Part | None = None
        self._journal: Journal | None = None
        self._lock = threading.RLock()
        self._events_lock = threading.RLock()
        self._stored: dict[str, tuple[str, int, int]] = {}
        self._early: list[bytes] = []
        self._early_dropped = 0
        self._order = 0
        self._bytes = 0
        self._repeats = 0
        self._unlisted = 0
        self._steps = 0
        self._dtypes: set[str] = set()
        self._over_limit = False
        self._stays = False
        self._closed = False

    # ---- the methods of a sink

    @property
    def folder(self) -> Path | None:
        """The folder of this process; None before it is created."""
        return self._part.folder if self._part is not None else None

    @property
    def failure(self) -> str:
        """Why nothing more is stored; empty without a failure."""
        return self._journal.failure if self._journal is not None else self._no_folder

    @property
    def over_limit(self) -> bool:
        """Whether something did not fit into `max_bytes`."""
        return self._over_limit

    @property
    def bytes_written(self) -> int:
        return self._bytes

    @property
    def tensors_written(self) -> int:
        return self._order

    def put(self, record: Record, data: Bytes | None) -> None:
        # Before the lock: hashing takes longest, and threads can do it in parallel.
        digest = digest_for(record, data)
        self._notice_fork()
        with self._lock:
            journal = self._journal
            # After a failure, tensors are still counted, so that the run can say how many are
            # missing.
            if self._closed or (journal is None and (journal := self._open()) is None):
                self._unlisted += 1
                return
            blob, lost = None, record.lost if data is None else ""
            # Bytes of digest and summary records serve only to compute the digest, and are not
            # stored.
            if data is not None and data.nbytes and record.kept in ("full", "sample"):
                blob, lost = self._store(journal, record, data, digest)
            journal.list(record, self._order, digest, blob, lost)
            self._order += 1
            self._dtypes.add(record.dtype)

    def put_group(self, group: Group) -> None:
        """Store several records without bytes; their lines are made when they are written."""
        self._notice_fork()
        with self._lock:
            journal = self._journal
            if self._closed or (journal is None and (journal := self._open()) is None):
                self._unlisted += len(group)
                return
            journal.list_group(group, self._order)
            self._order += len(group)
            self._dtypes |= group.dtypes

    def event(self, kind: str, message: str, **details: JSON) -> None:
        self._notice_fork()
        line = event_line(kind, message, self._order, details)
        with self._events_lock:
            # There is no folder before the first tensor: events wait in memory.
            if self._part is None:
                if len(self._early) < _EARLY_EVENTS:
                    self._early.append(line)
                else:
                    self._early_dropped += 1
                return
            self._part.append_event(line)

    def describe(self, **facts: JSON) -> None:
        self._notice_fork()
        with self._lock:
            self._facts.update(facts)
            self._write_facts()

    def topology(self, tree: Mapping[str, JSON]) -> None:
        self._notice_fork()
        with self._lock:
            self._tree = tree
            self._write_topology()

    def sheet(self, name: str, text: str, *, anew: bool = False) -> None:
        """Add text to a file next to the index, such as a list of calls."""
        self._notice_fork()
        with self._lock:
            if self._closed or (self._journal is None and self._open() is None):
                return
            assert self._part is not None
            self._stays = True
            try:
                content = text.encode("ascii", "backslashreplace")
                self._part.append_sheet(name, content, anew=anew)
            except OSError as error:
                self._give_up(error)

    def step_done(self, step: int) -> None:
        self._steps += 1
        # There may be many steps before the first tensor; they are only counted.
        if self._part is not None and self._order:
            self.event("step", f"step {step} done", step=step)

    def open(self) -> None:
        """Create this process's folder without a tensor; a dump of module trees has none."""
        with self._lock:
            self._stays = True
            if not self._closed and self._journal is None:
                self._open()

    def begin(self) -> None:
        """Create this process's folder at the first watched call, so that a kill leaves a trace.

        If there is no tensor until the end, `close` removes the folder again.
        """
        self._notice_fork()
        with self._lock:
            if not self._closed and self._journal is None:
                self._open()

    def flush(self) -> None:
        """Return when everything put so far has been given to the system, and survives a kill."""
        self._notice_fork()
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        self._notice_fork()
        with self._lock:
            if self._closed:
                # Set first: what closing itself triggers must not create a new folder.
                return
            self._closed = True
            if self._seal_at_exit:
                atexit.unregister(self.close)
            # Without a tensor there is no folder, but the events are still worth keeping.
            if self._part is None or self._journal is None:
                self._leave_orphan_events()
                return
            self._journal.close()
            if not (self._order or self._unlisted or self._stays or self.failure):
                self._take_away()
                return
            self._write_facts()
            with self._events_lock:
                self._part.close()
            # A launcher reads the events; for a program that captures itself, this is the only
            # message.
            if self._seal_at_exit and self._journal.taken:
                print_to_stderr(f"the run '{self.path}' is incomplete: {self._journal.failure}")

    # ---- the program's thread

    def _open(self) -> Journal | None:
        """Create the folder of this process, at its first tensor."""
        try:
            part = Part(self.path, self.rank, self.world_size, self._command)
        except OSError as error:
            self._no_folder = f"cannot write to '{self.path}': {error.strerror or error}"
            self._closed = True
            return None
        with self._events_lock:
            self._part = part
            for line in self._early_events():
                part.append_event(line)
            self._early.clear()
        self.process = part.process
        self._journal = Journal(
            part,
            self._lock,
            self.event,
            shard_bytes=self._shard_bytes,
            header_bytes=self.first_header,
        )
        self._write_facts()
        self._write_topology()
        _close_with_multiprocessing(self.close)
        return self._journal

    def _store(
        self, journal: Journal, record: Record, data: Bytes, digest: str
    ) -> tuple[Blob | None, str]:
        """Give new bytes to the journal; returns their location, or why they are not stored."""
        length = data.nbytes
        stored = self._stored.get(digest)
        # Equal digests with different lengths are not a repeat: one may be the digest of a sample.
        if stored is not None and stored[2] == length:
            self._repeats += 1
            return Blob(*stored), ""
        # Larger tensors are refused before the limit is reached: a later, smaller one may still
        # fit.
        if self._max_bytes is not None and self._bytes + length > self._max_bytes:
            if not self._over_limit:
                self._over_limit = True
                self.event(
                    "limit",
                    f"the dump reached its size limit of {self._max_bytes} bytes: tensors that do "
                    "not fit are listed without their values",
                    max_bytes=self._max_bytes,
                )
            return None, OVER_LIMIT
        blob = journal.append(record, self._order, data)
        if blob is None:
            return None, journal.failure
        if len(self._stored) >= _LONGEST_MEMORY:
            self._stored.clear()  # forgetting them costs only disk space
        # A plain tuple of atoms: the garbage collector stops tracking it.
        self._stored[digest] = (blob.shard, blob.offset, blob.length)
        self._bytes += length
        return blob, ""

    # ---- small files

    def _write_facts(self) -> None:
        if self._part is None:
            return
        facts: dict[str, JSON] = {
            **self._facts,
            "versions": {**library_versions()},
            "dtypes": sorted(self._dtypes),
            "sealed": self._closed,
        }
        # Final numbers are written only at the end: those of a killed process would be wrong.
        if self._closed:
            facts |= {
                "ended": now(),
                "tensors": self._order,
                "stored_bytes": self._bytes,
                "repeats": self._repeats,
                "lost": self._journal.lost if self._journal else 0,
                "unlisted": self._unlisted + (self._journal.unlisted if self._journal else 0),
                "steps": self._steps,
                "failure": self.failure,
            }
        try:
            self._part.write_facts(facts)
        except OSError as error:
            self._give_up(error)

    def _write_topology(self) -> None:
        if self._part is not None and self._tree is not None:
            try:
                self._part.write_topology(self._tree)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._journal is not None:
            self._journal.fail(error)

    def _early_events(self) -> list[bytes]:
        """Events from before the folder existed."""
        if not self._early_dropped:
            return self._early
        text = f"{self._early_dropped} more events before the first tensor were not kept"
        return [*self._early, event_line("dropped", text, 0, {})]

    def _take_away(self) -> None:
        """Remove the folder of a process that ended without a tensor; its events stay."""
        assert self._part is not None
        with self._events_lock:
            part, self._part = self._part, None
            self._early = part.take_away()
        self._leave_orphan_events()

    def _leave_orphan_events(self) -> None:
        """Write the events of a process without tensors to the events of the run.

        Such a process has no folder.
        """
        if not self._early:
            return
        with contextlib.suppress(OSError):
            ensure_manifest(self.path, self._command, world_size=self.world_size)
            with OwnedFile(self.path / ORPHAN_EVENTS, "shared") as file:
                file.append_all(b"".join(self._early_events()))

    # ---- forks

    def _notice_fork(self) -> None:
        """Notice a fork made in C, such as `daemon(3)`, which does not call Python's hooks."""
        if self._pid != os.getpid():
            self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Forget the parent's files, to which the parent continues to write."""
        if self._part is not None:
            self._part.close()
        if self._journal is not None:
            self._journal.forget()
        # A writer that could not create its folder may succeed in the child; a closed one stays
        # closed.
        was_closed = self._closed and not self._no_folder
        self._reset()
        self._closed = was_closed


_LIVE: weakref.WeakSet[RunWriter] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for writer in list(_LIVE):
        writer.after_fork_in_child()


def _close_with_multiprocessing(close: Callable[[], None]) -> None:
    """Register with multiprocessing, whose children end without atexit but run finalizers."""
    process, util = (
        sys.modules.get("multiprocessing.process"),
        sys.modules.get("multiprocessing.util"),
    )
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, close, exitpriority=0)


os.register_at_fork(after_in_child=_forget_after_fork)
