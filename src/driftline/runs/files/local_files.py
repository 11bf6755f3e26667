"""Files of a run in a local folder, opened with care, because anybody may have written the run.

Links that lead out of the folder, pipes, devices and oversized files are refused. Shards are mapped
on demand, a bounded number at a time. The protocols at the end of the file describe what the reader
needs from any place that holds a run's files. This file does not know what the files mean.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from driftline.errors import BadFile, Unreachable
from driftline.numerics.kernel import address_of, let_go
from driftline.runs.files.mapped_file import MappedFile, faults, map_file
from driftline.runs.index import IndexLines
from driftline.runs.layout import INDEX, is_shard_name
from driftline.runs.records import Record
from driftline.runs.run import Memory, ReadAhead


def reason_of(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__


def is_inside(root: Path, path: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root) and path.is_dir()
    except (OSError, RuntimeError):
        return False


def folders_in(path: Path) -> list[str]:
    """Names of the folders in a folder, without links; empty if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def open_inside(root: Path, path: Path) -> int:
    """Open a regular file that is inside the run after links are resolved.

    Raises:
        OSError: The file is outside the run, or cannot be opened.
    """
    try:
        real = path.resolve(strict=True)
    except RuntimeError:  # a loop of links
        raise OSError(0, "a link that leads nowhere") from None
    # The resolved path is checked, because a link inside the run may lead anywhere.
    if not real.is_relative_to(root):
        raise OSError(0, "leads out of the run's folder; not followed")
    # Without O_NONBLOCK, opening a named pipe would block for ever.
    file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    # Devices may be readable and endless.
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "is not a regular file")
    return file


