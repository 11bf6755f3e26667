"""Tensors of one file inside a dump: described when the dump is opened, and read on demand.

A dump has tens of thousands of files, so nothing stays open or mapped between two reads. The usual
layouts of `.npy` and `.pt` are described from their first and last bytes, without numpy or torch.
This file knows how files are read; the dump's format knows the meaning of a file's name.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from driftline.errors import BadFile, DriftlineError
from driftline.formats.dump_run import Leaf, Member
from driftline.formats.folder import Folder, pread
from driftline.formats.tensors import npy, torch_zip
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.kernel import address_of
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Memory

TORCH = (".pt", ".pth", ".ckpt", ".out")
_START = 256
"""Number of bytes that contain an npy header as numpy writes it."""

Array = np.ndarray[Any, np.dtype[Any]]


def describe(folder: Folder, name: str) -> list[Member]:
    """The tensors of one file of a dump, unread.

    A file that is refused or cannot be read gives one member without a name, whose `trouble` says
    why.
    """
    try:
        # By far the most common file of a dump, so it is checked first.
        if name.endswith(".npy"):
            return [_npy(folder, name)]
        suffix = "." + name.rpartition(".")[2].lower()
        if suffix in TORCH:
            return _torch(folder, name)
        return _by_format(folder, name)
    # A dump stays readable if one of its files is not: the tensor is lost, with a reason.
    except DriftlineError as refused:
        return [unreadable(_without_path(str(refused), folder, name))]
    except OSError as trouble:
        return [unreadable(reason_of(trouble))]


def unreadable(reason: str) -> Member:
    """A tensor about which only the reason is known why it cannot be read."""
    return Member("", "", (), _no_values, reason)


def leaf(key: TensorKey, source: str, member: Member, *, class_name: str = "") -> Leaf:
    """A tensor of a file as a leaf of a dump."""
    # Statistics without values have nothing to fetch.
    if member.kept != "full":
        record = Record(key, 0, member.dtype, member.shape, class_name=class_name)
        return Leaf(record._replace(kept=member.kept, summary=member.summary), source)
    record = Record(key, 0, member.dtype, member.shape, "", class_name)
    if member.trouble:
        return Leaf(record._replace(lost=member.trouble), source)
    return Leaf(record, source, member.fetch)


def _no_values() -> Array:
    return np.empty(0, np.uint8)


def _without_path(sentence: str, folder: Folder, name: str) -> str:
    """The reason without the file's name, which is shown next to it anyway."""
    path = str(folder.path / name)
    return sentence.removeprefix(path).lstrip(": ") if sentence.startswith(path) else sentence


def _npy(folder: Folder, name: str) -> Member:
    start, size = folder.start(name, _START)
    header = npy.usual_header(start)
    # Not numpy's usual text: use numpy's own reader, with the longest possible header.
    if header is None:
        start, size = folder.start(name, npy.HEADER_BYTES)
        header = npy.read_header(io.BytesIO(start), str(folder.path / name))
    # Checked before anything is allocated for the claimed shape.
    if header.byte_count > size - header.offset:
        claim = f"claims {header.byte_count} bytes of data and has {size - header.offset}"
        return Member("", header.name, header.shape, _no_values, claim)
    # Bytes that need no conversion can be used in place, without an array.
    if header.plain:
        plain = _PlainValues(folder, name, header.offset, header.byte_count, header.stored.str)
        return Member("", header.name, header.shape, plain)
    return Member(
        "", header.name, header.shape, functools.partial(_npy_values, folder, name, header)
    )


def _npy_values(folder: Folder, name: str, header: npy.Header) -> Array:
    if header.byte_count == 0:
        return np.empty(0, DTYPES[header.name].storage)
    return header.flat(_values(folder, name, header.offset, header.byte_count))


class _PlainValues:
    """Values that are stored in their final form: returned as an array, or by address."""

    __slots__ = ("folder", "length", "name", "start", "storage")

    def __init__(self, folder: Folder, name: str, start: int, length: int, storage: str) -> None:
        self.folder = folder
        self.name = name
        self.start = start
        self.length = length
        self.storage = storage

    def __call__(self) -> Array:
        if self.length == 0:
            return np.empty(0, self.storage)
        return _values(self.folder, self.name, self.start, self.length).view(self.storage)

    def ahead(self) -> tuple[str, str, int, int] | None:
        """Folder, name and range that may be read ahead; None if reading ahead is not possible."""
        folder, name, length = self.folder, self.name, self.length
        if length and folder.may_be_read_ahead(name, length):
            return folder.text, name, self.start, length
        return None

    def memory(self) -> Memory | None:
        """The memory of the values; making an array would take as long as reading 16 kB."""
        try:
            read = (
                self.folder.read_small(self.name, self.start, self.length) if self.length else None
            )
        except OSError as trouble:
            path = self.folder.path / self.name
            raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from trouble
        if read is None:
            return None
        content, start = read
        return Memory(address_of(content) + start, self.length, content)


