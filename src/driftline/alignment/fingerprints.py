"""Fingerprints: are two tensors close in norm, minimum and maximum?

Asked only where order and shape leave a tie. A fingerprint that decided more would hide the faults
that the comparison looks for: a swapped q and k have each other's values. Nothing in this file
overrides what structure says.
"""

from __future__ import annotations

import math

from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.records import Record
from driftline.runs.run import Run

# Relative difference that counts as close: wider than the noise of half precision.
_CLOSE = 0.02
_LARGEST = 1 << 26
"""Most elements of a tensor that is read to break a tie; a larger tensor breaks none."""


class Fingerprints:
    """Summaries of the tensors of two runs; each is read or computed once."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._summaries: dict[tuple[int, int], Summary | None] = {}

    def alike(self, reference: Record | None, candidate: Record | None) -> bool:
        """Whether two tensors are equal or close; False where their values are not known."""
        if reference is None or candidate is None:
            return False
        # Equal digests need no values. The type must be equal too, because a digest is of
        # bytes.
        if (
            reference.digest
            and reference.digest == candidate.digest
            and reference.dtype == candidate.dtype
        ):
            return True
        reference_summary, candidate_summary = (
            self._summary(0, reference),
            self._summary(1, candidate),
        )
        if reference_summary is None or candidate_summary is None:
            return False
        scale = max(abs(reference_summary.l2), abs(candidate_summary.l2))
        # With a NaN or an infinity in it, a norm says nothing about the other tensor.
        if not math.isfinite(scale):
            return False
        return (
            abs(reference_summary.l2 - candidate_summary.l2) <= _CLOSE * scale
            and _near(reference_summary.min, candidate_summary.min, scale)
            and _near(reference_summary.max, candidate_summary.max, scale)
        )

    def _summary(self, side: int, record: Record) -> Summary | None:
        if record.summary is not None:
            return record.summary
        # By identity, which is cheaper than hashing a key of nine fields.
        place = (side, id(record))
        if place not in self._summaries:
            self._summaries[place] = self._read(self._runs[side], record)
        return self._summaries[place]

    def _read(self, run: Run, record: Record) -> Summary | None:
        count = math.prod(record.shape)
        if record.kept != "full" or record.dtype not in DTYPES or not 0 < count <= _LARGEST:
            return None
        try:
            return kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
        except (DriftlineError, OSError, ValueError):
            return None  # what cannot be read settles no tie; comparing it will say why


def _near(reference: float, candidate: float, scale: float) -> bool:
    return abs(reference - candidate) <= _CLOSE * max(abs(reference), abs(candidate), scale * 1e-3)