def read_inside(root: Path, path: Path, limit: int | None) -> bytes:
    with os.fdopen(open_inside(root, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # The size is that of the open file, so the file cannot be exchanged after the check.
        if limit is not None and size > limit:
            raise OSError(0, f"has {size} bytes, more than anybody would write there")
        return file.read()


def read_object(root: Path, path: Path, limit: int) -> Mapping[str, Any]:
    value = json.loads(read_inside(root, path, limit))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("Mapping[str, Any]", value)


MOST_MAPPED = 128
"""Largest number of shards of a run that are mapped at a time.

Each one counts as an open file, of which a process often may have 1024; a run has at least one
shard for each rank. In a run of 600 ranks, 364 of 2400 tensors were once "incomparable: too many
open files". Shards are mapped rather than read: `pread` into a small reused buffer took 30 to 45 %
longer, and populating the map first 10 %.
"""


class Mapped:
    """The mapped shards of a run, in all its folders.

    If there are too many, the oldest is unmapped.
    """

    def __init__(self) -> None:
        self._names: deque[tuple[Shards, str]] = deque()

    def add(self, shards: Shards, name: str) -> None:
        # Runs are read in order, so the oldest shard is the least likely to be needed again.
        self._names.append((shards, name))
        while len(self._names) > MOST_MAPPED:
            oldest, shard_name = self._names.popleft()
            oldest.forget(shard_name)


class Shards:
    """The shards in one folder of a run.

    Args:
        root: The run's folder; no name may lead out of it.
        name: Name of the process's folder.
        mapped: The mapped shards of all folders of the run.
    """

    def __init__(self, root: Path, name: str, mapped: Mapped) -> None:
        self.root = root
        self.name = name
        self._mapped = mapped
        self._maps: dict[str, MappedFile | bytes] = {}
        self._places: dict[str, tuple[memoryview, int]] = {}
        self._sizes: dict[str, int] = {}
        self._faults = faults()

    def shortened(self) -> dict[str, int]:
        """Shards that have become shorter since they were mapped, with their present sizes."""
        now = {shard: self.size(shard) for shard in self._sizes}
        sizes = {shard: size if isinstance(size, int) else 0 for shard, size in now.items()}
        return {shard: size for shard, size in sizes.items() if size < self._sizes[shard]}

    def size(self, shard: str) -> int | str:
        """Number of bytes of a shard, or the reason why it is unknown.

        Raises:
            Unreachable: No more files can be opened, which is not the shard's fault.
        """
        try:
            file = open_inside(self.root, self.root / self.name / shard)
        except FileNotFoundError:
            # If a run is sent while it is written, shards that have arrived are deleted here.
            sent = _sent_to(self.root, f"{self.name}/{shard}")
            return f"{shard} is missing" if sent is None else sent[1]
        except OSError as error:
            _require_files(error)
            return f"{shard} {reason_of(error)}"
        try:
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def content(self, record: Record) -> tuple[MappedFile | bytes, int]:
        """The mapped shard that holds a record's bytes, and their offset in it."""
        assert record.blob is not None
        self._forget_cut()
        content = self._map(record.blob.shard)
        check_inside(record, len(content))
        return content, record.blob.offset

    def memory(self, record: Record) -> Memory:
        """Address of a record's bytes."""
        blob = record.blob
        assert blob is not None
        self._forget_cut()
        place = self._places.get(blob.shard)
        if place is None:
            view = memoryview(self._map(blob.shard))  # keeps the shard mapped
            place = self._places[blob.shard] = (view, address_of(view))
        view, address = place
        check_inside(record, len(view))
        return Memory(address + blob.offset, blob.length, view)

    def window(self, record: Record, start: int, stop: int) -> Memory:
        """The whole record: mapped bytes cost nothing until they are read."""
        del start, stop
        return self.memory(record)

    def release(self) -> None:
        """Drop all maps.

        A map is unmapped when its last array or address is gone, in any thread.
        """
        # Pages are released now, because the map may have users for much longer.
        for view, address in list(self._places.values()):
            let_go(address, len(view))
        self._places.clear()
        self._maps.clear()

    def forget(self, shard: str) -> None:
        """As `release`, for one shard."""
        self._places.pop(shard, None)
        self._maps.pop(shard, None)

    def _forget_cut(self) -> None:
        """Drop shards that became shorter, because the bytes beyond their new end read as zeros.

        The reader of such bytes has noticed that by `faults`. The next reader maps the file as it
        is now, which is too short for the record.
        """
        if (now := faults()) != self._faults:
            self._faults = now
            for shard, content in list(self._maps.items()):
                if isinstance(content, MappedFile) and content.was_cut:
                    self.forget(shard)

    def _map(self, shard: str) -> MappedFile | bytes:
        content = self._maps.get(shard)
        if content is None:
            if not is_shard_name(shard):
                raise BadFile(f"'{shard[:60]}' is not the name of a shard")
            try:
                file = open_inside(self.root, self.root / self.name / shard)
            except OSError as error:
                _require_files(error)
                sent = _sent_to(self.root, f"{self.name}/{shard}")
                if sent is not None:
                    raise BadFile(f"{self.name}/{shard} was sent to {sent[0]}") from None
                raise BadFile(f"{self.name}/{shard} cannot be read: {reason_of(error)}") from None
            try:
                # An empty file cannot be mapped.
                path = f"{self.root}/{self.name}/{shard}"
                content = map_file(file, path) if os.fstat(file).st_size else b""
            except OSError as error:
                _require_files(error)
                raise
            finally:
                os.close(file)
            self._maps[shard] = content
            # Keep the largest size: a thread may have measured zeros of an earlier, longer map.
            self._sizes[shard] = max(len(content), self._sizes.get(shard, 0))
            self._mapped.add(self, shard)
        return content


def _require_files(error: OSError) -> None:
    """Stop if the limit of open files is reached; such an error says nothing about a tensor.

    Raises:
        Unreachable: The limit is reached.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise Unreachable(
            f"no more files can be opened: {error.strerror}",
            hint="ulimit -n 1024 lets this shell's programs have as many as is usual",
        ) from None


def check_inside(record: Record, size: int) -> None:
    """Refuse a record whose bytes would extend beyond the end of their shard.

    Raises:
        BadFile: They would.
    """
    blob = record.blob
    assert blob is not None
    # The index is checked when it is read, but the file may have become shorter since.
    if blob.offset < 0 or blob.length < 0 or blob.offset + blob.length > size:
        raise BadFile(f"{record.key} has no values: {blob.shard} ends before its last byte")


def _sent_to(root: Path, name: str) -> tuple[str, int] | None:
    from driftline.runs.stores.upload import sent_to  # needed only if a shard is missing

    return sent_to(root, name)


def object_in(files: Files, name: str, limit: int) -> Mapping[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not a JSON object.
    """
    value = json.loads(files.read(name, limit))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("Mapping[str, Any]", value)


class FolderFiles:
    """Files in a local folder."""

    fetched = False

    def __init__(self, root: Path) -> None:
        """root: The run's folder, with links resolved."""
        self.root = root
        self._mapped = Mapped()

    def open(self, name: str) -> BinaryIO:
        return os.fdopen(open_inside(self.root, self.root / name), "rb")

    def read(self, name: str, limit: int) -> bytes:
        return read_inside(self.root, self.root / name, limit)

    def names(self, folder: str) -> list[str]:
        try:
            place = self.root / folder
            return sorted(path.name for path in place.iterdir() if not path.is_symlink())
        except OSError:
            return []

    def shards(self, folder: str) -> Shards:
        return Shards(self.root, folder, self._mapped)

    def is_written(self, folder: str) -> bool | None:
        from driftline.runs.provenance import is_held  # needed only for runs that were not closed

        return is_held(self.root / folder / INDEX)

    def read_ahead(self, parts: Mapping[tuple[int, int], str]) -> ReadAhead | None:
        """None, because mapped files gain nothing from reading ahead."""
        del parts
        return None


# Protocols: what the reader needs from a place that holds a run's files. Used as types only.


class ShardFiles(Protocol):
    """The shards in one folder of a run."""

    def size(self, shard: str) -> int | str:
        """Number of bytes of a shard, or the reason why it is unknown."""
        ...

    def content(self, record: Record) -> tuple[Any, int]:
        """A buffer that holds a record's bytes, and their offset in it.

        Raises:
            DriftlineError: The bytes cannot be read.
        """
        ...

    def memory(self, record: Record) -> Memory:
        """Address of a record's bytes.

        Raises:
            DriftlineError: The bytes cannot be read.
        """
        ...

    def window(self, record: Record, start: int, stop: int) -> Memory:
        """As `memory`, for a caller that reads only the bytes from `start` to `stop`.

        Raises:
            DriftlineError: The bytes cannot be read.
        """
        ...

    def release(self) -> None:
        """Release the memory that is held."""
        ...

    def shortened(self) -> dict[str, int]:
        """Shards that have become shorter since their bytes were used, with their present sizes."""
        ...


class Files(Protocol):
    """The files of one run."""

    fetched: bool
    """Whether bytes come from another machine, so that reading part of a tensor is cheaper."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            OSError: The file does not exist, or leads out of the run.
        """
        ...

    def read(self, name: str, limit: int) -> bytes:
        """Read a complete file.

        Raises:
            OSError: As for `open`, or the file has more bytes than the limit.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the plain files in a folder; empty if it cannot be listed."""
        ...

    def shards(self, folder: str) -> ShardFiles:
        """The shards in a folder."""
        ...

    def is_written(self, folder: str) -> bool | None:
        """Whether a living process is writing in a folder; None if unknown."""
        ...

    def read_ahead(self, parts: Mapping[tuple[int, int], str]) -> ReadAhead | None:
        """A background reader of small tensors; `parts` maps rank and process to folders."""
        ...


class Listed(Protocol):
    """The index of one process."""

    rank: int
    process: int
    lines: IndexLines