def _values(folder: Folder, name: str, start: int, length: int) -> Array:
    try:
        return folder.values(name, start, length)
    except (OSError, ValueError) as trouble:
        raise BadFile(f"{folder.path / name} cannot be read: {reason_of(trouble)}") from trouble


def _torch(folder: Folder, name: str) -> list[Member]:
    content, size = folder.prefetched(name)
    if content and len(content) == size:
        tensors = torch_zip.read_tensors(
            size, lambda length, offset: content[offset : offset + length]
        )
    else:
        tensors = _torch_tensors(folder, name)
    # Unusual files are left to torch, which is slower but knows every layout.
    if tensors is None or any(_needs_torch(stored) for stored in tensors):
        from driftline.formats.tensors import torch_file

        return _closed_between_reads(torch_file.members, _checked_path(folder, name))
    return [
        Member(
            stored.name,
            stored.dtype,
            stored.shape,
            _torch_values(folder, name, stored),
        )
        for stored in tensors
    ]


def _torch_tensors(folder: Folder, name: str) -> list[torch_zip.Stored] | None:
    file, size = folder.open(name)
    try:
        # One read of a small file replaces several small reads of its zip directory and pickle.
        if size <= 1 << 15:
            content = pread(file, size, 0)
            return torch_zip.read_tensors(
                size, lambda length, offset: content[offset : offset + length]
            )
        return torch_zip.read_tensors(size, functools.partial(pread, file))
    finally:
        os.close(file)


def _needs_torch(stored: torch_zip.Stored) -> bool:
    """Whether torch is needed: views with gaps, unknown types, contradictory sizes."""
    dtype = DTYPES.get(stored.dtype)
    # Packed types need torch's own interpretation of their shape.
    if dtype is None or not stored.dense or dtype.bits < 8:
        return True
    item = dtype.bits // 8
    return (stored.offset + math.prod(stored.shape)) * item > stored.length


def _torch_values(folder: Folder, name: str, stored: torch_zip.Stored) -> _PlainValues:
    dtype = DTYPES[stored.dtype]
    length = dtype.byte_count(math.prod(stored.shape))
    start = stored.start + stored.offset * dtype.bits // 8
    return _PlainValues(folder, name, start, length, dtype.storage)


def _by_format(folder: Folder, name: str) -> list[Member]:
    from driftline.formats.registry import file_format

    path = _checked_path(folder, name)
    members = getattr(file_format(path), "members", None)
    if members is not None:
        return _closed_between_reads(members, path)
    raise BadFile(f"{path} is no tensor file that driftline can read")


def _checked_path(folder: Folder, name: str) -> Path:
    """The path of a file that may be opened by its name."""
    # Opened only for the checks: it must be a regular file inside the folder.
    file, _ = folder.open(name)
    os.close(file)
    return folder.path / name


def _closed_between_reads(members: Callable[[Path], list[Member]], path: Path) -> list[Member]:
    """Members as a format reads them, but opened again for every read.

    A format's reader may keep a file mapped, which would exhaust the process's descriptors for a
    dump of many files.
    """
    return [
        member._replace(fetch=functools.partial(_fetch_again, members, path, index, member))
        for index, member in enumerate(members(path))
    ]


@functools.lru_cache(8)
def _recently_read(
    members: Callable[[Path], list[Member]], path: Path, changed: int, size: int
) -> list[Member]:
    """The members of the files read last; a file that changed is read again."""
    # They are only part of the cache's key.
    del changed, size
    return members(path)


def _fetch_again(
    members: Callable[[Path], list[Member]], path: Path, index: int, described: Member
) -> Array:
    try:
        about = path.stat()
        current = _recently_read(members, path, about.st_mtime_ns, about.st_size)
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from trouble
    # Values of a replaced file would be read with the old shape.
    if len(current) <= index or (current[index].dtype, current[index].shape) != (
        described.dtype,
        described.shape,
    ):
        raise BadFile(f"{path} changed while it was read")
    return current[index].fetch()
