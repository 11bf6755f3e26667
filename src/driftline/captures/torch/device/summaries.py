# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Summaries of device tensors: computed by kernels, joined, fetched in one copy, turned into lines.

A batch gathers the rows that kernels write; a transfer is one copy of joined rows to the host.
Tensors of a call that are like those of the call before are not described one by one: a group notes
their steps and visits, and the lines of an index are written from it in one go, by a thread that
does not hold up the program.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import torch

from driftline.captures.recorder import Snapshot
from driftline.captures.torch.device.places import Mark, Place
from driftline.numerics.definitions import digest_text
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.numerics.gpu import launcher
from driftline.numerics.gpu.launcher import NUMBERS, Kernel, Launch, level
from driftline.runs.index_lines import encode_line, line_ends
from driftline.runs.records import Kept, Record, TensorKey

# 80 numbers of 8 bytes: nine figures, the digest in two, and the sketch from 16 on.
ROW_BYTES = 640


class SummaryTransfer:
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

    def row_at(self, slot: int) -> int:
        """Where the row of a slot is in host memory; only after its arrival."""
        assert self._host is not None
        return self._host.data_ptr() + slot * ROW_BYTES

    def digest(self, slot: int) -> bytes | None:
        """The digest of the tensor in a slot; None where it is not known to be here."""
        if not self.there and self.mark is not None:
            try:
                self.there = self.mark.query()
            except RuntimeError:  # a graph is being recorded, or the device has failed
                return None
        if not self.there:
            return None
        return ctypes.string_at(self.row_at(slot) + 9 * 8, 16)

    def result(self, slot: int, count: int, width: int) -> tuple[str, Summary]:
        """Digest and summary of the tensor in a slot; only after its arrival."""
        # Converted once for all slots of the transfer; each conversion has a fixed cost.
        if not self._rows and self._host is not None:
            self._rows = self._host.tolist()
            # The digest is in two numbers whose bits are integers.
            self._digests = self._host[:, 9:11].view(torch.int64).tolist()
        row = self._rows[slot]
        finite, mean, spread, low, high, zeros, nans, above, below = row[:9]
        a, b = self._digests[slot]
        # Welford's sum of squared deviations, as the kernels keep it.
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


class Constant:
    """What the records of one place have in common, as a record and as words of a line.

    Attributes:
        record: One of them, of step 0 and visit 0, without digest and summary.
        count: Numbers in the tensor; two for each complex element.
        width: Bytes of a number.
        at: TensorAddress of the words.
    """

    def __init__(
        self, key: TensorKey, shot: Snapshot, alias: str, class_name: str, kept: Kept, width: int
    ) -> None:
        self.record = Record(
            key._replace(step=0, visit=0),
            0,
            shot.dtype,
            shot.shape,
            alias,
            class_name,
            shot.device,
            kept,
        )
        self.count, self.width = shot.elements, width
        head, tail = (part.encode("ascii", "replace") for part in line_ends(self.record))
        brief = kept != "summary"
        self._words = launcher.Words(head, tail, len(head), len(tail), self.count, width, brief)
        self.at = ctypes.addressof(self._words)

    def recorded(
        self, step: int, visit: int, digest: str = "", summary: Summary | None = None
    ) -> Record:
        """The record of one of them."""
        template = self.record
        site, port, slot, _, _, rank, process, phase, moment = template.key
        key = TensorKey(site, port, slot, step, visit, rank, process, phase, moment)
        kept = summary if template.kept == "summary" else None
        return Record(key, *template[1:8], digest, None, 1, kept)


class Group:
    """Tensors whose summaries one transfer brings, each like one that came before.

    Several of them may have the same slot: those that are one tensor.

    Attributes:
        transfer: Brings their summaries.
    """

    def __init__(self, transfer: SummaryTransfer) -> None:
        self.transfer = transfer
        self._constants: list[Constant] = []
        self._notes: array[int] = array("q")

    def add(self, constant: Constant, step: int, visit: int, slot: int) -> None:
        self._constants.append(constant)
        # Four integers per tensor instead of a record: this runs for every tensor.
        self._notes.extend((constant.at, step, visit, slot))

    def __len__(self) -> int:
        return len(self._constants)

    @property
    def dtypes(self) -> set[str]:
        return {constant.record.dtype for constant in self._constants}

    def described(self) -> Iterator[Record]:
        """The records without what the transfer brings."""
        for constant, step, visit, _ in self._noted():
            yield constant.recorded(step, visit)

    def records(self) -> Iterator[Record]:
        """The records; only after the transfer's arrival."""
        for constant, step, visit, slot in self._noted():
            result = self.transfer.result(slot, constant.count, constant.width)
            yield constant.recorded(step, visit, *result)

    def lines(self, order: int) -> bytes:
        """Their index lines; only after the transfer's arrival."""
        text = launcher.lines(self._notes, self.transfer.row_at(0), order)
        # Without the compiled helper the lines are made in Python, slower and equal.
        if text is not None:
            return text
        made = [
            encode_line(record, order + i, record.digest, None, "")
            for i, record in enumerate(self.records())
        ]
        return "\n".join([*made, ""]).encode("ascii", "replace")

    def _noted(self) -> Iterator[tuple[Constant, int, int, int]]:
        notes = self._notes
        return zip(self._constants, notes[1::4], notes[2::4], notes[3::4], strict=True)


