"""One ATB `.bin` file: a text header, checked line by line, and the bytes of one tensor.

    $Version=1.0
    $Object.Count=1
    $Object.Length=24
    format=2
    dtype=0
    dims=2,3
    $Object.data=0,24
    $End=1
    <24 bytes, little endian, C order>

A file may hold no data: only the description, only statistics, or the name of the file of the same
dump in which the same tensor was saved. A header that contradicts itself or its file is `Refused`
with the reason. This reader serves single files and whole dumps.
"""

from __future__ import annotations

import functools
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.errors import BadFile
from driftline.formats.ascend.tiled_layouts import nz_shape, nz_to_nd
from driftline.formats.ascend.types import (
    ACL_TYPES,
    NZ_FORMATS,
    PLAIN_FORMATS,
    ElementType,
    format_name,
    recode,
)
from driftline.formats.dump_run import Leaf, Member, TreeRun
from driftline.numerics.dtypes import DTYPES, unpack_nibbles
from driftline.numerics.fields import Summary
from driftline.runs.files.local_files import reason_of
from driftline.runs.files.mapped_file import map_file
from driftline.runs.records import Record, TensorKey

START = b"$Version="
END = b"$End=1\n"
# Nearly every header fits; a longer one is read again completely.
USUAL_HEADER = 512
LARGEST_HEADER = 65_536
STATISTICS = ("max", "min", "mean", "l2norm")
# Eighteen digits fit into 64 bits; more would overflow the arithmetic.
_NUMBER = re.compile(r"-?\d{1,18}")
_DIMS = re.compile(r"(?:\d{1,18}(?:,\d{1,18})*)?")
_PLACE = re.compile(r"\d{1,18},\d{1,18}")
_SYSTEM = ("$Version", "$Object.Count", "$Object.Length", "$Object.data")


class Refused(ValueError):
    """Why a file is not accepted: the part of the sentence after its name."""


class Header(NamedTuple):
    """The content of a header, checked against the length of its file.

    Attributes:
        kind: Element type.
        layout: aclFormat code.
        dims: Sizes as stored.
        start: Offset of the data in the file.
        length: Number of bytes of data; 0 if the file holds no values.
        statistics: max, min, mean and l2norm as written, if present.
        points_to: The file that holds the data instead: `{operation id}_{file name}`.
        has_data: Whether the file holds the values.
    """

    kind: ElementType
    layout: int
    dims: tuple[int, ...]
    start: int = 0
    length: int = 0
    statistics: tuple[tuple[str, str], ...] = ()
    points_to: str = ""
    has_data: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in ordinary order. Tiles whose true size is unknown keep their padding."""
        if self.layout in NZ_FORMATS:
            return nz_shape(self.dims) or self.dims
        return self.dims

    @property
    def remark(self) -> str:
        """A remark for readers of the values: a type or an order that differs from the file's."""
        kind = self.kind
        if kind.recoded:
            return f"{kind.name} is given as {kind.dtype}, which holds its values exactly"
        tiles = self.layout in NZ_FORMATS and nz_shape(self.dims) is not None
        if not tiles and self.layout not in PLAIN_FORMATS:
            return f"{format_name(self.layout)} is given in the order of its storage"
        return ""

    @property
    def trouble(self) -> str:
        """Why existing values cannot be returned; empty if they can."""
        if self.kind.dtype:
            return ""
        return f"elements of the type {self.kind.name} are no numbers that can be compared"


