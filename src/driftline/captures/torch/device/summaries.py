# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Summaries of device tensors: computed by kernels, joined, and copied to the host together.

For each tensor a kernel writes one or more rows, which a second kernel joins into one. A batch
collects the rows; a transfer is one copy of joined rows to the host. Tensors of the same kind as
those of the previous call have no record of their own: a group stores their steps and visits, and
the sink writes the index lines of the whole group at once.
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

# A row is 80 numbers of 8 bytes: nine figures, then two of the digest; the sketch begins at 16.
ROW_BYTES = 640


class SummaryTransfer:
    """One copy to the host, which contains the summaries of several tensors.

    Attributes:
        mark: Is reached when the copy has arrived; None before it is started.
        there: Whether the mark is known to be reached.
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
        """Host address of a slot's row; only after the transfer's arrival."""
        assert self._host is not None
        return self._host.data_ptr() + slot * ROW_BYTES

    def digest(self, slot: int) -> bytes | None:
        """The digest of the tensor in a slot; None if it is not known to have arrived."""
        if not self.there and self.mark is not None:
            try:
                self.there = self.mark.query()
            except RuntimeError:  # a graph is being recorded, or the device has failed
                return None
        if not self.there:
            return None
        return ctypes.string_at(self.row_at(slot) + 9 * 8, 16)

    def result(self, slot: int, count: int, width: int) -> tuple[str, Summary]:
        """Digest and summary of the tensor in a slot; only after the transfer's arrival."""
        # All slots are converted together, because each conversion has a fixed cost.
        if not self._rows and self._host is not None:
            self._rows = self._host.tolist()
            # The digest is two integers, stored in the bits of two numbers.
            self._digests = self._host[:, 9:11].view(torch.int64).tolist()
        row = self._rows[slot]
        finite, mean, spread, low, high, zeros, nans, above, below = row[:9]
        a, b = self._digests[slot]
        # `spread` is the sum of squared deviations, which the kernels compute as Welford does.
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
    """The common parts of the records of one place, as a record and as parts of an index line.

    Attributes:
        record: A record with step 0 and visit 0, without digest and summary.
        count: Number of elements of the tensor.
        width: Bytes of an element.
        at: Memory address of the line's parts, for the C library.
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
        """The record of one tensor."""
        template = self.record
        site, port, slot, _, _, rank, process, phase, moment = template.key
        key = TensorKey(site, port, slot, step, visit, rank, process, phase, moment)
        kept = summary if template.kept == "summary" else None
        return Record(key, *template[1:8], digest, None, 1, kept)


class Group:
    """Tensors that are like earlier ones and whose summaries arrive in one transfer.

    Occurrences of the same tensor share a slot.

    Attributes:
        transfer: Contains their summaries.
    """

    def __init__(self, transfer: SummaryTransfer) -> None:
        self.transfer = transfer
        self._constants: list[Constant] = []
        self._notes: array[int] = array("q")

    def add(self, constant: Constant, step: int, visit: int, slot: int) -> None:
        self._constants.append(constant)
        # Only four integers are stored instead of a record, because this runs for every tensor.
        self._notes.extend((constant.at, step, visit, slot))

    def __len__(self) -> int:
        return len(self._constants)

    @property
    def dtypes(self) -> set[str]:
        return {constant.record.dtype for constant in self._constants}

    def described(self) -> Iterator[Record]:
        """The records without digests and summaries."""
        for constant, step, visit, _ in self._noted():
            yield constant.recorded(step, visit)

    def records(self) -> Iterator[Record]:
        """The records; only after the transfer's arrival."""
        for constant, step, visit, slot in self._noted():
            result = self.transfer.result(slot, constant.count, constant.width)
            yield constant.recorded(step, visit, *result)

    def lines(self, order: int) -> bytes:
        """The index lines; only after the transfer's arrival.

        Args:
            order: The order number of the first record.
        """
        text = launcher.lines(self._notes, self.transfer.row_at(0), order)
        # Without the C library the same lines are made in Python, which is slower.
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


# Rows on the device, which are joined and copied to the host together.


ROWS = 32768
"""Number of rows in a batch's arena; when they are used up, they are joined."""
FEWEST_ROWS = 2048
"""Number of rows if memory is short: a megabyte, still enough for the largest tensor."""
SLOTS = 1024
"""Largest number of tensors in one transfer."""
MOST_PROGRAMS = 1024
_FIRST_TABLE = 1 << 16
_LOOK_EVERY = 0.05
_TABLE_BLOCK = 1024


def _never(*_: int) -> int:
    """The launch function if there is no driver; it always fails."""
    return -1


class Kind(NamedTuple):
    """How tensors of one dtype are reduced.

    Attributes:
        kernel: The kernel that reads them.
        reals: Numbers per element: two for complex dtypes, otherwise one.
        width: Bytes of a number.
    """

    kernel: Kernel
    reals: int
    width: int


