"""The names in an ELF library's dynamic symbol table, read without loading it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_DYNSYM = 11
_MOST_SECTIONS = 4096
_MOST_SYMBOLS = 4_000_000


def dynamic_names(library: Path) -> Iterator[bytes]:
    """Every name of `.dynsym`; nothing for a file that is no 64-bit little-endian ELF.

    Raises:
        OSError: The file cannot be read.
    """
    with library.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return iter(())
    with data:
        try:
            return iter(list(_names(data)))
        except (struct.error, IndexError, OverflowError):  # cut off, or somebody's joke
            return iter(())


def _names(data: mmap.mmap) -> Iterator[bytes]:
    if data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + at * size)
        for at in range(min(count, _MOST_SECTIONS))
    ]
    for section in sections:
        _, kind, _, _, offset, length, link, _, _, each = section
        if kind != _DYNSYM or not each:
            continue
        strings, room = sections[link][4], sections[link][5]
        for at in range(min(length // each, _MOST_SYMBOLS)):
            (name,) = struct.unpack_from("<I", data, offset + at * each)
            if name < room:
                start = strings + name
                yield data[start : max(start, data.find(b"\0", start, strings + room))]
