"""The door to the C kernel: moments of a pair, summary and digest of a tensor; numpy without it.

Arrays come in as flat storage of any byte alignment, with the number of logical elements;
nothing here knows shapes or files. The library is a plain shared object beside this file, loaded
on first use; ctypes lets go of the GIL, so calls from several threads run side by side. Results
are told the same way on every path; only the last digits of sums differ.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline import settings
from driftline.errors import BadInput, did_you_mean
from driftline.numerics import definition
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.libraries import opened
from driftline.numerics.moments import PairMoments, joined_std, merge_moments
from driftline.numerics.summary import SKETCH_BUCKETS, Summary

AnyArray: TypeAlias = "npt.NDArray[Any]"

ABI_VERSION = 5
PATHS = ("generic", "avx2", "avx512")
NUMPY = "numpy"
NUMPY_BLOCK = 1 << 18
"""Elements per block without the C kernel; about fifteen float64 copies of it live at a time."""

# Order of the enum in kernel.c; complex types are handed over as twice as many reals.
_CODES = {
    name: code
    for code, name in enumerate(
        (
            *("float64", "float32", "float16", "bfloat16"),
            *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
            *("float8_e8m0fnu", "float4_e2m1fn_x2"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
            *("bool", "int4", "uint4"),
        )
    )
}
# name -> (code in C, reals per element, whether the lowest value means -inf)
_LAYOUT = {
    d.name: (
        _CODES[definition.COMPONENT.get(d.name, d.name)],
        2 if d.kind == "complex" else 1,
        int(definition.has_sentinel(d)),
    )
    for d in DTYPES.values()
}

MOMENTS = struct.Struct("=2q8dq3d5q10d10q")
# In two parts: a tuple of all would be cut in two again.
_SUMMARY = struct.Struct("=q5d4q")
_SKETCH = struct.Struct(f"={SKETCH_BUCKETS}d")
_numbers_in, _sketch_in = _SUMMARY.unpack_from, _SKETCH.unpack_from
_MomentsBuffer = ctypes.c_char * MOMENTS.size
_SummaryBuffer = ctypes.c_char * (_SUMMARY.size + _SKETCH.size)
_DigestBuffer = ctypes.c_char * 16
_start_of: Any = ctypes.c_char.from_buffer
_address_of = ctypes.addressof
_new_moments, _new_summary = PairMoments._make, Summary._make
_PREFIX = "xxh3-128:"
# A function object of our own: the program may have declared this one differently for itself.
_memory_view: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_WRITABLE = 0x200  # PyBUF_WRITE


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(f"{os.path.dirname(__file__)}/_kernel.so")  # noqa: PTH120 - no `pathlib` either


def load(path: str | os.PathLike[str]) -> ctypes.CDLL | None:
    """A kernel library with its signatures declared, as `opened`."""
    library = opened(path, "driftline_abi", ABI_VERSION)
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
    """The paths this machine can take, best first; `numpy` always works."""
    library = _library()
    best = -1 if library is None else int(library.driftline_best_path())
    return (*reversed(PATHS[: best + 1]), NUMPY)


def active() -> str:
    """The path taken when none is asked for: the best one, or what `DRIFTLINE_KERNEL` says."""
    number = _default_number()
    return PATHS[number] if number >= 0 else NUMPY


@functools.cache
def _default_number() -> int:
    """Asked once per process: the environment is not read again for every small tensor."""
    return _numbered(settings.kernel_choice())


@functools.lru_cache(maxsize=32)
def _numbered(wanted: str) -> int:
    """Place in PATHS of the path wanted, of the best one for an empty wish; -1 for numpy."""
    possible = available()
    chosen = wanted or possible[0]
    if chosen not in possible:
        known = (*PATHS, NUMPY)
        raise BadInput(
            f"kernel path {chosen!r} "
            + ("cannot run on this machine" if chosen in known else "is unknown"),
            hint=did_you_mean(chosen, possible),
        )
    return -1 if chosen == NUMPY else PATHS.index(chosen)


def chosen(path: str | None) -> tuple[ctypes.CDLL | None, int]:
    """The library and the number of the path to take, for another door; None: do it in numpy."""
    number = _numbered(path) if path else _default_number()
    return (_library() if number >= 0 else None), number


def code_of(dtype: DType) -> int:
    """The number C knows an element type by."""
    return _LAYOUT[dtype.name][0]


def _address(array: AnyArray) -> int:
    """Where the bytes are. Asking the buffer is twice as fast, where it can be written to."""
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
    """How C is told of two types: codes, reals per element, which side to widen, masks."""
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
    """Every moment of a pair in one pass over its memory.

    Args:
        reference: Flat contiguous storage (numpy dtype `storage`, or raw bytes), any alignment.
        reference_dtype: What its bytes mean.
        candidate: Likewise; may be of another type.
        candidate_dtype: What its bytes mean; ULPs are counted in it.
        count: Logical elements of each side. Complex elements are measured as two reals each.
        atol: Absolute part of the tolerance behind `outside`.
        rtol: Part of the tolerance relative to the reference.
        path: One of `available()`, instead of the active one.
    """
    number = _numbered(path) if path else _default_number()
    _fit(reference, reference_dtype, count)
    _fit(candidate, candidate_dtype, count)
    library = _library()
    if number < 0 or library is None:
        return _pair_in_blocks(
            *(reference, reference_dtype, candidate, candidate_dtype, count, atol, rtol)
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
    """The same for memory the caller vouches for, by address; only where `takes_addresses()`."""
    library = _library()
    assert library is not None
    names = reference_dtype.name, candidate_dtype.name
    places = reference, candidate
    return _pair(library, places, names, count, atol, rtol, _default_number())


def takes_addresses() -> bool:
    """Whether the C kernel is what is used here; numpy wants arrays."""
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
    return _new_moments(MOMENTS.unpack(out))


def summarize(data: AnyArray, dtype: DType, *, count: int, path: str | None = None) -> Summary:
    """Extremes, moments, counts and the sketch of one tensor, in one pass over its memory."""
    number = _numbered(path) if path else _default_number()
    _fit(data, dtype, count)
    library = _library()
    if number < 0 or library is None:
        return _summary_in_blocks(data, dtype, count)
    return _summarize(library, _address(data), dtype.name, count, number)


def summarize_at(address: int, length: int, dtype: DType, *, count: int) -> Summary:
    """The same for memory the caller vouches for: no array is made for it."""
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
    return _new_summary(_numbers_in(out) + (_sketch_in(out, _SUMMARY.size),))  # noqa: RUF005 - quicker


def digest(data: AnyArray, *, path: str | None = None) -> str:
    """A name for these bytes: `xxh3-128:<hex>` from C, `blake2b-128:<hex>` without it.

    Equal bytes have equal digests of the same kind; the two kinds never compare equal.
    """
    number = _numbered(path) if path else _default_number()
    if not data.flags.c_contiguous:
        raise BadInput("the kernel takes contiguous arrays only")
    library = _library()
    if number < 0 or library is None:
        import hashlib  # loads OpenSSL, 3 ms that nobody with the kernel needs

        return "blake2b-128:" + hashlib.blake2b(_bytes(data).data, digest_size=16).hexdigest()
    out = _DigestBuffer()
    library.driftline_digest(_address(data), data.nbytes, number, out)
    return _PREFIX + out.raw.hex()


def digest_at(address: int, length: int) -> str:
    """The same for memory the caller vouches for: no array is made for it."""
    number = _default_number()
    library = _library()
    if number < 0 or library is None:
        return digest(bytes_at(address, length))
    out = _DigestBuffer()
    library.driftline_digest(address, length, number, out)
    return _PREFIX + out.raw.hex()


def bytes_at(address: int, length: int) -> npt.NDArray[np.uint8]:
    """A window on memory that its owner must keep alive; nothing is copied."""
    # Not through a ctypes array: each new length would make a new class, which dies with it.
    return np.frombuffer(_memory_view(address, length, _WRITABLE) if length else b"", np.uint8)


def _bytes(data: AnyArray) -> AnyArray:
    return data.reshape(-1).view(np.uint8)


def _pieces(count: int) -> list[tuple[int, int]]:
    return [(i, min(NUMPY_BLOCK, count - i)) for i in range(0, count, NUMPY_BLOCK)] or [(0, 0)]


def _part(data: AnyArray, dtype: DType, first: int, count: int) -> AnyArray:
    start = first * dtype.bits // 8  # blocks begin at even elements, so nibbles are not cut
    return _bytes(data)[start : start + dtype.byte_count(count)]


def _pair_in_blocks(
    r: AnyArray, r_dtype: DType, c: AnyArray, c_dtype: DType, count: int, atol: float, rtol: float
) -> PairMoments:
    return merge_moments(
        [
            definition.pair_moments(
                *(_part(r, r_dtype, i, n), r_dtype, _part(c, c_dtype, i, n), c_dtype),
                count=n,
                atol=atol,
                rtol=rtol,
            )
            for i, n in _pieces(count)
        ]
    )


def _summary_in_blocks(data: AnyArray, dtype: DType, count: int) -> Summary:
    reals = 2 if dtype.kind == "complex" else 1
    whole: Summary | None = None
    for i, n in _pieces(count):
        part = definition.summarize(_part(data, dtype, i, n), dtype, count=n, first=i * reals)
        whole = part if whole is None else _join_summaries(whole, part)
    assert whole is not None
    return whole


def _join_summaries(a: Summary, b: Summary) -> Summary:
    n, m = (s.count - s.nan - s.pos_inf - s.neg_inf for s in (a, b))
    if not n or not m:
        moments = a if n else b
        low, high, mean, std = moments.min, moments.max, moments.mean, moments.std
    else:
        low, high = min(a.min, b.min), max(a.max, b.max)
        mean = a.mean + (b.mean - a.mean) * (m / (n + m))
        std = joined_std((n, a.mean, a.std), (m, b.mean, b.std))
    return Summary(
        count=a.count + b.count,
        min=low,
        max=high,
        mean=mean,
        std=std,
        l2=math.hypot(a.l2, b.l2),
        zeros=a.zeros + b.zeros,
        nan=a.nan + b.nan,
        pos_inf=a.pos_inf + b.pos_inf,
        neg_inf=a.neg_inf + b.neg_inf,
        sketch=tuple(x + y for x, y in zip(a.sketch, b.sketch, strict=True)),
    )