@functools.cache
def kind_of(name: str) -> Kind | None:
    """How elements of a dtype are reduced; None if only the host can do it."""
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

        return Kernel(summary_of_halves, constants, warps=WARPS, registers=128)
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
    """Compile the kernels of the usual dtypes in a thread, while the program loads its model.

    Triton needs a second for the first kernel of a process, even if all kernels are in its cache:
    most of the time it imports itself and hashes its own files. No device is initialised: the
    thread waits until the program uses one.

    Args:
        over: Set when the capture ends; the thread then stops.
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
    except Exception:  # the first launch fails for the same reason and reports it
        return


def shares(count: int) -> tuple[int, int]:
    """Chunks per program, and number of programs, for a tensor of `count` numbers."""
    # A program of the kernel reads chunks of 32768 numbers each.
    chunks = (count + 32767) >> 15
    per_program = (chunks + MOST_PROGRAMS - 1) // MOST_PROGRAMS or 1
    return per_program, (chunks + per_program - 1) // per_program or 1


class Tables:
    """The tables of the sketch on one device, long enough for the largest tensor so far.

    Attributes:
        groups: Number of groups of 64 numbers for which the tables have entries.
        signs: Address of the table of signs.
        flips: Address of the table of XORs.
        filled: Is reached when the tables are filled.
        stream: The stream in which they are filled.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._kept: list[torch.Tensor] = []
        self.groups = 0
        self.index = place.index
        self.signs = self.flips = 0
        self.filled: Mark | None = None
        self.stream = 0

    def reach(self, groups: int) -> None:
        """Make new tables for at least this many groups."""
        # Sizes are powers of two, so that new tables are seldom needed.
        size = max(_FIRST_TABLE, 1 << (groups - 1).bit_length())
        signs = self._place.empty((size,), torch.int64)
        flips = self._place.empty((size,), torch.int16)
        # Old tables are kept, because kernels launched earlier may still read them.
        self._kept += [signs, flips]
        _filling()(size // _TABLE_BLOCK, self._place.index, signs.data_ptr(), flips.data_ptr(), 0)
        self.signs, self.flips, self.groups = signs.data_ptr(), flips.data_ptr(), size
        self.filled, self.stream = self._place.mark(), self._place.stream()


class Reading:
    """A prepared launch of the summary kernel, for tensors of one dtype and size.

    Attributes:
        at: Memory address of the launch's arguments for the C library; 0 if Python launches.
        programs: Number of programs, each of which writes one row.
    """

    __slots__ = ("_launch", "at", "count", "each", "kernel", "programs")

    def __init__(self, kernel: Kernel, count: int, where: tuple[int, int], tables: Tables) -> None:
        self.kernel, self.count = kernel, count
        self.each, self.programs = shares(count)
        self.at = 0
        self._launch: Launch | None = None
        made = kernel.made(tables.index)
        # Without the C library Python launches the kernel, with the same arguments.
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
    """Summaries of tensors in one stream of a device.

    Attributes:
        transfer: The next transfer, which will contain the summaries taken now.
    """

    def __init__(self, place: Place, tables: Tables) -> None:
        self._place = place
        self._tables = tables
        try:
            self._rows = place.empty((ROWS, 80), torch.float64)
        # On a full device the arena is smaller and is joined more often.
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
        """Whether summaries were taken but not sent."""
        return self._slot > 0

    def take(self, tensor: torch.Tensor, kind: Kind, count: int) -> tuple[SummaryTransfer, int]:
        """Launch the summary of a tensor.

        Args:
            tensor: A contiguous tensor whose address is a multiple of 16.
            kind: How its dtype is reduced.
            count: Its number of numbers.

        Returns:
            The transfer that will contain the summary, and its slot.
        """
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
        """A prepared launch for `take_known`; call it just after `take` of such a tensor."""
        return Reading(kind.kernel, count, (self._rows_at, self._meta_at), self._tables)

    def take_known(self, reading: Reading, stream: int, address: int) -> int:
        """Launch the summary of a tensor of the same dtype and size as an earlier one.

        Args:
            reading: The launch prepared for the earlier one.
            stream: The stream to which this batch belongs.
            address: Address of the tensor's elements.

        Returns:
            Its slot; -1 if there is no room for it, or the launch is not possible.
        """
        slot, row = self._slot, self._row
        end = row + reading.programs
        # `take` then joins or sends first.
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
        """Join the rows and start their copy to the host."""
        if not self._slot:
            return
        self._join()
        # Host memory is pinned, so that the program does not wait for the copy.
        host = self._host(self._slot * ROW_BYTES).view(torch.float64).view(self._slot, 80)
        # The copy is made in this stream, because the next kernels overwrite the results.
        mark = self._place.copy_here([(host, self._results[: self._slot])])
        self.transfer.depart(host, mark)
        self.transfer = SummaryTransfer()
        self._slot = self._joined = 0

    def _host(self, size: int) -> torch.Tensor:
        try:
            return self._place.pinned(size)
        except RuntimeError:  # no more memory can be pinned; the program will wait for the copy
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
        """Make this stream wait for tables that are filled in another stream."""
        tables = self._tables
        if tables.filled is not None and tables.stream != self._place.stream():
            wait = getattr(tables.filled, "wait", None)
            if wait is not None:
                wait()
        self._known = tables.groups
