"""Mapped files that may become shorter while they are read, without ending the process.

Files are mapped, because a copy of every tensor would take a third of the time of a comparison. If
a file is cut meanwhile, its lost pages read as zeros and `faults` counts up: whoever reads compares
the count before and after, throws what was read away and opens the file again, which then says in
words that it is too short (`comparison.measure.scheduler` does, per pair). What nobody noticed is
reported at the end of the command, by the names in `cut_files`.

Without the C library a file is mapped all the same, and a cut one ends the process.
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
    """How many pages of mapped files were lost so far; compared before and after a reading."""
    return _counter().value


def cut_files() -> list[str]:
    """Names of the files that became shorter while they were mapped, each once."""
    library = _library()
    for number, name in list(_names.items()):
        if library.driftline_was_cut(number):
            _cut[name] = None
    return list(_cut)


def forget_cut_files() -> None:
    """What was cut so far was somebody else's reading: `cut_files` names it no more.

    Not even when its memory is given back, which may be any time later.
    """
    library = _library()
    for number in list(_names):
        if library.driftline_was_cut(number):
            _names.pop(number, None)
    _cut.clear()


class Guard:
    """Guards a mapped region, which must stay mapped, as long as this object lives."""

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
        """Whether the file became shorter, and what was behind its new end reads as zeros."""
        return self._number >= 0 and bool(_library().driftline_was_cut(self._number))


class MappedFile(mmap.mmap):
    """A file mapped for reading; guarded until it is unmapped."""

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
        except BufferError:  # somebody looks into it: it stays mapped
            self._guard = guard
            raise
        del guard


def map_file(file: int, name: str, *, length: int = 0, offset: int = 0) -> MappedFile:
    """Maps an open file; the descriptor may be closed afterwards.

    No descriptor stays open. Python's own `mmap` keeps a duplicate until the memory is given back,
    and closes its number then, whoever has it by that time: a program that closes all descriptors
    and opens a file under that number would lose its file.

    Args:
        file: Descriptor, open for reading.
        name: What messages call the file.
        length: Number of bytes; 0 for all, which must be some.
        offset: First byte, a multiple of the page size.

    Raises:
        OSError: It cannot be mapped.
        ValueError: It is shorter than that, or empty.
    """
    library = _library()
    if library is None:
        mapped = MappedFile(file, length, access=mmap.ACCESS_READ, offset=offset)
    else:
        size = os.fstat(file).st_size
        length = length or size - offset
        if length <= 0 or offset + length > size:
            raise ValueError(f"{length} bytes from {offset} on are not in a file of {size}")
        # Memory of nothing, which holds the place and gives it back; then the file in that place.
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = MappedFile(-1, length, flags=nothing, prot=mmap.PROT_READ)
        place = address_of(memoryview(mapped))
        if failed := library.driftline_map_over(place, length, file, offset):
            raise OSError(failed, os.strerror(failed))
    mapped._guard = Guard(address_of(memoryview(mapped)), len(mapped), name)  # pyright: ignore[reportPrivateUsage]
    return mapped


def map_range(path: str | os.PathLike[str], start: int, length: int) -> npt.NDArray[np.uint8]:
    """Some bytes of a file, mapped: a read-only array.

    Raises:
        OSError: It cannot be opened or mapped.
        ValueError: It is shorter than that.
    """
    # The system maps whole pages only: begin at the page that holds the range.
    page = start - start % mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapped = map_file(file, os.fspath(path), length=start + length - page, offset=page)
    finally:
        os.close(file)
    return np.frombuffer(mapped, np.uint8, length, start - page)