def open_file(path: Path | str) -> int:
    """Open a file for reading, without blocking on a pipe; `header_of` checks what it is."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))


def header_of(file: int) -> Header:
    """The header of an open file, checked against its length.

    Raises:
        Refused: The header is not valid.
    """
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise Refused("is not a regular file")
    total = about.st_size
    head = os.pread(file, USUAL_HEADER, 0)
    end = head.find(END)
    if end < 0 and len(head) < total:
        head = os.pread(file, LARGEST_HEADER, 0)
        end = head.find(END)
    if end < 0 or head[end - 1 : end] != b"\n":
        _refuse_without_end(head, total)
    header = _parsed(head[:end])
    start = end + len(END)
    available = total - start
    # Both directions are checked, because a file that is too long makes every offset doubtful.
    if available < header.start + header.length:
        raise Refused(
            f"is cut short: {header.length} bytes of data are promised, and {available} are there"
        )
    if available > header.start + header.length:
        # The probe appends when a dump is repeated in the same folder; the message names this case.
        rest = os.pread(file, len(START), start + header.start + header.length)
        raise Refused(
            "was written twice: a second record follows the first, as a dump appends to a file "
            "that is already there"
            if rest == START
            else f"has {available - header.length} bytes more than its header promises"
        )
    return header._replace(start=start + header.start)


def _refuse_without_end(head: bytes, total: int) -> None:
    if not total:
        raise Refused("is empty")
    if not head.startswith(START):
        raise Refused("does not begin as an ATB tensor file does, with $Version")
    raise Refused("has no $End line: its header is cut short or damaged")


def _header_values(text: bytes) -> dict[str, str]:
    """The lines of a header, by name.

    Raises:
        Refused: A line is malformed, repeated or unknown, or the version is not supported.
    """
    values: dict[str, str] = {}
    for line in text.decode("latin-1").split("\n")[:-1]:
        name, sign, value = line.partition("=")
        # Strict on purpose: a line that is not understood may change the meaning of the others.
        if not sign or "=" in value or not name:
            raise Refused(f"has a header line that is no name=value: {line[:60]!r}")
        if name in values:
            raise Refused(f"says {name[:40]} twice in its header")
        if name.startswith("$") and name not in _SYSTEM:
            raise Refused(f"has a header line that is not known: {line[:60]!r}")
        values[name] = value
    if values["$Version"] != "1.0":
        raise Refused(f"is of version {values['$Version'][:20]!r}; only 1.0 is known")
    return values


@functools.lru_cache(maxsize=4096)
def _parsed(text: bytes) -> Header:
    """Parse the lines; `start` is the offset inside the data.

    Cached, because dumps repeat headers.
    """
    if not text.startswith(START):
        raise Refused("does not begin as an ATB tensor file does, with $Version")
    values = _header_values(text)
    count = _integer(values, "$Object.Count")
    length = _integer(values, "$Object.Length")
    if count not in (0, 1):
        raise Refused(f"claims {count} objects; a tensor file has one or none")
    code, layout = _integer(values, "dtype"), _integer(values, "format")
    if code not in ACL_TYPES:
        raise Refused(f"has the unknown element type {code}")
    dims = _dims(values)
    offset = 0
    if count:
        place = values.get("$Object.data", "")
        if not _PLACE.fullmatch(place):
            raise Refused(f"does not say where its data are: $Object.data is {place[:40]!r}")
        offset, size = (int(part) for part in place.split(","))
        # One object fills the data; with an offset, some bytes would be unexplained.
        if offset + size != length or offset:
            raise Refused(f"contradicts itself: {length} bytes of data in all, object at {place}")
        needed = ACL_TYPES[code].byte_count(math.prod(dims))
        # Strings have no fixed width, so their length cannot be checked.
        if ACL_TYPES[code].bits and length != needed:
            raise Refused(
                f"contradicts itself: {needed} bytes by type and sizes, {length} by its length"
            )
    elif length or "$Object.data" in values:
        raise Refused("contradicts itself: no object, but data of an object")
    statistics = tuple((name, values[name][:60]) for name in STATISTICS if name in values)
    return Header(
        ACL_TYPES[code],
        layout,
        dims,
        offset,
        length,
        statistics,
        values.get("data", ""),
        bool(count),
    )


def _integer(values: dict[str, str], name: str) -> int:
    value = values.get(name)
    if value is None:
        raise Refused(f"does not say its {name}")
    if not _NUMBER.fullmatch(value) or (name[0] == "$" and value[0] == "-"):
        raise Refused(f"has no number for its {name}: {value[:40]!r}")
    return int(value)


def _dims(values: dict[str, str]) -> tuple[int, ...]:
    text = values.get("dims")
    if text is None:
        raise Refused("does not say its dims")
    if not _DIMS.fullmatch(text):
        raise Refused(f"has sizes that are no numbers: dims={text[:40]!r}")
    return tuple(int(size) for size in text.split(",")) if text else ()


# ---- The file as a run, or as a leaf of a dump


AnyArray = np.ndarray[Any, np.dtype[Any]]

NAME = "atb-bin"
FILE_NAME = re.compile(r"(in|out)[tT]ensor(\d{1,6})(?:_(\w{1,200}))?\.bin")
_WORTH_MAPPING = 16_384
"""Reading fewer bytes than this is cheaper than mapping them."""


def sniff(path: Path) -> bool:
    """Whether a file has the first line, or the name, of a tensor file of a dump."""
    # An empty or damaged file of a dump is accepted here, so that its reader gives the reason.
    if FILE_NAME.fullmatch(path.name):
        return True
    with path.open("rb") as stream:
        start = stream.read(len(START))
    return start == START or (not start and path.suffix.lower() == ".bin")


def members(path: Path) -> list[Member]:
    """The single tensor of the file.

    Raises:
        BadFile: The header or the length of the file is not valid.
    """
    header = read_header(path)
    record = leaf_of(TensorKey.of("tensor", "output"), header, path, path.name).record
    trouble = record.lost or ("" if record.kept == "full" else _why_no_values(header))
    return [
        Member(
            "",
            header.kind.dtype or "uint8",
            header.shape,
            functools.partial(fetch, path, header),
            trouble,
            record.kept,
            record.summary,
        )
    ]


def open(path: Path) -> TreeRun:
    """Open the file as a run of one tensor.

    Raises:
        BadFile: The header or the length of the file is not valid.
    """
    header = read_header(path)
    key = TensorKey.of("tensor", "output")
    leaf = None
    if header.points_to:
        from driftline.formats.ascend.atb.dump import (
            resolve_lone_file,
        )  # it reads whole dumps, with this file

        leaf = resolve_lone_file(path, key)
    if leaf is None:
        leaf = leaf_of(key, header, path, path.name)
    remark = header.remark
    events = [{"kind": "note", "message": remark}] if remark else []
    return TreeRun(path, NAME, [leaf], order="none", events=events)


def leaf_of(
    key: TensorKey,
    header: Header,
    path: Path | str,
    source: str,
    *,
    alias: str = "",
    class_name: str = "",
) -> Leaf:
    """A tensor of a dump, from the header of the file that has its values or says it has none."""
    kind = header.kind
    trouble = header.trouble
    kept: Any = "full"
    summary = None
    # A tensor without elements is complete without data.
    if not trouble and not header.has_data and 0 not in header.dims:
        # Values saved elsewhere can be found only if the file still is in its dump.
        if header.points_to:
            trouble = _why_no_values(header)
        else:
            kept = "summary" if header.statistics else "describe"
            summary = summary_of(header.statistics, math.prod(header.shape))
    record = Record(
        key,
        0,
        kind.dtype or kind.name,
        header.shape,
        alias=alias,
        class_name=class_name,
        kept=kept,
        summary=summary,
        lost=trouble,
    )
    if trouble or kept != "full" or not header.has_data:
        return Leaf(record, source)
    return Leaf(record, source, functools.partial(fetch, path, header))


def summary_of(statistics: tuple[tuple[str, str], ...], count: int) -> Summary | None:
    """The four numbers that a dump may store about a tensor; unknown ones are NaN."""
    if not statistics:
        return None
    figures = {name: _figure(text) for name, text in statistics}
    unknown: Any = math.nan
    # In the order of STATISTICS, which is the order of the file.
    high, low, mean, l2 = (figures.get(name, math.nan) for name in STATISTICS)
    return Summary(count, low, high, mean, math.nan, l2, unknown, unknown, unknown, unknown)


def _figure(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # N/A, or a complex number in brackets
        return math.nan


def _why_no_values(header: Header) -> str:
    if header.points_to:
        return f"its values are in {header.points_to} of the same dump; open the dump's folder"
    return f"only its {'statistics were' if header.statistics else 'description was'} dumped"


def read_header(path: Path) -> Header:
    """The checked header of a file.

    Raises:
        BadFile: The header is not valid.
    """
    try:
        file = open_file(path)
        try:
            return header_of(file)
        finally:
            os.close(file)
    except Refused as why:
        raise BadFile(f"{path} {why}") from None
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from None


def fetch(path: Path | str, header: Header) -> AnyArray:
    """The values as a flat array of the storage type; a view of the mapped file for plain orders.

    Raises:
        BadFile: The file has changed since its header was read.
    """
    kind = header.kind
    elements = math.prod(header.dims)
    raw = _bytes(path, header)
    storage = DTYPES[kind.dtype].storage
    values: AnyArray = recode(raw, kind, elements) if kind.recoded else raw.view(storage)
    if header.layout not in NZ_FORMATS or nz_shape(header.dims) is None or not elements:
        return values
    # Tiles of four-bit values cannot be moved as bytes: unpack, move, and pack again.
    if DTYPES[kind.dtype].bits == 4:
        codes = nz_to_nd(unpack_nibbles(values.view(np.uint8), elements), header.dims).reshape(-1)
        codes = np.append(codes, np.zeros(elements % 2, np.uint8))
        return codes[0::2] | (codes[1::2] << 4)
    return nz_to_nd(values, header.dims).reshape(-1)


def _bytes(path: Path | str, header: Header) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        file = open_file(path)
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from None
    try:
        # If the file shrank, its values would be read with the old shape. A pipe has no size.
        if os.fstat(file).st_size != header.start + header.length:
            raise BadFile(f"{path} has changed since it was opened")
        if header.length < _WORTH_MAPPING:
            return np.frombuffer(os.pread(file, header.length, header.start), np.uint8)
        mapped = map_file(file, str(path))
    finally:
        os.close(file)
    return np.frombuffer(mapped, np.uint8, header.length, header.start)
