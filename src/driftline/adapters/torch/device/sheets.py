"""Summaries on their way: rows on the device, joined and fetched in one copy per step.

A sheet belongs to one queue of one device. `take` launches the kernel that reads a tensor, before
the program can launch anything that changes it; `send` joins the rows and starts their copy to the
host. Nothing here waits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from driftline.adapters.torch.device.digests import digest_text
from driftline.adapters.torch.device.launching import Kernel, level
from driftline.adapters.torch.device.places import Mark, Place
from driftline.numerics.definition import COMPONENT, has_sentinel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.summary import Summary

ROWS = 32768
"""Rows of the arena, 640 bytes each: when they are used up, what is there is joined."""
SLOTS = 1024
"""Tensors of one flight."""
MOST_PROGRAMS = 1024
_FIRST_TABLE = 1 << 16
_TABLE_BLOCK = 1024
_KINDS = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "b8",
}


class Kind(NamedTuple):
    """How tensors of one dtype are reduced.

    Attributes:
        kernel: Reads them.
        reals: Numbers of an element: two for complex ones.
        width: Bytes of a number.
    """

    kernel: Kernel
    reals: int
    width: int


@functools.cache
def kind_of(name: str) -> Kind | None:
    """What reduces elements of a dtype; None where only the host can."""
    from driftline.adapters.torch.device import summary_kernels as kernels

    dtype = DTYPES[name]
    part = DTYPES[COMPONENT.get(name, name)]
    short = _KINDS.get(part.name)
    if short is None:
        return None
    lowest = dtype.lowest if has_sentinel(dtype) else 0.0
    kernel = _kernel(kernels.summary_rows, short, lowest)
    return Kind(kernel, 2 if dtype.kind == "complex" else 1, part.bits // 8)


@functools.cache
def _kernel(function: Any, short: str, lowest: float) -> Kernel:
    from driftline.adapters.torch.device.summary_kernels import WARPS

    registers = 64 if short in ("bf16", "f16", "u16", "i16") else 96
    constants = {"KIND": short, "LOWEST": lowest, "LEVEL": level()}
    return Kernel(function, constants, warps=WARPS, registers=registers)


@functools.cache
def _joining() -> Kernel:
    from driftline.adapters.torch.device.summary_kernels import joined_rows

    return Kernel(joined_rows, {}, warps=4)


@functools.cache
def _filling() -> Kernel:
    from driftline.adapters.torch.device.summary_kernels import sketch_tables

    return Kernel(sketch_tables, {"BLOCK": _TABLE_BLOCK}, warps=4)


def shares(count: int) -> tuple[int, int]:
    """Chunks of a program, and programs, for a tensor of so many numbers."""
    chunks = (count + 32767) >> 15
    each = (chunks + MOST_PROGRAMS - 1) // MOST_PROGRAMS or 1
    return each, (chunks + each - 1) // each or 1


class Tables:
    """Signs and places of the sketch, for the groups of the largest tensor so far."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._kept: list[torch.Tensor] = []
        self.groups = 0
        self.signs = self.flips = 0
        self.filled: Mark | None = None
        self.stream = 0

    def reach(self, groups: int) -> None:
        """Have at least so many groups; what was there stays, kernels may be reading it."""
        size = max(_FIRST_TABLE, 1 << (groups - 1).bit_length())
        signs = self._place.empty((size,), torch.int64)
        flips = self._place.empty((size,), torch.int16)
        self._kept += [signs, flips]
        _filling()(size // _TABLE_BLOCK, self._place.index, signs.data_ptr(), flips.data_ptr(), 0)
        self.signs, self.flips, self.groups = signs.data_ptr(), flips.data_ptr(), size
        self.filled, self.stream = self._place.mark(), self._place.stream()


class Flight:
    """What one copy brings: the summaries of some tensors.

    Attributes:
        mark: Reached when they are here; None while they were not sent.
        there: It has been seen to be reached.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.there = False
        self._host: torch.Tensor | None = None
        self._rows: list[list[float]] = []
        self._digests: list[list[int]] = []

    def depart(self, host: torch.Tensor, mark: Mark) -> None:
        self._host, self.mark = host, mark

    def result(self, slot: int, count: int, width: int) -> tuple[str, Summary]:
        """Digest and summary of the tensor in a slot; only after its arrival."""
        if self._host is not None:
            self._rows = self._host.tolist()
            self._digests = self._host[:, 9:11].view(torch.int64).tolist()
            self._host = None
        row = self._rows[slot]
        finite, mean, spread, low, high, zeros, nans, above, below = row[:9]
        a, b = self._digests[slot]
        if finite:
            std, l2 = math.sqrt(spread / finite), math.sqrt(spread + finite * mean * mean)
        else:
            low = high = mean = std = math.nan
            l2 = 0.0
        summary = Summary(
            count,
            low,
            high,
            mean,
            std,
            l2,
            int(zeros),
            int(nans),
            int(above),
            int(below),
            tuple(row[16:]),
        )
        return digest_text(a, b, count, width), summary


class Sheet:
    """Summaries of tensors of one queue of a device."""

    def __init__(self, place: Place, tables: Tables) -> None:
        self._place = place
        self._tables = tables
        self._rows = place.empty((ROWS, 80), torch.float64)
        self._meta = place.empty((SLOTS, 2), torch.int64)
        self._results = place.empty((SLOTS, 80), torch.float64)
        self._rows_at, self._meta_at = self._rows.data_ptr(), self._meta.data_ptr()
        self._row = self._joined = self._slot = 0
        self._flight = Flight()
        self._spare: list[torch.Tensor] = []
        self._known = 0

    @property
    def waiting(self) -> bool:
        """Whether anything was taken and not sent."""
        return self._slot > 0

    def take(self, tensor: torch.Tensor, kind: Kind, count: int) -> tuple[Flight, int]:
        """Launch the reading of a tensor whose elements lie in C order, at a word's boundary."""
        tables = self._tables
        groups = (count + 63) >> 6
        if groups > tables.groups:
            tables.reach(groups)
        if self._known != tables.groups:
            self._meet_tables()
        each, programs = shares(count)
        if self._row + programs > ROWS:
            self._join()
        if self._slot >= SLOTS:
            self.send()
        slot = self._slot
        kind.kernel(
            programs,
            self._place.index,
            tensor.data_ptr(),
            count,
            each,
            self._rows_at,
            self._row,
            self._meta_at,
            slot,
            tables.signs,
            tables.flips,
            0,
        )
        self._row += programs
        self._slot = slot + 1
        return self._flight, slot

    def take_known(
        self, address: int, kernel: Kernel, count: int, each: int, programs: int
    ) -> tuple[Flight, int] | None:
        """The same for a tensor like one that was taken before; None if there is no room for it."""
        slot, row, tables = self._slot, self._row, self._tables
        if slot >= SLOTS or row + programs > ROWS or self._known != tables.groups:
            return None
        kernel(
            programs,
            self._place.index,
            address,
            count,
            each,
            self._rows_at,
            row,
            self._meta_at,
            slot,
            tables.signs,
            tables.flips,
            0,
        )
        self._row = row + programs
        self._slot = slot + 1
        return self._flight, slot

    def send(self) -> None:
        """Join what was taken and start its copy to the host."""
        if not self._slot:
            return
        self._join()
        host = self._place.pinned(self._slot * 640).view(torch.float64).view(self._slot, 80)
        # In this queue: the next kernels write to the same results.
        mark = self._place.copy_here([(host, self._results[: self._slot])])
        self._flight.depart(host, mark)
        self._flight = Flight()
        self._slot = self._joined = 0

    def _join(self) -> None:
        new = self._slot - self._joined
        if new:
            _joining()(
                new,
                self._place.index,
                self._rows_at,
                self._meta_at,
                self._results.data_ptr(),
                self._joined,
            )
        self._joined = self._slot
        self._row = 0

    def _meet_tables(self) -> None:
        """Tables filled in another queue: this one goes on when they are there."""
        tables = self._tables
        if tables.filled is not None and tables.stream != self._place.stream():
            wait = getattr(tables.filled, "wait", None)
            if wait is not None:
                wait()
        self._known = tables.groups
