"""Write in the background: buffers between the captured program and the disk (`Staging`), and the
order in which bytes and index lines are written (`Journal`).

The program's thread copies into a buffer and continues. If all buffers are full it waits, so that
memory stays bounded and a kill loses at most `BUFFERS * BUFFER_BYTES` bytes. Bytes are written
before the lines that name them. A dead thread never makes the program hang. The writer decides
which tensors are written.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from driftline.runs.files.owned_file import FileTaken
from driftline.runs.files.shard_writer import Shard
from driftline.runs.index_lines import bytes_end, encode_line, without_bytes
from driftline.runs.layout import ALIGNMENT, LARGEST_HEADER, align
from driftline.runs.process_folder import Part
from driftline.runs.records import Blob, Record
from driftline.runs.sinks import Bytes, Group

# Six buffers of 8 MB: enough to hide a disk's pauses, and the most that a kill can lose.
BUFFER_BYTES = 8 << 20
BUFFERS = 6
LONGEST_AGE = 0.1
"""Seconds after which a half-full buffer is written.

Values that a program computed 0.2 s before it was killed are on disk. Checking twenty times a
second costs it less than a thousandth of its time.
"""
# Tasks without bytes need no buffer, so their number is limited separately.
_QUEUE = 16

Task = Callable[[], None]


class Staging:
    """A queue of tasks, the thread that runs them, and the buffers that they use."""

    def __init__(self, when_idle: Task, when_wrong: Callable[[Exception], None]) -> None:
        """Start nothing yet.

        Args:
            when_idle: Called by the thread twice in `LONGEST_AGE` while the queue is empty.
            when_wrong: Called with the exception of a task, which ends neither the thread nor the
                program.
        """
        self._when_idle = when_idle
        self._when_wrong = when_wrong
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Task] = deque()
        self._free: list[Bytes] = []
        self._made = 0
        self._busy = False
        self._finished = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. Without it, a caller that waits for a buffer does the work itself."""
        with self._changed:
            self._start()

    def take_buffer(self) -> Bytes:
        """An empty buffer; waits while all buffers are being written."""
        while True:
            with self._changed:
                if self._free:
                    return self._free.pop()
                if self._made < BUFFERS:
                    self._made += 1
                    return np.empty(BUFFER_BYTES, np.uint8)
            # Wait outside of the lock; otherwise the thread could not give its buffer back.
            self._wait_or_help()

    def give_back(self, buffer: Bytes) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, task: Task) -> None:
        """Queue a task; waits while too many are queued."""
        while True:
            with self._changed:
                if len(self._tasks) < _QUEUE:
                    self._tasks.append(task)
                    self._start()
                    self._changed.notify_all()
                    return
            self._wait_or_help()

    def submit_now(self, task: Task) -> None:
        """Queue a task without waiting; for the thread itself, which must not wait for itself."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def finish(self) -> None:
        """Run all queued tasks, then end the thread."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        thread = self._thread
        if self._is_served() and thread is not None and thread is not threading.current_thread():
            thread.join()
        # A task may have been queued after the thread looked for the last time.
        while self._do_one():
            pass

    def drain(self, seconds: float = 60.0) -> bool:
        """Wait until all queued tasks are done; returns False if that takes too long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._changed:
                if not self._tasks and not self._busy:
                    return True
            self._wait_or_help()
        return False

    def _start(self) -> None:
        if self._thread is None and not self._finished:
            thread = threading.Thread(target=self._loop, name="driftline-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # the interpreter is ending: callers do the work, see _wait_or_help
            self._thread = thread

    def _wait_or_help(self) -> None:
        # Without a living thread (interpreter exit, fork), the program's own thread does the work.
        if self._is_served():
            with self._changed:
                self._changed.wait(0.2)
        elif not self._do_one():
            time.sleep(0.001)

    def _is_served(self) -> bool:
        """Whether the thread lives; after a fork made in C, `is_alive` alone would be wrong."""
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def _do_one(self) -> bool:
        with self._changed:
            if not self._tasks:
                return False
            task = self._tasks.popleft()
            self._busy = True
        try:
            task()
        except Exception as error:
            self._when_wrong(error)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._tasks and not self._finished:
                    # Half the longest age: a chunk is noticed before it is twice as old.
                    self._changed.wait(LONGEST_AGE / 2)
                waiting, finished = bool(self._tasks), self._finished
            if waiting:
                self._do_one()
            elif finished:
                return
            else:
                self._when_idle()


# Lines of tensors without bytes fill no buffer, so they are counted.
_LINES_PER_CHUNK = 2048
# On a full disk, lines wait in memory, but only up to this size.
_PENDING_INDEX = 16 << 20
_HEADER_SHARE = 64
"""At most one in so many bytes of a shard is reserved for its header."""

_Later: TypeAlias = "tuple[Group, int]"
"""A group whose lines are made when they are written, and the order of its first record."""

Submit: TypeAlias = Callable[[Task], None]
Say: TypeAlias = Callable[[str, str], None]


@dataclass(slots=True)
class _Chunk:
    """Consecutive bytes of one shard, and the index lines that may be written after them."""

    born: float
    shard: Shard | None = None
    base: int = 0
    used: int = 0
    buffer: Bytes | None = None
    lines: list[str | _Later] = field(default_factory=list["str | _Later"])
    grouped: int = 0


class Journal:
    """The growing shards and index of one part. Callers of all methods but `flush` hold the lock.

    Attributes:
        lock: Held by callers that append; the background thread only tries to take it.
        failure: Why no more bytes are stored; empty without a failure.
        taken: Whether the program closed one of our files, so that the disk is not the reason.
        lost: Number of lines that were written without their bytes.
        unlisted: Number of lines that could not be written.
    """

    def __init__(
        self, part: Part, lock: threading.RLock, say: Say, *, shard_bytes: int, header_bytes: int
    ) -> None:
        """Start the thread, so that a single tensor is written without waiting for another one.

        Args:
            part: The folder to write to.
            lock: Held by callers.
            say: Called with the kind and the message of an event.
            shard_bytes: Size beyond which a new shard is started.
            header_bytes: Number of bytes reserved at the start of the first shard.
        """
        self.lock = lock
        self.failure = ""
        self.taken = False
        self.lost = 0
        self.unlisted = 0
        self._part = part
        self._say = say
        self._shard_bytes = shard_bytes
        self._first_header = header_bytes
        self._chunk: _Chunk | None = None
        self._shard: Shard | None = None
        self._shards = 0
        self._torn_after: tuple[str, int] | None = None
        self._pending_index = b""
        self._staging = Staging(self._flush_if_old, self.fail)
        self._staging.start()

    # ---- the program's thread

    def append(self, record: Record, order: int, data: Bytes) -> Blob | None:
        """Copy bytes into a buffer; returns their future location, or None after a failure."""
        if self.failure:
            return None
        length = data.nbytes
        try:
            shard = self._shard_for(length)
            start = align(shard.end)
            # A full header ends a shard, as a full file does.
            while not shard.header.add(record, order, start, length):
                shard = self._next_shard()
                start = align(shard.end)
        except OSError as error:
            self.fail(error)
            return None
        self._copy(shard, data, start - shard.end)
        return Blob(shard.name, start, length)

    def list(self, record: Record, order: int, digest: str, blob: Blob | None, lost: str) -> None:
        """Add one index line."""
        chunk = self._chunk
        if chunk is None:
            chunk = self._chunk = _Chunk(time.monotonic())
        # Encoded here rather than in the thread: a thread that needs the interpreter slows the
        # program far more than these two microseconds do.
        chunk.lines.append(encode_line(record, order, digest, blob, lost))
        if lost:
            self.lost += 1
        count = len(chunk.lines)
        # The thread checks the age too; this check is for a thread that never gets to run.
        if count >= _LINES_PER_CHUNK or (
            count % 16 == 0 and time.monotonic() - chunk.born > LONGEST_AGE
        ):
            self._hand_over(self._staging.submit)

    def list_group(self, group: Group, order: int) -> None:
        """Add the lines of a group; the thread makes them, because that is done in C."""
        chunk = self._chunk
        if chunk is None:
            chunk = self._chunk = _Chunk(time.monotonic())
        chunk.lines.append((group, order))
        chunk.grouped += len(group)
        if chunk.grouped >= _LINES_PER_CHUNK or time.monotonic() - chunk.born > LONGEST_AGE:
            self._hand_over(self._staging.submit)

    def flush(self) -> None:
        """Return when everything listed so far is in the system's hands and survives a kill."""
        with self.lock:
            self._hand_over(self._staging.submit)
        self._staging.drain()

    def close(self) -> None:
        """Write everything, seal the last shard and end the thread."""
        self._hand_over(self._staging.submit)
        if self._shard is not None:
            self._seal_later(self._shard)
            self._shard = None
        self._staging.finish()
        self._part.give_up_reserve()
        self._write_index(b"")
        self.unlisted += self._pending_index.count(b"\n")

    def forget(self) -> None:
        """Close the shard in a forked child; the files belong to the parent."""
        if self._shard is not None:
            self._shard.file.close()

    def _shard_for(self, length: int) -> Shard:
        """The shard for a tensor of this length."""
        shard = self._shard
        if shard is None or (
            # A tensor larger than a shard gets its own shard, of any size.
            shard.end + length + ALIGNMENT > self._shard_bytes and len(shard.header)
        ):
            return self._next_shard()
        return shard

    def _next_shard(self) -> Shard:
        self._hand_over(self._staging.submit)
        shard, self._shard = self._shard, None
        most = max(self._first_header, self._shard_bytes // _HEADER_SHARE)
        if shard is not None:
            self._seal_later(shard)
            if not len(shard.header):  # a tiny first header; the next one is larger
                most = LARGEST_HEADER
        self._shard = Shard.create(self._part.folder, self._shards, self._first_header, most)
        self._shards += 1
        return self._shard

    def _copy(self, shard: Shard, data: Bytes, gap: int) -> None:
        """Append zeros and data to the staged end of a shard, buffer by buffer."""
        # Counted from the first byte of data, so the gap before it has negative positions.
        position = -gap
        length = data.nbytes
        while position < length:
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
            if position < 0:
                size = min(-position, room)
                buffer[used : used + size] = 0
            else:
                size = min(length - position, room)
                buffer[used : used + size] = data[position : position + size]
            position += size
            chunk.used = used + size
            shard.end = chunk.base + chunk.used

    def _hand_over(self, submit: Submit) -> None:
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
        # Never waits: a `put` in progress checks the age itself, or fills the buffer.
        if self.lock.acquire(blocking=False):
            try:
                self._hand_over(self._staging.submit_now)
            finally:
                self.lock.release()

    def _write_chunk(self, chunk: _Chunk) -> None:
        if chunk.buffer is not None and chunk.shard is not None:
            # After a torn write, the remaining bytes have no valid place.
            if self._torn_after is None:
                done = 0
                try:
                    while done < chunk.used:
                        piece = chunk.buffer[done : chunk.used]
                        done += chunk.shard.write(piece, chunk.base + done)
                except Exception as error:
                    self._torn_after = (chunk.shard.name, chunk.base + done)
                    self.fail(error)
            self._staging.give_back(chunk.buffer)
        lines = chunk.lines
        # Lines after the torn write would name missing bytes; they give the reason instead.
        if self._torn_after is not None:
            for place, line in enumerate(lines):
                if not isinstance(line, str):
                    continue  # groups have no bytes
                end = bytes_end(line)
                if end is not None and end > self._torn_after:
                    lines[place] = without_bytes(line, self.failure)
                    self.lost += 1
        if lines:
            self._write_index(b"".join(map(_encoded, lines)))

    def _write_index(self, text: bytes) -> None:
        """Append complete lines; lines that the disk refuses are tried again with the next ones."""
        if self._pending_index:
            # The waiting lines are older, and name tensors that are on disk.
            if len(self._pending_index) + len(text) > _PENDING_INDEX:
                self.unlisted += text.count(b"\n")
                text = b""
            text = self._pending_index + text
        rest, error = self._part.append_index(memoryview(text))
        if error is not None and not self.failure:
            self.fail(error)  # gives up the reserve, which makes room
            rest, _ = self._part.append_index(rest)
        self._pending_index = bytes(rest)

    def _seal(self, shard: Shard) -> None:
        good_end = None
        # Shards after the torn one have no bytes at all; their header lists nothing.
        if self._torn_after is not None and shard.name >= self._torn_after[0]:
            torn = shard.name == self._torn_after[0]
            good_end = self._torn_after[1] if torn else shard.header.reserved
        try:
            shard.seal(good_end)
        except (OSError, ValueError) as error:
            self._say("unsealed", f"{shard.name} could not be sealed: {error}")

    def fail(self, error: Exception) -> None:
        """Stop storing bytes, and report the first failure."""
        if self.failure:
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self.failure = f"could not be written: {reason}"
        self.taken = isinstance(error, FileTaken)
        # The last index lines are written into the megabyte that this frees.
        self._part.give_up_reserve()
        self._say(
            "disk",
            f"writing failed ({reason}): from here on tensors are listed without their values",
        )


def _encoded(line: str | _Later) -> bytes:
    """A line, or the lines of a group, with line ends."""
    if isinstance(line, str):
        return line.encode("ascii", "replace") + b"\n"
    group, order = line
    return group.lines(order)
