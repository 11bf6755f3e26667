"""A folder that another program wrote: list its files by name, open them safely, read ranges.

Links are followed only to files inside the folder; folders behind links are not entered; pipes and
devices are not opened. This file does not know formats. Small ranges are read and large ones are
mapped: mapping 256 kB takes 68 µs, including page faults, and reading them takes 45.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from driftline.formats import read_ahead
from driftline.runs.files.local_files import open_inside
from driftline.runs.files.mapped_file import map_file

# Deeper than any tool nests its folders, and shallow enough for recursion.
DEEPEST = 64
SMALL = 1 << 16
KEPT_BYTES = 128 << 20
"""Largest number of bytes of a folder's small files that are kept.

A file of up to `SMALL` bytes is read once and kept until it is used, because opening a small file
costs more than reading it.
"""
MAPPED_FROM = 1 << 20
"""Ranges of at least this many bytes are mapped instead of read."""
_FILES_AHEAD = 256
_FIRST_BYTES = 1 << 12
_HEADER = 512
"""Settings of reading ahead.

They are the number of files at a time, the number of bytes of each file, and the number of bytes
that are kept of a longer file: its header, without values.
"""
_NUMBER = re.compile(r"(\d+)")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def natural(name: str) -> list[str | int]:
    """Sort key that puts `layers.2` before `layers.10`.

    >>> sorted(["layers.10", "layers.2"], key=natural)
    ['layers.2', 'layers.10']
    """
    parts: list[str | int] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def some_names(path: str, levels: int, at_most: int) -> Iterator[str]:
    """Names of the first files of a folder and of its first levels, upper levels first.

    For recognising formats: fast, however large the folder is.
    """
    waiting = [(path, 1)]
    for folder, level in waiting:
        inner: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    at_most -= 1
                    if at_most < 0:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        inner.append(entry.path)
                    else:
                        yield entry.name
        except OSError:
            continue
        if level < levels:
            # Folders of one level are similar: a few of them are enough to recognise a format.
            waiting += [(name, level + 1) for name in sorted(inner)[:8]]


class Folder:
    """A folder of files that another program wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.real = path.resolve()
        self.text = str(path)
        self._links: set[str] = set()
        self._kept: dict[str, bytes] = {}
        self._room = KEPT_BYTES
        self._prefetched: tuple[str, bytes, int] | None = None
        self.not_entered: list[str] = []
        """Folders that were not entered, each with the reason."""

    def files(
        self, below: str = "", *, named: Callable[[str], object] = lambda name: False
    ) -> Iterator[str]:
        """Names of all files below a sub-folder, relative to this folder, in natural order.

        Args:
            below: The sub-folder.
            named: Whether a name is that of a tensor file. A pipe or a folder with such a name is
                listed too, so that opening it reports what it is.
        """
        start = f"{self.text}/{below}" if below else self.text
        yield from self._walk(start, below, 0, named)

    def _walk(
        self, path: str, prefix: str, depth: int, named: Callable[[str], object]
    ) -> Iterator[str]:
        # A folder this deep is a mistake or an attack; it is reported, but not entered.
        if depth > DEEPEST:
            self.not_entered.append(f"{prefix}: deeper than {DEEPEST} folders")
            return
        files: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        (files if named(entry.name) else folders).append(entry.name)
                    elif entry.is_symlink():
                        name = f"{prefix}/{entry.name}" if prefix else entry.name
                        if _leads_to_a_folder(entry):
                            self.not_entered.append(f"{name}: a link to a folder, not followed")
                            continue
                        self._links.add(name)
                        files.append(entry.name)
                    elif entry.is_file(follow_symlinks=False) or named(entry.name):
                        files.append(entry.name)
                    else:
                        name = f"{prefix}/{entry.name}" if prefix else entry.name
                        self.not_entered.append(f"{name}: not a regular file")
        # One unreadable sub-folder must not hide the rest of the dump.
        except OSError as trouble:
            self.not_entered.append(f"{prefix or '.'}: {trouble.strerror or trouble}")
            return
        # The order of a directory listing depends on the file system; results must not.
        files.sort(key=natural)
        for name in files:
            yield f"{prefix}/{name}" if prefix else name
        folders.sort(key=natural)
        for name in folders:
            inner = f"{prefix}/{name}" if prefix else name
            yield from self._walk(f"{path}/{name}", inner, depth + 1, named)

    def open(self, name: str) -> tuple[int, int]:
        """Open one file; returns its descriptor and size. The caller closes it.

        Raises:
            OSError: The file is not inside the folder, or cannot be opened.
        """
        # A plain name inside the folder needs one call; only names that could lead out are resolved
        # and checked.
        if name in self._links or ".." in name:
            file = open_inside(self.real, self.path / name)
        else:
            file = os.open(f"{self.text}/{name}", read_ahead.FLAGS)
        # Checked on the open descriptor, because a check before opening could be circumvented.
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            os.close(file)
            raise OSError(0, "is not a regular file")
        return file, about.st_size

    def ahead(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the names one by one, with the first bytes of each file already read.

        `start` and `prefetched` use these bytes for the file whose name was yielded last.
        """
        # For few files, the set-up of a background read costs more than it saves.
        if len(names) < 2 * _FILES_AHEAD or not read_ahead.available():
            yield from names
            return
        pieces = [
            names[index : index + _FILES_AHEAD] for index in range(0, len(names), _FILES_AHEAD)
        ]
        current, following = read_ahead.Read(), read_ahead.Read()
        starts = array("q", [0]) * _FILES_AHEAD
        lengths = array("q", [_FIRST_BYTES]) * _FILES_AHEAD
        current.begin(read_ahead.Ranges(self.text, pieces[0], starts, lengths))
        for index, piece in enumerate(pieces, 1):
            current.wait()
            if index < len(pieces):
                following.begin(read_ahead.Ranges(self.text, pieces[index], starts, lengths))
            view = memoryview(current.room)
            begin = 0
            for name, size, got in zip(piece, current.sizes, current.got, strict=True):
                if got >= 0 and name not in self._links and ".." not in name:
                    # Bytes after the header of a long file are values, which are read in another
                    # way; keeping them would only cost memory.
                    useful = got if got == size else min(got, _HEADER)
                    self._prefetched = (name, bytes(view[begin : begin + useful]), size)
                begin += _FIRST_BYTES
                yield name
            current, following = following, current
        self._prefetched = None

    def prefetched(self, name: str) -> tuple[bytes, int]:
        """First bytes and size of the file that `ahead` yielded last; no bytes for any other."""
        last = self._prefetched
        return last[1:] if last is not None and last[0] == name else (b"", 0)

    def start(self, name: str, length: int) -> tuple[bytes, int]:
        """The first bytes of a file, or all bytes of a small file, and its size.

        Raises:
            OSError: The file cannot be read.
        """
        begin, size = self.prefetched(name)
        if begin:
            # The whole small file was read. Keep it, because its values are needed next.
            if len(begin) == size and length < size <= self._room:
                self._kept[name] = begin
                self._room -= size
            if len(begin) >= length or len(begin) == size:
                return begin, size
        file, size = self.open(name)
        try:
            if size > SMALL or size > self._room or size <= length:
                return os.read(file, length), size
            content = pread(file, size, 0)
            self._kept[name] = content
            self._room -= size
            return content, size
        finally:
            os.close(file)

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole file.

        Raises:
            OSError: The file cannot be read, or is longer than the limit.
        """
        file, size = self.open(name)
        try:
            # The limit stops a damaged or hostile file from filling the memory.
            if size > limit:
                raise OSError(0, f"has {size} bytes, more than anybody would write there")
            return pread(file, size, 0)
        finally:
            os.close(file)

    def read_small(self, name: str, start: int, length: int) -> tuple[bytes, int] | None:
        """A buffer with a range, and the range's offset in it; None if the range should be mapped.

        Raises:
            OSError: The file cannot be read, or ends before the end of the range.
        """
        # Values are usually needed once, so the bytes are released here.
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._room += len(kept)
            if start + length > len(kept):
                raise OSError(0, "ends too early")
            return kept, start
        if length >= MAPPED_FROM or name in self._links or ".." in name:
            return None
        # A file that was regular when it was described is not checked again.
        file = os.open(f"{self.text}/{name}", read_ahead.FLAGS)
        try:
            return pread(file, length, start), 0
        finally:
            os.close(file)

    def may_be_read_ahead(self, name: str, length: int) -> bool:
        """Whether a range can be read by name alone, and was not read yet."""
        return (
            length < MAPPED_FROM
            and name not in self._kept
            and name not in self._links
            and ".." not in name
        )

    def values(self, name: str, start: int, length: int) -> Bytes:
        """Bytes of a file as a read-only array; large ranges are mapped.

        Raises:
            OSError: The file cannot be read, or ends before the end of the range.
        """
        read = self.read_small(name, start, length)
        if read is not None:
            return np.frombuffer(read[0], np.uint8, length, read[1])
        file, size = self.open(name)
        try:
            if start + length > size:
                raise OSError(0, f"has {size} bytes where {start + length} were promised")
            # The system maps whole pages only, so begin at the page that holds the first byte.
            page = start - start % mmap.ALLOCATIONGRANULARITY
            path = f"{self.text}/{name}"
            mapped = map_file(file, path, length=start + length - page, offset=page)
            return np.frombuffer(mapped, np.uint8, length, start - page)
        finally:
            os.close(file)


def _leads_to_a_folder(link: os.DirEntry[str]) -> bool:
    try:
        return link.is_dir()
    except OSError:  # a link to itself; reading the file reports that
        return False


def pread(file: int, length: int, start: int) -> bytes:
    """Read exactly `length` bytes from `start`; raises OSError if the file ends earlier."""
    got = os.pread(file, length, start)
    # The system may return fewer bytes than requested, for example over a network.
    while len(got) < length:
        more = os.pread(file, length - len(got), start + len(got))
        if not more:
            raise OSError(0, "ends too early")
        got += more
    return got
