"""The binding to the C kernel: moments of a pair, summary and digest of a tensor.

Arrays are passed as flat storage of any byte alignment, with the number of logical elements;
nothing here knows shapes or files. The library is a plain shared object in the folder of this file
and is loaded on first use. ctypes releases the GIL, so calls from several threads run in parallel.
Without the library, the numpy definitions compute everything. Results mean the same on every path;
only the last digits of sums differ.

This file also opens the other C libraries of Driftline and returns the addresses of Python buffers.
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

from driftline import settings
from driftline.errors import BadInput, did_you_mean
from driftline.numerics import definitions
from driftline.numerics.dtypes import C_CODES, DTYPES, DType
from driftline.numerics.fields import (
    PAIR_STRUCT,
    SKETCH_STRUCT,
    SUMMARY_STRUCT,
    PairMoments,
    Summary,
    abi_number,
)

AnyArray = npt.NDArray[Any]

ABI_NUMBER = abi_number(list(DTYPES.values()))
PATHS = ("generic", "avx2", "avx512")
NUMPY = "numpy"

# name -> (code in C, reals per element, whether the lowest value means -inf)
_LAYOUT = {d.name: (C_CODES[d.component], d.reals, int(d.has_sentinel)) for d in DTYPES.values()}

# In two parts: a single tuple of all numbers would have to be split again.
_numbers_in, _sketch_in = SUMMARY_STRUCT.unpack_from, SKETCH_STRUCT.unpack_from
_MomentsBuffer = ctypes.c_char * PAIR_STRUCT.size
_SummaryBuffer = ctypes.c_char * (SUMMARY_STRUCT.size + SKETCH_STRUCT.size)
_DigestBuffer = ctypes.c_char * 16
_start_of: Any = ctypes.c_char.from_buffer
_address_of = ctypes.addressof
_new_moments, _new_summary = PairMoments._make, Summary._make
_PREFIX = "xxh3-128:"
# Function objects of our own, because the program may have declared these differently.
_memory_view: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_WRITABLE = 0x200  # PyBUF_WRITE
_get_buffer: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer: Any = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
    ("PyBuffer_Release", ctypes.pythonapi)
)
_Buffer = ctypes.c_void_p * 16  # a Py_buffer, which begins with the address, with room to spare


def opened(path: str | os.PathLike[str], abi: str, version: int) -> ctypes.CDLL | None:
    """Open a C library of Driftline; None if it was not built, cannot be loaded, or has another
    version.

    Args:
        path: Path of the library.
        abi: Name of the function that returns its version.
        version: Version that the caller needs.
    """
    try:
        library = ctypes.CDLL(os.fspath(path))
        return library if library[abi]() == version else None
    except (OSError, AttributeError):
        return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(Path(__file__).with_name("_kernel.so"))


def load(path: str | os.PathLike[str]) -> ctypes.CDLL | None:
    """A kernel library with its signatures declared; None in the cases of `opened`."""
    library = opened(path, "driftline_abi", ABI_NUMBER)
    if library is None:
        return None
    pointer, c_int, int64, double = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    signatures: dict[str, list[Any]] = {
        "driftline_pair": [
            *(pointer, c_int, pointer, c_int, int64, c_int),
            *(double, double, c_int, c_int, c_int, pointer),
        ],
        "driftline_summary": [pointer, c_int, int64, c_int, c_int, pointer],
        "driftline_digest": [pointer, int64, c_int, pointer],
        "driftline_score": [
            *(pointer, c_int, pointer, c_int, int64, int64, pointer, int64),
            *(c_int, c_int, pointer, pointer, pointer, pointer, pointer),
        ],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library


@functools.cache
def available() -> tuple[str, ...]:
    """The paths that this machine can use, best first; `numpy` always works."""
    library = _library()
    best = -1 if library is None else int(library.driftline_best_path())
    return (*reversed(PATHS[: best + 1]), NUMPY)


def active() -> str:
    """The default path: the best one, or the one that `DRIFTLINE_KERNEL` names."""
    number = _default_number()
    return PATHS[number] if number >= 0 else NUMPY


@functools.cache
def _default_number() -> int:
    """Cached, so that the environment is not read again for every small tensor."""
    return _numbered(settings.kernel_choice())


@functools.lru_cache(maxsize=32)
def _numbered(wanted: str) -> int:
    """Index in PATHS of a path, or of the best one if `wanted` is empty; -1 for numpy."""
    possible = available()
    chosen = wanted or possible[0]
    if chosen not in possible:
        names = (*PATHS, NUMPY)
        raise BadInput(
            f"kernel path {chosen!r} "
            + ("cannot run on this machine" if chosen in names else "is unknown"),
            hint=did_you_mean(chosen, possible),
        )
    return -1 if chosen == NUMPY else PATHS.index(chosen)


def chosen(path: str | None) -> tuple[ctypes.CDLL | None, int]:
    """The library and the number of the path; the library is None if numpy must be used."""
    number = _numbered(path) if path else _default_number()
    return (_library() if number >= 0 else None), number


def code_of(dtype: DType) -> int:
    """C's number of an element type."""
    return _LAYOUT[dtype.name][0]


