"""`.safetensors` files: a JSON header of limited length, and mapped bytes.

The numpy loader of the safetensors package knows neither bfloat16 nor float8. The header is simple
enough to read here, and all its claims are checked against the file's length before use.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any, cast

import numpy as np

from driftline.errors import BadFile
from driftline.formats.dump_run import Member
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.mapped_file import map_file

NAME = "safetensors"
# The limit of the safetensors package itself.
LARGEST_HEADER = 100_000_000
_LENGTH_FIELD = 8
_PADDING = re.compile(r"__pad\d+")
"""Driftline's own shards fill gaps with entries of this name, which are not tensors."""

# In addition to the tags that we write: types for which other writers have tags that not every
# reader knows.
_TAGS: dict[str, str] = {
    **{dtype.safetensors: name for name, dtype in DTYPES.items()},
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
    "U8": "uint8",
}


def sniff(path: Path) -> bool:
    """Whether the file begins with a length field and the opening brace of an object."""
    with path.open("rb") as stream:
        start = stream.read(_LENGTH_FIELD + 1)
    # A header below 4 GB has four zero bytes here, unlike a text file.
    return len(start) == _LENGTH_FIELD + 1 and start[-1:] == b"{" and start[4:8] == b"\0\0\0\0"


def members(path: Path) -> list[Member]:
    """The tensors of the file, in the order of their bytes.

    Raises:
        BadFile: The header is cut, too long, malformed, or claims missing bytes.
    """
    total = path.stat().st_size
    header, start = _header(path, total)
    entries: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    for name, claim in header.items():
        if name == "__metadata__" or _PADDING.fullmatch(name):
            continue
        entries.append(_entry(path, name, claim, total - start))
    # Sorted by position, so that overlaps are found between neighbours.
    entries.sort()
    end = 0
    for begin, stop, name, _, _ in entries:
        # Empty tensors may be anywhere.
        if begin < end and stop > begin:
            raise BadFile(f"{path}: tensor '{name}' overlaps the one before it")
        end = max(end, stop)
    if not entries:
        return []
    mapped = _mapped(path)
    return [
        Member(
            name,
            dtype,
            shape,
            functools.partial(_slice, mapped, start + begin, start + stop, dtype),
        )
        for begin, stop, name, dtype, shape in entries
    ]


def _header(path: Path, total: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as stream:
        field = stream.read(_LENGTH_FIELD)
        if len(field) < _LENGTH_FIELD:
            raise BadFile(f"{path} is too short to be a safetensors file")
        length = int.from_bytes(field, "little")
        # The claim is checked against the file's length before anything of that size is allocated.
        if length > total - _LENGTH_FIELD:
            raise BadFile(
                f"{path} claims a header of {length} bytes, but the file has {total}",
                hint="the file is cut short, or it is no safetensors file",
            )
        if length > LARGEST_HEADER:
            raise BadFile(
                f"{path} claims a header of {length} bytes; more than {LARGEST_HEADER} is refused"
            )
        text = stream.read(length)
    try:
        header: Any = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} has a malformed header: {_brief(trouble)}") from trouble
    if not isinstance(header, dict):
        raise BadFile(f"{path} has a malformed header: it is no JSON object")
    return cast(dict[str, Any], header), _LENGTH_FIELD + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    # Readers differ in which of two equal names they use; neither is right.
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _entry(
    path: Path, name: str, claim: Any, room: int
) -> tuple[int, int, str, str, tuple[int, ...]]:
    try:
        tag, sizes, (begin, stop) = claim["dtype"], claim["shape"], claim["data_offsets"]
    except (KeyError, TypeError, ValueError) as trouble:
        raise BadFile(f"{path}: the entry of tensor '{name}' is malformed") from trouble
    dtype = _TAGS.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        raise BadFile(f"{path}: tensor '{name}' has the unknown element type {str(tag)[:40]!r}")
    if not isinstance(sizes, list) or not all(map(_is_count, cast(list[Any], sizes))):
        raise BadFile(f"{path}: tensor '{name}' has a malformed shape")
    shape = tuple(cast(list[int], sizes))
    if not (_is_count(begin) and _is_count(stop) and begin <= stop <= room):
        raise BadFile(
            f"{path}: tensor '{name}' claims bytes {str(begin)[:24]} to {str(stop)[:24]} of {room}",
            hint="the file is cut short or damaged",
        )
    # Type and shape are checked against the range, so that a view of it cannot fail later.
    wanted = DTYPES[dtype].byte_count(math.prod(shape))
    if stop - begin != wanted:
        raise BadFile(
            f"{path}: tensor '{name}' needs {wanted} bytes by its shape and claims {stop - begin}"
        )
    return begin, stop, name, dtype, shape


def _is_count(value: Any) -> bool:
    # Excludes `true`, which JSON reads as a bool, which is an int in Python.
    return type(value) is int and value >= 0


def _brief(trouble: BaseException) -> str:
    return str(trouble).splitlines()[0][:120] if str(trouble) else type(trouble).__name__


def _mapped(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with path.open("rb") as stream:
        return np.frombuffer(map_file(stream.fileno(), str(path)), np.uint8)


def _slice(
    mapped: np.ndarray[Any, np.dtype[np.uint8]], begin: int, stop: int, dtype: str
) -> np.ndarray[Any, np.dtype[Any]]:
    # A view even if the offset is odd: numpy and the kernel read unaligned memory.
    return mapped[begin:stop].view(DTYPES[dtype].storage)
