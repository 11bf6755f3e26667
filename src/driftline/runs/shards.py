"""The files of bytes that one process left, mapped when they are first asked for.

Knows names and sizes of files, not what their bytes mean.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from pathlib import Path

from driftline.errors import BadFile, Unreachable
from driftline.numerics.addresses import address_of, let_go
from driftline.runs.inside import open_inside, reason_of
from driftline.runs.layout import is_shard_name
from driftline.runs.record import Record
from driftline.runs.run import Memory

MOST_MAPPED = 128
"""Files of a run that are mapped at a time: each is an open file, of which a process often may have
1024, and a run has one for each of its ranks at least."""


class Mapped:
    """Which shards of a run are mapped, in all its folders; of too many the oldest is let go."""

    def __init__(self) -> None:
        self._names: deque[tuple[Shards, str]] = deque()

    def add(self, shards: Shards, name: str) -> None:
        self._names.append((shards, name))
        while len(self._names) > MOST_MAPPED:
            oldest, its = self._names.popleft()
            oldest.forget(its)


class Shards:
    """The shards in one folder of a run.

    Args:
        root: The run, which no name leads out of.
        name: Its folder in there.
        mapped: What all folders of the run share.
    """

    def __init__(self, root: Path, name: str, mapped: Mapped) -> None:
        self.root = root
        self.name = name
        self._mapped = mapped
        self._maps: dict[str, mmap.mmap | bytes] = {}
        self._places: dict[str, tuple[memoryview, int]] = {}

    def size(self, shard: str) -> int | str:
        """How many bytes a shard has, or why that cannot be said.

        Raises:
            Unreachable: No more files can be opened, which says nothing about this one.
        """
        try:
            file = open_inside(self.root, self.root / self.name / shard)
        except FileNotFoundError:
            known = _sent_to(self.root, f"{self.name}/{shard}")
            return f"{shard} is missing" if known is None else known[1]
        except OSError as error:
            _require_files(error)
            return f"{shard} {reason_of(error)}"
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def content(self, record: Record) -> tuple[mmap.mmap | bytes, int]:
        """The mapped shard that holds a record's bytes, and where in it they begin."""
        assert record.blob is not None
        content = self._map(record.blob.shard)
        check_inside(record, len(content))
        return content, record.blob.offset

    def memory(self, record: Record) -> Memory:
        """Where a record's bytes lie."""
        blob = record.blob
        assert blob is not None
        found = self._places.get(blob.shard)
        if found is None:
            view = memoryview(self._map(blob.shard))  # as long as it lives, the shard stays mapped
            found = self._places[blob.shard] = (view, address_of(view))
        view, address = found
        check_inside(record, len(view))
        return Memory(address + blob.offset, blob.length, view)

    def window(self, record: Record, start: int, stop: int) -> Memory:
        """All of it: what is mapped costs nothing until it is looked at."""
        del start, stop
        return self.memory(record)

    def release(self) -> None:
        """Let go of the maps: each ends with the last array or address of it, in any thread."""
        for view, address in list(self._places.values()):
            let_go(address, len(view))
        self._places.clear()
        self._maps.clear()

    def forget(self, shard: str) -> None:
        """As `release`, of one of them."""
        self._places.pop(shard, None)
        self._maps.pop(shard, None)

    def _map(self, shard: str) -> mmap.mmap | bytes:
        found = self._maps.get(shard)
        if found is None:
            if not is_shard_name(shard):
                raise BadFile(f"'{shard[:60]}' is not the name of a shard")
            try:
                file = open_inside(self.root, self.root / self.name / shard)
            except OSError as error:
                _require_files(error)
                known = _sent_to(self.root, f"{self.name}/{shard}")
                if known is not None:
                    raise BadFile(f"{self.name}/{shard} was sent to {known[0]}") from None
                raise BadFile(f"{self.name}/{shard} cannot be read: {reason_of(error)}") from None
            try:
                found = (
                    mmap.mmap(file, 0, access=mmap.ACCESS_READ) if os.fstat(file).st_size else b""
                )
            except OSError as error:
                _require_files(error)
                raise
            finally:
                os.close(file)
            self._maps[shard] = found
            self._mapped.add(self, shard)
        return found


def _require_files(error: OSError) -> None:
    """A process that may not open another file can say nothing about any tensor.

    Raises:
        Unreachable: It may not.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise Unreachable(
            f"no more files can be opened: {error.strerror}",
            hint="ulimit -n 1024 lets this shell's programs have as many as is usual",
        ) from None


def check_inside(record: Record, size: int) -> None:
    """Refuses a record whose bytes would lie beyond the end of their shard.

    Raises:
        BadFile: They would.
    """
    blob = record.blob
    assert blob is not None
    if blob.offset < 0 or blob.length < 0 or blob.offset + blob.length > size:
        raise BadFile(f"{record.key} has no values: {blob.shard} ends before its last byte")


def _sent_to(root: Path, name: str) -> tuple[str, int] | None:
    from driftline.runs.sent import sent_to  # only where something is missing

    return sent_to(root, name)
