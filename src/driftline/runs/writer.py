"""A run on disk, as one process writes it: `rankN/` with its index, shards, events and facts.

Bytes first, then the line that names them: a killed process leaves a run that opens, and loses at
most what was still staged. A disk that is full or a folder that cannot be written never stops the
captured program; the run then says what is missing. Which tensors are worth keeping is decided
elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from driftline.numerics.kernel import digest as digest_of
from driftline.runs.layout import ALIGNMENT, FIRST_HEADER, ORPHAN_EVENTS, SHARD_BYTES, align
from driftline.runs.lines import encode_line
from driftline.runs.manifest import ensure_manifest, event_line, library_versions, now
from driftline.runs.part import Part
from driftline.runs.record import Blob, Record
from driftline.runs.shard import Shard, cost_of
from driftline.runs.sink import JSON, Bytes
from driftline.runs.staging import BUFFER_BYTES, LONGEST_AGE, Staging

_LINES_PER_CHUNK = 2048
_LONGEST_MEMORY = 500_000
_PENDING_INDEX = 16 << 20
_EARLY_EVENTS = 1000

OVER_LIMIT = "beyond the size limit of the dump"


def digest_for(record: Record, data: Bytes | None) -> str:
    """The record's own digest, or that of the bytes.

    A sample's is always that of the bytes it keeps.
    """
    if data is None or record.kept == "describe" or (record.digest and record.kept != "sample"):
        return record.digest
    return digest_of(data)


_Stored: TypeAlias = "tuple[int, Record, int, str, Blob]"
"""A line's place in its chunk and what it was made of: it is made again if its bytes do not fit."""


@dataclass(slots=True)
class _Chunk:
    """Consecutive bytes of one shard, and the index lines that are true once they are written."""

    born: float
    shard: Shard | None = None
    base: int = 0
    used: int = 0
    buffer: Bytes | None = None
    lines: list[str] = field(default_factory=list[str])
    stored: list[_Stored] = field(default_factory=list["_Stored"])