# Rows on the device, joined and fetched in one copy per step.


ROWS = 32768
"""Rows of the arena: when they are used up, what is there is joined."""
FEWEST_ROWS = 2048
"""Where there is no memory for them: a megabyte, and still enough for the largest tensor."""
SLOTS = 1024
"""Tensors of one transfer."""
MOST_PROGRAMS = 1024
_FIRST_TABLE = 1 << 16
_LOOK_EVERY = 0.05
_TABLE_BLOCK = 1024


def _never(*_: int) -> int:
    """Stands where there is no driver to launch anything."""
    return -1


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
    dtype = DTYPES[name]
    part = DTYPES[dtype.component]
    short = part.triton
    if not short:
        return None
    kernel = _kernel(short, dtype.lowest if dtype.has_sentinel else 0.0)
    return Kind(kernel, dtype.reals, part.bits // 8)


@functools.cache
def _kernel(short: str, lowest: float) -> Kernel:
    from driftline.numerics.gpu.kernels.summary import WARPS

    constants = {"KIND": short, "LOWEST": lowest, "LEVEL": level()}
    if short in ("bf16", "f16", "u16", "i16"):
        from driftline.numerics.gpu.kernels.summary_16bit import summary_of_halves

        return Kernel(summary_of_halves, constants, warps=WARPS, registers=64)
    from driftline.numerics.gpu.kernels.summary import summary_rows

    return Kernel(summary_rows, constants, warps=WARPS, registers=96)


@functools.cache
def _joining() -> Kernel:
    from driftline.numerics.gpu.kernels.summary import joined_rows

    return Kernel(joined_rows, {}, warps=4)


@functools.cache
def _filling() -> Kernel:
    from driftline.numerics.gpu.kernels.summary import sketch_tables

    return Kernel(sketch_tables, {"BLOCK": _TABLE_BLOCK}, warps=4)


def compile_ahead(over: threading.Event) -> None:
    """Compile the kernels of usual tensors while the program loads its model; for a thread.

    Triton needs a second for the first kernel of a process even where all are in its cache, most of
    it to import itself and to hash its own files. No device is woken for it: the thread waits until
    the program uses one, or the capture is over.
    """
    while not torch.cuda.is_initialized():
        if over.wait(_LOOK_EVERY):
            return
    if launcher.why_not():
        return
    try:
        device = torch.cuda.current_device()
        kinds = [kind for name in ("bfloat16", "float32") if (kind := kind_of(name)) is not None]
        for kernel in (_filling(), *(kind.kernel for kind in kinds), _joining()):
            if over.is_set():
                return
            kernel.compile(device)
    except Exception:  # the first launch finds the same reason, and the run says it
        return


def shares(count: int) -> tuple[int, int]:
    """Chunks of a program, and programs, for a tensor of so many numbers."""
    # A program of the kernel reads chunks of 32768 numbers.
    chunks = (count + 32767) >> 15
    per_program = (chunks + MOST_PROGRAMS - 1) // MOST_PROGRAMS or 1
    return per_program, (chunks + per_program - 1) // per_program or 1


class Tables:
    """Signs and places of the sketch, for the groups of the largest tensor so far."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._kept: list[torch.Tensor] = []
        self.groups = 0
        self.index = place.index
        self.signs = self.flips = 0
        self.filled: Mark | None = None
        self.stream = 0

    def reach(self, groups: int) -> None:
        """Have at least so many groups; what was there stays, kernels may be reading it."""
        # Powers of two, so that a growing model seldom needs new tables.
        size = max(_FIRST_TABLE, 1 << (groups - 1).bit_length())
        signs = self._place.empty((size,), torch.int64)
        flips = self._place.empty((size,), torch.int16)
        # Old tables stay: kernels that were launched before may still read them.
        self._kept += [signs, flips]
        _filling()(size // _TABLE_BLOCK, self._place.index, signs.data_ptr(), flips.data_ptr(), 0)
        self.signs, self.flips, self.groups = signs.data_ptr(), flips.data_ptr(), size
        self.filled, self.stream = self._place.mark(), self._place.stream()


class Reading:
    """The reading of tensors of one kind into one sheet, prepared.

    Attributes:
        at: TensorAddress of what the driver is given; 0 where Python launches.
        programs: Rows that it takes.
    """

    __slots__ = ("_launch", "at", "count", "each", "kernel", "programs")

    def __init__(self, kernel: Kernel, count: int, where: tuple[int, int], tables: Tables) -> None:
        self.kernel, self.count = kernel, count
        self.each, self.programs = shares(count)
        self.at = 0
        self._launch: Launch | None = None
        made = kernel.made(tables.index)
        # Without the native launcher Python launches, with the same arguments.
        if made is None or launcher.driver() is None:
            return
        rows, meta = where
        numbers = (0, count, self.each, rows, 0, meta, 0, tables.signs, tables.flips, 0)
        self._launch = Launch(
            made.function,
            launcher.context_of(tables.index),
            self.programs,
            made.threads,
            made.shared,
            (ctypes.c_int64 * NUMBERS)(*numbers),
        )
        self.at = ctypes.addressof(self._launch)


class SummaryBatch:
    """Summaries of tensors of one queue of a device.

    Attributes:
        transfer: Will bring what is taken now.
    """

    def __init__(self, place: Place, tables: Tables) -> None:
        self._place = place
        self._tables = tables
        try:
            self._rows = place.empty((ROWS, 80), torch.float64)
        # On a full device a smaller arena is used, and joined more often.
        except torch.OutOfMemoryError:
            self._rows = place.empty((FEWEST_ROWS, 80), torch.float64)
        self._most = len(self._rows)
        self._meta = place.empty((SLOTS, 2), torch.int64)
        self._results = place.empty((SLOTS, 80), torch.float64)
        self._rows_at, self._meta_at = self._rows.data_ptr(), self._meta.data_ptr()
        self._row = self._joined = self._slot = 0
        self.transfer = SummaryTransfer()
        self._known = 0
        driver = launcher.driver()
        self._launch = driver.launch if driver is not None else _never

    @property
    def waiting(self) -> bool:
        """Whether anything was taken and not sent."""
        return self._slot > 0

    def take(self, tensor: torch.Tensor, kind: Kind, count: int) -> tuple[SummaryTransfer, int]:
        """Launch the reading of a tensor whose elements are in C order, at a word's boundary."""
        tables = self._tables
        # The sketch assigns signs to groups of 64 numbers.
        groups = (count + 63) >> 6
        if groups > tables.groups:
            tables.reach(groups)
        if self._known != tables.groups:
            self._meet_tables()
        per_program, programs = shares(count)
        if self._row + programs > self._most:
            self._join()
        if self._slot >= SLOTS:
            self.send()
        slot = self._slot
        kind.kernel(
            programs,
            self._place.index,
            tensor.data_ptr(),
            count,
            per_program,
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
        return self.transfer, slot

    def reading(self, kind: Kind, count: int) -> Reading:
        """What `take_known` is given, for tensors like the one that was taken just now."""
        return Reading(kind.kernel, count, (self._rows_at, self._meta_at), self._tables)

    def take_known(self, reading: Reading, stream: int, address: int) -> int:
        """Launch the reading of a tensor like one that was taken before.

        Args:
            reading: As prepared then.
            stream: The queue that this batch belongs to.
            address: Of the tensor's elements.

        Returns:
            Its slot; -1 if there is no room for it, or something stands in the way.
        """
        slot, row = self._slot, self._row
        end = row + reading.programs
        # The slow path joins or sends, and comes back.
        if slot >= SLOTS or end > self._most:
            return -1
        if reading.at:
            if self._launch(reading.at, stream, address, row, slot):
                return -1
        else:
            self._launch_in_python(reading, address, row, slot)
        self._row = end
        self._slot = slot + 1
        return slot

    def _launch_in_python(self, reading: Reading, address: int, row: int, slot: int) -> None:
        tables = self._tables
        reading.kernel(
            reading.programs,
            self._place.index,
            address,
            reading.count,
            reading.each,
            self._rows_at,
            row,
            self._meta_at,
            slot,
            tables.signs,
            tables.flips,
            0,
        )

    def send(self) -> None:
        """Join what was taken and start its copy to the host."""
        if not self._slot:
            return
        self._join()
        # Pinned, so that the copy does not wait for the device.
        host = self._host(self._slot * ROW_BYTES).view(torch.float64).view(self._slot, 80)
        # In this queue: the next kernels write to the same results.
        mark = self._place.copy_here([(host, self._results[: self._slot])])
        self.transfer.depart(host, mark)
        self.transfer = SummaryTransfer()
        self._slot = self._joined = 0

    def _host(self, size: int) -> torch.Tensor:
        try:
            return self._place.pinned(size)
        except RuntimeError:  # no more can be pinned: the copy waits for the device then
            return torch.empty(size, dtype=torch.uint8)

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
