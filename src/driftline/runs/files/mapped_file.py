"""Mapped files that may become shorter while they are read, without ending the process.

Files are mapped because copying every tensor would take a third of the time of a comparison. If a
file becomes shorter meanwhile, its lost pages read as zeros and `faults` increases. A reader
compares the count before and after. If it differs, the reader discards what it read and opens the
file again, which then reports that it is too short (`comparison.measure.scheduler` does this for
each pair). Cuts that no reader noticed are reported at the end of the command, by the names in
`cut_files`.

Without the C library, files are mapped as well, and a cut file ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.numerics.kernel import address_of, opened

_ABI = 2
_names: dict[int, str] = {}
_cut: dict[str, None] = {}


@functools.cache
def _library() -> Any:
    library = opened(Path(__file__).with_name("_mapped_file.so"), "driftline_mapped_abi", _ABI)
    if library is not None:
        library.driftline_guard.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.driftline_was_cut.argtypes = library.driftline_unguard.argtypes = [ctypes.c_int]
        library.driftline_unguard.restype = None
        library.driftline_map_over.argtypes = [
            *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int64)
        ]
    return library


@functools.cache
def _counter() -> Any:
    library = _library()
    return ctypes.c_int64(0) if library is None else ctypes.c_int64.in_dll(library, _FAULTS)


_FAULTS = "driftline_faults"


def faults() -> int:
    """Number of lost pages of mapped files so far; compare it before and after reading."""
    return _counter().value


def cut_files() -> list[str]:
    """Names of the files that became shorter while they were mapped; each occurs once."""
    library = _library()
    for number, name in list(_names.items()):
        if library.driftline_was_cut(number):
            _cut[name] = None
    return list(_cut)


def forget_cut_files() -> None:
    """Remove the cuts so far from `cut_files`: they belong to an earlier reading.

    They do not return when their memory is released, which may happen at any later time.
    """
    library = _library()
    for number in list(_names):
        if library.driftline_was_cut(number):
            _names.pop(number, None)
    _cut.clear()


class Guard:
    """Guards a mapped region as long as this object lives; the region must stay mapped."""

    __slots__ = ("_number",)

    def __init__(self, address: int, length: int, name: str) -> None:
        library = _library()
        self._number = -1 if library is None else library.driftline_guard(address, length)
        if self._number >= 0:
            _names[self._number] = name

    def __del__(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            library = _library()
            name = _names.pop(number, None)
            if name is not None and library.driftline_was_cut(number):
                _cut[name] = None
            library.driftline_unguard(number)

    def was_cut(self) -> bool:
        """Whether the file became shorter, so that the bytes beyond its new end read as zeros."""
        return self._number >= 0 and bool(_library().driftline_was_cut(self._number))


class MappedFile(mmap.mmap):
    """A file mapped for reading, guarded until it is unmapped."""

    _guard: Guard | None = None

    @property
    def was_cut(self) -> bool:
        """As `Guard.was_cut`."""
        return self._guard is not None and self._guard.was_cut()

    def __del__(self) -> None:  # runs before the memory is unmapped
        self._guard = None

    def close(self) -> None:
        guard, self._guard = self._guard, None
        try:
            super().close()
        except BufferError:  # somebody holds a view of it: it stays mapped
            self._guard = guard
            raise
        del guard


def map_file(file: int, name: str, *, length: int = 0, offset: int = 0) -> MappedFile:
    """Map an open file; the caller may close the descriptor afterwards.

    No descriptor stays open. Python's own `mmap` keeps a duplicate until the memory is released,
    and then closes its number, whoever has that number by then: a program that closes all
    descriptors and opens a file under that number would lose its file.

    Args:
        file: Descriptor, open for reading.
        name: Name of the file in messages.
        length: Number of bytes, or 0 for all; a file without bytes is refused.
        offset: First byte, a multiple of the page size.

    Raises:
        OSError: The file cannot be mapped.
        ValueError: The file is shorter than that, or empty.
    """
    library = _library()
    if library is None:
        mapped = MappedFile(file, length, access=mmap.ACCESS_READ, offset=offset)
    else:
        size = os.fstat(file).st_size
        length = length or size - offset
        if length <= 0 or offset + length > size:
            raise ValueError(f"{length} bytes from {offset} on are not in a file of {size}")
        # First map anonymous memory, which Python releases later; then map the file over it.
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = MappedFile(-1, length, flags=nothing, prot=mmap.PROT_READ)
        place = address_of(memoryview(mapped))
        if failed := library.driftline_map_over(place, length, file, offset):
            raise OSError(failed, os.strerror(failed))
    mapped._guard = Guard(address_of(memoryview(mapped)), len(mapped), name)  # pyright: ignore[reportPrivateUsage]
    return mapped


def map_range(path: str | os.PathLike[str], start: int, length: int) -> npt.NDArray[np.uint8]:
    """Map some bytes of a file as a read-only array.

    Raises:
        OSError: The file cannot be opened or mapped.
        ValueError: The file is shorter than that.
    """
    # The system maps whole pages only, so begin at the page that holds the first byte.
    page = start - start % mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = map_file(file, os.fspath(path), length=start + length - page, offset=page)
    finally:
        os.close(file)
    return np.frombuffer(mapped, np.uint8, length, start - page)
