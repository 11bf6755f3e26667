"""`.npy` files: one array each. Python objects are refused unread, and no header is trusted.

`usual_header` recognises headers as numpy writes them and is fast; `read_header` passes any other
header to numpy's own reader.
"""

from __future__ import annotations

import functools
import io
import math
import re
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from driftline.errors import BadFile
from driftline.formats.dump_run import Member
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.mapped_file import map_range

NAME = "npy"
MAGIC = b"\x93NUMPY"
_VERSION_1 = MAGIC + b"\x01\x00"
HEADER_BYTES = 12 + 65_535
"""Longest header that is read; numpy itself stops at 10 000 characters of it."""


def sniff(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def members(path: Path) -> list[Member]:
    """The single array of the file, without a name, so that it pairs with any other lone tensor.

    Raises:
        BadFile: The header is malformed, the type is not a number, or the data are cut short.
    """
    total = path.stat().st_size
    with path.open("rb") as stream:
        header = read_header(stream, str(path))
    if header.byte_count > total - header.offset:
        raise BadFile(
            f"{path} claims {header.byte_count} bytes of data and has {total - header.offset}",
            hint="the file is cut short or damaged",
        )
    fetch = functools.partial(_fetch, path, header)
    return [Member("", header.name, header.shape, fetch)]


class Header:
    """The content of an `.npy` header, checked.

    Attributes:
        stored: numpy's dtype as stored, including its byte order.
        name: Our name of the element type.
        shape: Sizes.
        fortran: Whether the first index varies fastest.
        offset: Offset of the data.
        byte_count: Number of bytes of data.
        plain: Whether the bytes already are as `flat` returns them: little endian, C order.
    """

    def __init__(
        self, stored: np.dtype[Any], shape: tuple[int, ...], fortran: bool, offset: int
    ) -> None:
        self.stored = stored
        # The name must not depend on the byte order of the file.
        self.name = stored.newbyteorder("=").name
        self.shape = shape
        self.fortran = fortran
        self.offset = offset
        self.byte_count = math.prod(shape) * stored.itemsize
        dtype = DTYPES.get(self.name)
        self.plain = dtype is not None and stored.str == dtype.storage and not fortran

    def flat(self, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[Any]]:
        """The data as a flat array, in C order and little endian; a view if they already are so."""
        array = raw[: self.byte_count].view(self.stored)
        if self.plain:
            return array
        # With one axis, both orders are the same.
        if self.fortran and len(self.shape) > 1:
            array = array.reshape(self.shape, order="F").ravel(order="C")
        return array.astype(DTYPES[self.name].storage, copy=False).reshape(-1)


def read_header(stream: BinaryIO, source: str) -> Header:
    """Parse the header at the start of a stream, without running or allocating what it claims."""
    first = stream.read(HEADER_BYTES)
    start = io.BytesIO(first)
    readers: dict[tuple[int, int], Any] = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
    }
    try:
        # Version 3 differs only in the encoding of field names, and fields are refused below.
        reader = readers[min(npy_format.read_magic(start), (2, 0))]
        with warnings.catch_warnings():
            # Python warns about odd escapes in a damaged header; the refusal is enough.
            warnings.simplefilter("ignore")
            shape, fortran, stored = reader(start)
    except Exception as trouble:  # numpy raises half a dozen types for a damaged header
        if not first.startswith(MAGIC):
            what = "does not begin as an npy file does" if first else "is empty"
            raise BadFile(f"{source} {what}") from trouble
        reason = str(trouble).splitlines()[0][:120] if str(trouble) else type(trouble).__name__
        raise BadFile(f"{source} has a malformed npy header: {reason}") from trouble
    # Before the type is inspected further, because an object array holds a pickle.
    if stored.hasobject:
        raise BadFile(
            f"{source} holds Python objects, which could run code when they are loaded",
            hint="save it as an array of numbers",
        )
    header = Header(stored, tuple(int(size) for size in shape), bool(fortran), start.tell())
    if header.name not in DTYPES or stored.names is not None or stored.subdtype is not None:
        raise BadFile(
            f"{source} holds elements of type {stored}, which cannot be compared",
            hint="numpy forgets bfloat16 and float8 when it saves: use .safetensors for those",
        )
    # A negative size would make the product of the shape look small.
    if any(size < 0 for size in header.shape):
        raise BadFile(f"{source} claims a negative size: {header.shape}")
    return header


_PLAIN = re.compile(
    rb"\{'descr': '([<|>=]?[a-z]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d+, ?)*\d*)\), ?\} *\n?"
)
"""A header as numpy writes it."""


@functools.lru_cache(4096)
def _plain_header(text: bytes) -> Header | None:
    """Parse a header, from the file's first byte on; None if `read_header` must do it.

    The result is cached, because files of one dump have the same few headers. This takes a
    microsecond, numpy's own reader sixty.
    """
    match = _PLAIN.fullmatch(text, 10)
    if match is None:
        return None
    try:
        stored = np.dtype(match[1].decode())
        shape = tuple(int(size) for size in match[3].split(b",") if size.strip())
    except (TypeError, ValueError):
        return None
    header = Header(stored, shape, match[2] == b"True", len(text))
    return header if header.name in DTYPES else None


def usual_header(start: bytes) -> Header | None:
    """The header at the start of a file if it has numpy's usual form; None to let numpy read it."""
    # Versions 2 and 3 are for very long headers and for names beyond ASCII.
    if start[:8] != _VERSION_1:
        return None
    end = 10 + int.from_bytes(start[8:10], "little")
    return _plain_header(start[:end]) if end <= len(start) else None


def _fetch(path: Path, header: Header) -> np.ndarray[Any, np.dtype[Any]]:
    if header.byte_count == 0:
        return np.empty(0, DTYPES[header.name].storage)
    return header.flat(map_range(path, header.offset, header.byte_count))