class RunWriter:
    """The sink that writes a run's folder for one process; see `Sink` for what the methods promise.

    The folder `rankN` (or `rankN.p1`, ... when that is taken) is made at the first tensor, so that
    launchers and helper processes leave nothing behind. After a fork, the child's copy starts a
    folder of its own.

    Attributes:
        failure: Why nothing more is stored; empty as long as all is well.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        command: Sequence[str] | None = None,
        max_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
        header_bytes: int = FIRST_HEADER,
        seal_at_exit: bool = True,
    ) -> None:
        """Nothing is written before the first tensor.

        Args:
            path: The run's folder; may exist, with other processes writing their own part of it.
            rank: Rank of this process in its job.
            world_size: How many ranks the job has.
            command: What the user ran, if not this process's own command line.
            max_bytes: Store no more tensor bytes of this process; lines and summaries go on.
            shard_bytes: Begin a new shard file beyond this size.
            header_bytes: Reserved at the start of the first shard.
            seal_at_exit: Close at interpreter exit; pass False if the owner does.
        """
        self.path = Path(path).absolute()
        self.rank = rank
        self.process = 0
        self.world_size = world_size
        self._command = list(command) if command is not None else None
        self._max_bytes = max_bytes
        self._shard_bytes = shard_bytes
        self._first_header = header_bytes
        self._seal_at_exit = seal_at_exit
        self._facts: dict[str, JSON] = {}
        self._tree: Mapping[str, JSON] | None = None
        self._reset()
        _LIVE.add(self)
        if seal_at_exit:
            atexit.register(self.close)

    def _reset(self) -> None:
        """The state of a writer that has written nothing: at birth, and in a forked child."""
        self.failure = ""
        self._part: Part | None = None
        self._lock = threading.RLock()
        self._events_lock = threading.RLock()
        self._staging = Staging(self._flush_if_old)
        self._chunk: _Chunk | None = None
        self._shard: Shard | None = None
        self._shards = 0
        self._known: dict[tuple[str, int], Blob] = {}
        self._torn_after: tuple[str, int] | None = None
        self._pending_index = b""
        self._early: list[bytes] = []
        self._early_dropped = 0
        self._order = 0
        self._bytes = 0
        self._repeats = 0
        self._lost = 0
        self._unlisted = 0
        self._steps = 0
        self._dtypes: set[str] = set()
        self._over_limit = False
        self._opened = False
        self._closed = False

    # ---- what adapters call

    @property
    def folder(self) -> Path | None:
        """The folder of this process, once it has one."""
        return self._part.folder if self._part is not None else None

    @property
    def bytes_written(self) -> int:
        return self._bytes

    @property
    def tensors_written(self) -> int:
        return self._order

    def put(self, record: Record, data: Bytes | None) -> None:
        digest = digest_for(record, data)
        with self._lock:
            if self._closed or (not self._opened and not self._open()):
                self._unlisted += 1
                return
            blob, lost = None, ""
            if data is not None and data.nbytes and record.kept in ("full", "sample"):
                blob, lost = self._store(record, data, digest)
            order = self._order
            self._order = order + 1
            self._dtypes.add(record.dtype)
            chunk = self._chunk
            if chunk is None:
                chunk = self._chunk = _Chunk(time.monotonic())
            # Made here and not in the thread: a thread that needs the interpreter slows the program
            # far more than these two microseconds do.
            count = len(chunk.lines)
            if blob is not None:
                chunk.stored.append((count, record, order, digest, blob))
            elif lost:
                self._lost += 1
            chunk.lines.append(encode_line(record, order, digest, blob, lost))
            count += 1
            # The thread looks at the age too; here only against a thread that never gets a turn.
            if count >= _LINES_PER_CHUNK or (
                count % 16 == 0 and time.monotonic() - chunk.born > LONGEST_AGE
            ):
                self._hand_over(self._staging.submit)

    def event(self, kind: str, message: str, **details: JSON) -> None:
        line = event_line(kind, message, self._order, details)
        with self._events_lock:
            if self._part is None:
                if len(self._early) < _EARLY_EVENTS:
                    self._early.append(line)
                else:
                    self._early_dropped += 1
                return
            self._part.append_event(line)

    def describe(self, **facts: JSON) -> None:
        with self._lock:
            self._facts.update(facts)
            self._write_facts()

    def topology(self, tree: Mapping[str, JSON]) -> None:
        with self._lock:
            self._tree = tree
            self._write_topology()

    def step_done(self, step: int) -> None:
        self._steps += 1
        # Steps that ran before the first tensor are many and say nothing; they are counted only.
        if self._part is not None:
            self.event("step", f"step {step} done", step=step)

    def open(self) -> None:
        """Makes this process's folder without a tensor: a dump of module trees has none."""
        with self._lock:
            if not self._closed and not self._opened:
                self._open()

    def flush(self) -> None:
        """Returns when everything put so far is with the system: no kill can lose it now."""
        with self._lock:
            self._hand_over(self._staging.submit)
        self._staging.drain()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._seal_at_exit:
                atexit.unregister(self.close)
            if self._part is None:
                self._leave_orphan_events()
                return
            self._hand_over(self._staging.submit)
            if self._shard is not None:
                self._seal_later(self._shard)
                self._shard = None
            self._staging.finish()
            self._part.give_up_reserve()
            self._write_index(b"")
            self._unlisted += self._pending_index.count(b"\n")
            self._write_facts()
            with self._events_lock:
                self._part.close()

    # ---- the program's thread

    def _open(self) -> bool:
        """Makes the folder of this process, at its first tensor."""
        self._opened = True
        try:
            part = Part(self.path, self.rank, self.world_size, self._command)
        except OSError as error:
            self.failure = f"cannot write to '{self.path}': {error.strerror or error}"
            self._closed = True
            return False
        with self._events_lock:
            self._part = part
            for line in self._early_events():
                part.append_event(line)
            self._early.clear()
        self.process = part.process
        self._write_facts()
        self._write_topology()
        _close_with_multiprocessing(self.close)
        self._staging.start()  # now, so that a lone tensor does not wait for a second one
        return True

    def _store(self, record: Record, data: Bytes, digest: str) -> tuple[Blob | None, str]:
        """Copies new bytes to the staging area; returns where they will be, or why nowhere."""
        length = data.nbytes
        known = self._known.get((digest, length))
        if known is not None:
            self._repeats += 1
            return known, ""
        if self.failure:
            return None, self.failure
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
        cost = cost_of(record)
        try:
            shard = self._shard_for(cost, length)
        except OSError as error:
            self._fail(error)
            return None, self.failure
        start = align(shard.end)
        self._copy(shard, data, start - shard.end)
        blob = Blob(shard.name, start, length)
        shard.stored.append((record, self._order, blob))
        shard.room -= cost
        if len(self._known) >= _LONGEST_MEMORY:
            self._known.clear()  # forgetting costs only space on disk
        self._known[(digest, length)] = blob
        self._bytes += length
        return blob, ""

    def _shard_for(self, cost: int, length: int) -> Shard:
        """The shard with room for an entry of that cost and so many bytes."""
        shard = self._shard
        if shard is not None and (
            shard.room < cost
            or (shard.end + length + ALIGNMENT > self._shard_bytes and shard.stored)
        ):
            self._hand_over(self._staging.submit)
            self._seal_later(shard)
            shard = self._shard = None
        if shard is None:
            assert self._part is not None
            if self._chunk is not None:
                self._hand_over(self._staging.submit)
            while True:
                shard = Shard.create(self._part.folder, self._shards, self._first_header)
                self._shards += 1
                if shard.room >= cost:
                    break
                self._seal_later(shard)  # an absurdly small first header; the next one is larger
            self._shard = shard
        return shard

    def _copy(self, shard: Shard, data: Bytes, gap: int) -> None:
        """Appends zeros and data to the staged end of a shard, buffer by buffer."""
        at = -gap
        length = data.nbytes
        while at < length:
            chunk = self._chunk
            if chunk is None:
                chunk = self._chunk = _Chunk(time.monotonic())
            buffer = chunk.buffer
            if buffer is None:
                buffer = chunk.buffer = self._staging.take_buffer()
                chunk.shard, chunk.base, chunk.used = shard, shard.end, 0
            used = chunk.used
            room = BUFFER_BYTES - used
            if room == 0:
                self._hand_over(self._staging.submit)
                continue
            if at < 0:
                size = min(-at, room)
                buffer[used : used + size] = 0
            else:
                size = min(length - at, room)
                buffer[used : used + size] = data[at : at + size]
            at += size
            chunk.used = used + size
            shard.end = chunk.base + chunk.used

    def _hand_over(self, submit: Callable[[Callable[[], None]], None]) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            submit(lambda: self._write_chunk(chunk))

    def _seal_later(self, shard: Shard) -> None:
        self._staging.submit(lambda: self._seal(shard))

    # ---- the writing thread

    def _flush_if_old(self) -> None:
        chunk = self._chunk
        if chunk is None or time.monotonic() - chunk.born < LONGEST_AGE:
            return
        # Never waits: a put in progress looks at the age itself, or fills the buffer.
        if self._lock.acquire(blocking=False):
            try:
                self._hand_over(self._staging.submit_now)
            finally:
                self._lock.release()

    def _write_chunk(self, chunk: _Chunk) -> None:
        if chunk.buffer is not None and chunk.shard is not None:
            if self._torn_after is None:
                done = 0
                try:
                    while done < chunk.used:
                        done += chunk.shard.write(
                            chunk.buffer[done : chunk.used], chunk.base + done
                        )
                except Exception as error:
                    self._torn_after = (chunk.shard.name, chunk.base + done)
                    self._fail(error)
            self._staging.give_back(chunk.buffer)
        lines = chunk.lines
        if self._torn_after is not None:
            for place, record, order, digest, blob in chunk.stored:
                if (blob.shard, blob.offset + blob.length) > self._torn_after:
                    lines[place] = encode_line(record, order, digest, None, self.failure)
                    self._lost += 1
        if lines:
            lines.append("")
            self._write_index("\n".join(lines).encode("ascii", "replace"))

    def _write_index(self, text: bytes) -> None:
        """Appends whole lines; what the disk refuses is kept and tried again with the next ones."""
        assert self._part is not None
        if self._pending_index:
            if len(self._pending_index) + len(text) > _PENDING_INDEX:
                self._unlisted += text.count(b"\n")
                text = b""
            text = self._pending_index + text
        rest, error = self._part.append_index(memoryview(text))
        if error is not None and not self.failure:
            self._fail(error)  # gives up the reserve, which makes room
            rest, _ = self._part.append_index(rest)
        self._pending_index = bytes(rest)

    def _seal(self, shard: Shard) -> None:
        good_end = None
        if self._torn_after is not None and shard.name >= self._torn_after[0]:
            good_end = self._torn_after[1] if shard.name == self._torn_after[0] else shard.reserved
        try:
            shard.seal(good_end)
        except (OSError, ValueError) as error:
            self.event("unsealed", f"{shard.name} could not be sealed: {error}")
        shard.stored.clear()

    def _fail(self, error: Exception) -> None:
        """From here on values are not stored; said once."""
        if self.failure:
            return
        if self._part is not None:
            self._part.give_up_reserve()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self.failure = f"could not be written: {reason}"
        self.event(
            "disk",
            f"writing failed ({reason}): from here on tensors are listed without their values",
        )

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
        if self._closed:
            facts |= {
                "ended": now(),
                "tensors": self._order,
                "stored_bytes": self._bytes,
                "repeats": self._repeats,
                "lost": self._lost,
                "unlisted": self._unlisted,
                "steps": self._steps,
                "failure": self.failure,
            }
        try:
            self._part.write_facts(facts)
        except OSError as error:
            self._fail(error)

    def _write_topology(self) -> None:
        if self._part is not None and self._tree is not None:
            try:
                self._part.write_topology(self._tree)
            except OSError as error:
                self._fail(error)

    def _early_events(self) -> list[bytes]:
        """What was said before there was a place for it."""
        if not self._early_dropped:
            return self._early
        text = f"{self._early_dropped} more events before the first tensor were not kept"
        return [*self._early, event_line("dropped", text, 0, {})]

    def _leave_orphan_events(self) -> None:
        """A process without tensors has no folder.

        What it had to say goes into the run's own events.
        """
        if not self._early:
            return
        with contextlib.suppress(OSError):
            ensure_manifest(self.path, self._command, world_size=self.world_size)
            with (self.path / ORPHAN_EVENTS).open("ab", buffering=0) as file:
                file.write(b"".join(self._early_events()))

    # ---- forks

    def after_fork_in_child(self) -> None:
        """The parent goes on writing its files; this copy forgets them and would start its own."""
        if self._part is not None:
            self._part.close()
        if self._shard is not None:
            with contextlib.suppress(OSError):
                os.close(self._shard.file)
        was_closed = self._closed and not self.failure
        self._reset()
        self._closed = was_closed


_LIVE: weakref.WeakSet[RunWriter] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for writer in list(_LIVE):
        writer.after_fork_in_child()


def _close_with_multiprocessing(close: Callable[[], None]) -> None:
    """Children of multiprocessing end without atexit; they run these finalizers instead."""
    process, util = (
        sys.modules.get("multiprocessing.process"),
        sys.modules.get("multiprocessing.util"),
    )
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, close, exitpriority=0)


os.register_at_fork(after_in_child=_forget_after_fork)
