"""`.npz` files: zips of `.npy` files. Names inside are never used as paths; bombs are refused."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from driftline.errors import BadFile
from driftline.formats.dump_run import Member
from driftline.formats.tensors import npy
from driftline.runs.files.mapped_file import map_range

NAME = "npz"
MOST_MEMBERS = 1_000_000
MOST_INFLATION = 1_100
"""deflate cannot exceed 1032 to 1: a file that claims more is false, or its members overlap."""
LARGE = 1 << 30
USUAL_INFLATION = 100
"""A member beyond `LARGE` that unpacks to more than this many times its size is refused."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x1


def sniff(path: Path) -> bool:
    """Whether a file is a zip whose members are arrays (a zip with `data.pkl` is torch's)."""
    names = names_in_zip(path)
    return bool(names) and all(name.endswith(".npy") for name in names)


def names_in_zip(path: Path) -> list[str]:
    """Names of a zip's members; empty for a file that is not a zip."""
    # Only a zip that begins the file, because a tensor file may end with bytes that look like one.
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # a damaged directory raises half a dozen types
        return []


def members(path: Path) -> list[Member]:
    """The arrays of the archive. Stored ones are mapped; compressed ones are unpacked on use.

    Raises:
        BadFile: No zip, an encrypted member, a bomb, or an array that `.npy` would refuse.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            # From the directory alone, before a single byte is unpacked.
            _refuse_bombs(path, infos)
            return [_member(path, archive, info) for info in infos if not info.is_dir()]
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as trouble:
        raise BadFile(f"{path} cannot be read as a zip of arrays: {trouble}") from trouble
    except Exception as trouble:
        if isinstance(trouble, BadFile):
            raise
        # zlib.error and struct.error are neither ValueErrors nor OSErrors.
        raise BadFile(f"{path} is damaged: {type(trouble).__name__}: {trouble}") from trouble


def _refuse_bombs(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    if len(infos) > MOST_MEMBERS:
        raise BadFile(f"{path} has {len(infos)} members; more than {MOST_MEMBERS} are refused")
    size = path.stat().st_size
    # Over all members, because overlapping members each claim the same packed bytes.
    claimed = sum(info.file_size for info in infos)
    if claimed > MOST_INFLATION * max(size, 1):
        raise BadFile(
            f"{path} has {size} bytes and claims to unpack to {claimed}: refused as a bomb"
        )
    for info in infos:
        if info.flag_bits & _ENCRYPTED:
            raise BadFile(f"{path}: member '{info.filename}' is encrypted")
        packed = max(info.compress_size, 1)
        if info.file_size > LARGE and info.file_size > USUAL_INFLATION * packed:
            raise BadFile(
                f"{path}: member '{info.filename}' unpacks from {packed} to {info.file_size} "
                "bytes: refused as a bomb",
                hint="if it is honest, save it uncompressed with numpy.savez",
            )


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    source = f"{path}: member '{info.filename}'"
    with archive.open(info) as stream:
        header = npy.read_header(cast(BinaryIO, stream), source)
    # The array's claim is checked against the archive's, before memory is allocated.
    if header.byte_count > info.file_size - header.offset:
        raise BadFile(
            f"{source} claims {header.byte_count} bytes of data and has "
            f"{info.file_size - header.offset}"
        )
    name = info.filename.removesuffix(".npy")
    return Member(name, header.name, header.shape, functools.partial(_fetch, path, info, header))


def _fetch(path: Path, info: zipfile.ZipInfo, header: npy.Header) -> np.ndarray[Any, np.dtype[Any]]:
    if header.byte_count == 0:
        return header.flat(np.empty(0, np.uint8))
    # Uncompressed bytes can be used in place in the archive.
    if info.compress_type == zipfile.ZIP_STORED:
        return header.flat(_mapped(path, info, header))
    try:
        with zipfile.ZipFile(path) as archive, archive.open(info) as stream:
            stream.read(header.offset)
            packed = np.empty(header.byte_count, np.uint8)
            got = io.BufferedReader(cast(Any, stream)).readinto(packed.data)
    except Exception as trouble:
        raise BadFile(f"{path}: member '{info.filename}' is damaged: {trouble}") from trouble
    if got != header.byte_count:
        raise BadFile(f"{path}: member '{info.filename}' is cut short")
    return header.flat(packed)


def _mapped(
    path: Path, info: zipfile.ZipInfo, header: npy.Header
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map a stored member's data; the length of its local header is read first."""
    with path.open("rb") as stream:
        stream.seek(info.header_offset)
        local = stream.read(_LOCAL_HEADER.size)
    if len(local) < _LOCAL_HEADER.size or local[:4] != b"PK\x03\x04":
        raise BadFile(f"{path}: member '{info.filename}' is not where the archive says")
    name_length, extra_length = struct.unpack_from("<2H", local, 26)
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length + header.offset
    if start + header.byte_count > path.stat().st_size:
        raise BadFile(f"{path}: member '{info.filename}' is cut short")
    return map_range(path, start, header.byte_count)