def _address(array: AnyArray) -> int:
    """Address of an array's bytes. For writable arrays, the buffer gives it twice as fast."""
    if array.flags.writeable and array.size:
        return _address_of(_start_of(array))
    return array.ctypes.data


def _fit(array: AnyArray, dtype: DType, count: int) -> None:
    if not array.flags.c_contiguous:
        raise BadInput("the kernel takes contiguous arrays only")
    if array.nbytes * 8 < dtype.bits * count:
        raise BadInput(f"{count} elements of {dtype.name} do not fit in {array.nbytes} bytes")


@functools.lru_cache(maxsize=1024)
def pairing(reference: str, candidate: str) -> tuple[int, int, int, int, int, int]:
    """Two types as C needs them: codes, reals per element, which side to widen, masks."""
    r_code, r_reals, r_mask = _LAYOUT[reference]
    c_code, c_reals, c_mask = _LAYOUT[candidate]
    reals = max(r_reals, c_reals)
    widen = (1 if r_reals < reals else 0) | (2 if c_reals < reals else 0)
    return r_code, c_code, reals, widen, r_mask, c_mask


def pair_moments(
    reference: AnyArray,
    reference_dtype: DType,
    candidate: AnyArray,
    candidate_dtype: DType,
    *,
    count: int,
    atol: float = 0.0,
    rtol: float = 0.0,
    path: str | None = None,
) -> PairMoments:
    """All moments of a pair, in one pass over its memory.

    Args:
        reference: Flat contiguous storage (numpy dtype `storage`, or raw bytes), any alignment.
        reference_dtype: Element type of the reference.
        candidate: Likewise; may have another type.
        candidate_dtype: Element type of the candidate; ULPs are counted in it.
        count: Number of logical elements of each side. Complex elements are measured as two reals
            each.
        atol: Absolute part of the tolerance for `outside`.
        rtol: Part of the tolerance that is relative to the reference.
        path: One of `available()`; None for the default.
    """
    number = _numbered(path) if path else _default_number()
    _fit(reference, reference_dtype, count)
    _fit(candidate, candidate_dtype, count)
    library = _library()
    if number < 0 or library is None:
        return definitions.pair_moments_in_blocks(
            *(reference, reference_dtype, candidate, candidate_dtype),
            count=count,
            atol=atol,
            rtol=rtol,
        )
    places = _address(reference), _address(candidate)
    names = reference_dtype.name, candidate_dtype.name
    return _pair(library, places, names, count, atol, rtol, number)


