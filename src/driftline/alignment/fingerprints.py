"""Do two tensors look alike? Asked only where order and shape leave a tie.

A fingerprint that decided more would hide the very faults that are looked for: swapped q and k have
each other's values. So nothing here ever overrides what structure says.
"""

from __future__ import annotations

import math

from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.records import Record
from driftline.runs.run import Run

# Two percent: low-precision runs of one layer stay within it, different layers rarely do.
_CLOSE = 0.02
_LARGEST = 1 << 26
"""Elements of a tensor that is read for a tie; a larger one settles none."""


class Looks:
    """Summaries of the tensors of two runs, read or computed once each."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._known: dict[tuple[int, int], Summary | None] = {}

    def alike(self, ours: Record | None, theirs: Record | None) -> bool:
        """Whether two tensors are the same or nearly; False where nothing is known."""
        if ours is None or theirs is None:
            return False
        # Equal digests need no values. The type must be equal too, because a digest is of
        # bytes.
        if ours.digest and ours.digest == theirs.digest and ours.dtype == theirs.dtype:
            return True
        here, there = self._summary(0, ours), self._summary(1, theirs)
        if here is None or there is None:
            return False
        scale = max(abs(here.l2), abs(there.l2))
        # With a NaN or an infinity in it, a norm says nothing about the other tensor.
        if not math.isfinite(scale):
            return False
        return (
            abs(here.l2 - there.l2) <= _CLOSE * scale
            and _near(here.min, there.min, scale)
            and _near(here.max, there.max, scale)
        )

    def _summary(self, side: int, record: Record) -> Summary | None:
        if record.summary is not None:
            return record.summary
        # By identity: a view may hold several records of one key.
        place = (side, id(record))
        if place not in self._known:
            self._known[place] = self._read(self._runs[side], record)
        return self._known[place]

    def _read(self, run: Run, record: Record) -> Summary | None:
        count = math.prod(record.shape)
        if record.kept != "full" or record.dtype not in DTYPES or not 0 < count <= _LARGEST:
            return None
        try:
            return kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
        except (DriftlineError, OSError, ValueError):
            return None  # what cannot be read settles no tie; comparing it will say why


def _near(ours: float, theirs: float, scale: float) -> bool:
    return abs(ours - theirs) <= _CLOSE * max(abs(ours), abs(theirs), scale * 1e-3)
