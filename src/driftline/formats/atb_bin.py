"""ATB `.bin`: one tensor behind a checked header (`atb_header`), as a run or as a leaf of a dump.

Values in plain order are views of the mapped file; tiles (FRACTAL_NZ) are put in order when they
are asked for. Knows one file; how files lie in a dump is `atb_tree`'s.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from driftline.errors import BadFile
from driftline.formats.atb_header import START, STATISTICS, Header, Refused, header_of, open_file
from driftline.formats.atb_types import NZ_FORMATS, recode
from driftline.formats.fractal import nz_shape, nz_to_nd
from driftline.formats.member import Member
from driftline.formats.tree import Leaf, TreeRun
from driftline.numerics.dtypes import DTYPES, unpack_nibbles
from driftline.numerics.summary import Summary
from driftline.runs.inside import reason_of
from driftline.runs.key import TensorKey
from driftline.runs.record import Record

AnyArray = np.ndarray[Any, np.dtype[Any]]

NAME = "atb-bin"
SUFFIXES = (".bin",)
FILE_NAME = re.compile(r"(in|out)[tT]ensor(\d{1,6})(?:_(\w{1,200}))?\.bin")
_WORTH_MAPPING = 16_384
"""Reading fewer bytes than this is cheaper than mapping them."""


def sniff(path: Path) -> bool:
    """The first line, or the name of a tensor file of a dump."""
    if FILE_NAME.fullmatch(path.name):
        return True
    with path.open("rb") as stream:
        start = stream.read(len(START))
    return start == START or (not start and path.suffix.lower() in SUFFIXES)


def members(path: Path) -> list[Member]:
    """The file's one tensor.

    Raises:
        BadFile: The header or the length of the file cannot be believed.
    """
    header = read_header(path)
    record = leaf_of(TensorKey.of("tensor", "output"), header, path, path.name).record
    trouble = record.lost or ("" if record.kept == "full" else _absence(header))
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
    """The file as a run of one tensor.

    Raises:
        BadFile: The header or the length of the file cannot be believed.
    """
    header = read_header(path)
    key = TensorKey.of("tensor", "output")
    leaf = None
    if header.points_to:
        from driftline.formats.atb_alias import beside  # it reads whole dumps, with this file

        leaf = beside(path, key)
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
    """A tensor of a dump, from the header of the file that holds its values or says it has none."""
    kind = header.kind
    trouble = header.trouble
    kept: Any = "full"
    summary = None
    if not trouble and not header.has_data and 0 not in header.dims:
        if header.points_to:
            trouble = _absence(header)
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
    """The four numbers a dump may keep of a tensor; what it does not know is NaN."""
    if not statistics:
        return None
    known = {name: _figure(text) for name, text in statistics}
    unknown: Any = math.nan
    high, low, mean, l2 = (known.get(name, math.nan) for name in STATISTICS)
    return Summary(count, low, high, mean, math.nan, l2, unknown, unknown, unknown, unknown)


def _figure(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # N/A, or a complex number in brackets
        return math.nan


def _absence(header: Header) -> str:
    if header.points_to:
        return f"its values are in {header.points_to} of the same dump; open the dump's folder"
    return f"only its {'statistics were' if header.statistics else 'description was'} dumped"


def read_header(path: Path) -> Header:
    """The checked header of a file.

    Raises:
        BadFile: It cannot be believed.
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
        BadFile: The file is no longer what it was when its header was read.
    """
    kind = header.kind
    elements = math.prod(header.dims)
    raw = _bytes(path, header)
    storage = DTYPES[kind.dtype].storage
    values: AnyArray = recode(raw, kind, elements) if kind.recoded else raw.view(storage)
    if header.layout not in NZ_FORMATS or nz_shape(header.dims) is None or not elements:
        return values
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
        # A file that shrank would end the process when the mapping is touched. A pipe has no size.
        if os.fstat(file).st_size != header.start + header.length:
            raise BadFile(f"{path} has changed since it was opened")
        if header.length < _WORTH_MAPPING:
            return np.frombuffer(os.pread(file, header.length, header.start), np.uint8)
        mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    return np.frombuffer(mapped, np.uint8, header.length, header.start)