def pair_moments_at(
    reference: int,
    reference_dtype: DType,
    candidate: int,
    candidate_dtype: DType,
    *,
    count: int,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> PairMoments:
    """As `pair_moments`, by address.

    The caller guarantees the memory, and that `takes_addresses()`.
    """
    library = _library()
    assert library is not None
    names = reference_dtype.name, candidate_dtype.name
    places = reference, candidate
    return _pair(library, places, names, count, atol, rtol, _default_number())


def takes_addresses() -> bool:
    """Whether the C kernel is used here; the numpy path needs arrays."""
    return _default_number() >= 0 and _library() is not None


def _pair(
    library: ctypes.CDLL,
    places: tuple[int, int],
    names: tuple[str, str],
    count: int,
    atol: float,
    rtol: float,
    number: int,
) -> PairMoments:
    r_code, c_code, reals, widen, r_mask, c_mask = pairing(*names)
    out = _MomentsBuffer()
    library.driftline_pair(
        places[0],
        r_code,
        places[1],
        c_code,
        count * reals,
        widen,
        atol,
        rtol,
        r_mask,
        c_mask,
        number,
        out,
    )
    return _new_moments(PAIR_STRUCT.unpack(out))


def summarize(data: AnyArray, dtype: DType, *, count: int, path: str | None = None) -> Summary:
    """Extremes, moments, counts and the sketch of one tensor, in one pass over its memory."""
    number = _numbered(path) if path else _default_number()
    _fit(data, dtype, count)
    library = _library()
    if number < 0 or library is None:
        return definitions.summarize_in_blocks(data, dtype, count=count)
    return _summarize(library, _address(data), dtype.name, count, number)


def summarize_at(address: int, length: int, dtype: DType, *, count: int) -> Summary:
    """As `summarize`, for memory that the caller guarantees; no array is made for it."""
    number = _default_number()
    library = _library()
    if number < 0 or library is None:
        return summarize(bytes_at(address, length), dtype, count=count)
    if length * 8 < dtype.bits * count:
        raise BadInput(f"{count} elements of {dtype.name} do not fit in {length} bytes")
    return _summarize(library, address, dtype.name, count, number)


def _summarize(library: ctypes.CDLL, address: int, dtype: str, count: int, number: int) -> Summary:
    code, reals, mask = _LAYOUT[dtype]
    out = _SummaryBuffer()
    library.driftline_summary(address, code, count * reals, mask, number, out)
    return _new_summary(_numbers_in(out) + (_sketch_in(out, SUMMARY_STRUCT.size),))  # noqa: RUF005 - quicker


def digest(data: AnyArray, *, path: str | None = None) -> str:
    """A digest of bytes: `xxh3-128:<hex>` from C, `blake2b-128:<hex>` without it.

    Equal bytes have equal digests of the same kind; digests of two kinds are never equal.
    """
    number = _numbered(path) if path else _default_number()
    if not data.flags.c_contiguous:
        raise BadInput("the kernel takes contiguous arrays only")
    library = _library()
    if number < 0 or library is None:
        import hashlib  # loads OpenSSL: 3 ms that the kernel does not need

        flat = data.reshape(-1).view(np.uint8)
        return "blake2b-128:" + hashlib.blake2b(flat.data, digest_size=16).hexdigest()
    out = _DigestBuffer()
    library.driftline_digest(_address(data), data.nbytes, number, out)
    return _PREFIX + out.raw.hex()


def digest_at(address: int, length: int) -> str:
    """As `digest`, for memory that the caller guarantees; no array is made for it."""
    number = _default_number()
    library = _library()
    if number < 0 or library is None:
        return digest(bytes_at(address, length))
    out = _DigestBuffer()
    library.driftline_digest(address, length, number, out)
    return _PREFIX + out.raw.hex()


def bytes_at(address: int, length: int) -> npt.NDArray[np.uint8]:
    """A view of memory that its owner must keep alive; nothing is copied."""
    # Not by a ctypes array: each new length would create a new class, which dies with it.
    return np.frombuffer(_memory_view(address, length, _WRITABLE) if length else b"", np.uint8)


def address_of(buffer: bytes | memoryview) -> int:
    """The address of a buffer's first byte; the caller must keep the buffer alive.

    >>> import ctypes
    >>> ctypes.string_at(address_of(b"driftline"), 5)
    b'drift'
    """
    view = _Buffer()
    if _get_buffer(buffer, view, 0):
        raise BadInput("only contiguous memory has an address")
    address = view[0]
    _release_buffer(view)
    return address or 0


_PIECE = 64 << 20


def let_go(address: int, length: int) -> None:
    """Release the pages of a mapped file; they are read again when they are used.

    The release is done in pieces and without the interpreter's lock. Unmapping a file all at once
    takes 24 ms per gigabyte, during which no other thread of the process can allocate memory.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)  # not on every system
    if advice is None:
        return
    advise = _madvise()
    for offset in range(0, length, _PIECE):
        advise(address + offset, min(_PIECE, length - offset), advice)


@functools.cache
def _madvise() -> Any:
    # Cached: every opened library creates a class, which stays until it is garbage-collected.
    takes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return ctypes.CFUNCTYPE(ctypes.c_int, *takes)(("madvise", ctypes.CDLL(None)))
