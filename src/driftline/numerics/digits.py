"""Numbers as text, many at a time: what `str` gives, in a tenth of its time by the kernel."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from types import NoneType
from typing import cast

from driftline.numerics import kernel

_KINDS = {NoneType: 0, float: 1, int: 2}
_LONGEST = 26
"""Characters of a number and of what comes after it."""


def number_lines(cells: Sequence[float | int | None], columns: int) -> list[str]:
    """Lines of so many cells each, with commas between them and a line end; None is no text.

    >>> number_lines([0.1, None, 3, float("nan")], 2)
    ['0.1,\\n', '3,nan\\n']
    """
    return _by_kernel(cells, columns) or [
        ",".join(["" if cell is None else str(cell) for cell in cells[at : at + columns]]) + "\n"
        for at in range(0, len(cells), columns)
    ]


def _by_kernel(cells: Sequence[float | int | None], columns: int) -> list[str] | None:
    """The same; None for what only Python has words for, such as whole numbers of any length."""
    library, _ = kernel.chosen(None)
    if library is None:
        return None
    try:
        kinds = bytes(map(_KINDS.__getitem__, map(type, cells)))
        known = [0.0 if cell is None else cell for cell in cells] if 0 in kinds else cells
        values = array("d", cast("Sequence[float]", known))
    except (KeyError, OverflowError):
        return None
    out = ctypes.create_string_buffer(len(cells) * _LONGEST)
    write = library.driftline_number_lines
    write.argtypes = [*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 2, ctypes.c_void_p]
    write.restype = ctypes.c_int64
    written = write(values.buffer_info()[0], kinds, len(cells) // columns, columns, out)
    if written < 0:
        return None
    return ctypes.string_at(out, written).decode("ascii").splitlines(keepends=True)
