"""Summaries on their way to the host, and what they become there: records, or lines at once.

A flight is one copy of joined rows. The tensors of a call that are like those of the call before
are not described one by one: a group notes their steps and visits, and the lines of an index are
written from it in one go, by a thread that does not hold up the program.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterator

import torch

from driftline.adapters.snapshot import Snapshot
from driftline.adapters.torch.device import native
from driftline.adapters.torch.device.digests import digest_text
from driftline.adapters.torch.device.places import Mark
from driftline.numerics.fields import Summary
from driftline.runs.key import TensorKey
from driftline.runs.lines import encode_line, line_ends
from driftline.runs.record import Kept, Record

ROW_BYTES = 640


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

    def row_at(self, slot: int) -> int:
        """Where the row of a slot lies in host memory; only after its arrival."""
        assert self._host is not None
        return self._host.data_ptr() + slot * ROW_BYTES

    def result(self, slot: int, count: int, width: int) -> tuple[str, Summary]:
        """Digest and summary of the tensor in a slot; only after its arrival."""
        if not self._rows and self._host is not None:
            self._rows = self._host.tolist()
            self._digests = self._host[:, 9:11].view(torch.int64).tolist()
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


class Constant:
    """What the records of one place have in common, as a record and as words of a line.

    Attributes:
        record: One of them, of step 0 and visit 0, without digest and summary.
        count: Numbers in the tensor; two for each complex element.
        width: Bytes of a number.
        at: Address of the words.
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
        self._words = native.Words(head, tail, len(head), len(tail), self.count, width, brief)
        self.at = ctypes.addressof(self._words)

    def recorded(
        self, step: int, visit: int, digest: str = "", summary: Summary | None = None
    ) -> Record:
        """The record of one of them."""
        one = self.record
        site, port, slot, _, _, rank, process, phase, moment = one.key
        key = TensorKey(site, port, slot, step, visit, rank, process, phase, moment)
        kept = summary if one.kept == "summary" else None
        return Record(key, *one[1:8], digest, None, 1, kept)


class Group:
    """Tensors in consecutive slots of a flight, each like one that came before.

    Attributes:
        flight: Brings their summaries.
    """

    def __init__(self, flight: Flight, first: int) -> None:
        self.flight = flight
        self._first = first
        self._constants: list[Constant] = []
        self._notes: array[int] = array("q")

    def add(self, constant: Constant, step: int, visit: int) -> None:
        self._constants.append(constant)
        self._notes.extend((constant.at, step, visit))

    def __len__(self) -> int:
        return len(self._constants)

    @property
    def dtypes(self) -> set[str]:
        return {constant.record.dtype for constant in self._constants}

    def described(self) -> Iterator[Record]:
        """The records without what the flight brings."""
        notes = self._notes
        for i, constant in enumerate(self._constants):
            yield constant.recorded(notes[3 * i + 1], notes[3 * i + 2])

    def records(self) -> Iterator[Record]:
        """The records; only after the flight's arrival."""
        notes = self._notes
        for i, constant in enumerate(self._constants):
            found = self.flight.result(self._first + i, constant.count, constant.width)
            yield constant.recorded(notes[3 * i + 1], notes[3 * i + 2], *found)

    def lines(self, order: int) -> bytes:
        """Their index lines; only after the flight's arrival."""
        text = native.lines(self._notes, self.flight.row_at(self._first), order)
        if text is not None:
            return text
        made = [
            encode_line(record, order + i, record.digest, None, "")
            for i, record in enumerate(self.records())
        ]
        return "\n".join([*made, ""]).encode("ascii", "replace")
