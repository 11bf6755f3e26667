"""Pairs of which a side has no values: what digests and summaries can still say, or why nothing."""

from __future__ import annotations

import math

from driftline.alignment.plan import Pair
from driftline.comparison.row import LOST, Row
from driftline.comparison.summaries import (
    ESTIMATED,
    FROM_STATISTICS,
    from_statistics,
    measure_summaries,
)
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.record import Record
from driftline.runs.run import Run

_SAME = {"relative_l2": 0.0, "cosine": 1.0, "max_abs_error": 0.0, "different": 0, "one_sided": 0}


def row_without_values(reference: Run, candidate: Run, pair: Pair, row: Row) -> Row:
    """A pair of which at least one side has no values: by digest, by summary, or not at all."""
    ours, theirs = pair.reference, pair.candidate
    known_apart = _digests(ours, theirs)
    if known_apart is False:
        return row.measured("digest", dict(_SAME))
    here, there = summary_of(reference, ours), summary_of(candidate, theirs)
    lost = reference.lost(ours) or candidate.lost(theirs)
    if lost and (here is None or there is None):
        return row._replace(status="incomparable", reason=f"{LOST}: {lost}")
    exact = not DTYPES[ours.dtype].is_floating
    if known_apart and (exact or here is None or there is None):
        return row._replace(
            basis="digest",
            status="fail",
            reason="the bytes differ; the values were not kept, so how much is not known",
            severity=math.inf,
        )
    if here is not None and there is not None:
        found = measure_summaries(here, there)
        remark = FROM_STATISTICS if from_statistics(here, there) else ""
        return row.measured("summary", found, estimated=ESTIMATED, reason=remark)
    kept = " and ".join(dict.fromkeys((ours.kept, theirs.kept)))
    why = f"nothing of it can be compared: kept as {kept}"
    if "describe" in kept:
        why += "; shapes agree" + (", dtypes too" if ours.dtype == theirs.dtype else "")
    elif ours.dtype != theirs.dtype:
        why += f"; digests of {ours.dtype} and {theirs.dtype} say nothing about each other"
    return row._replace(status="incomparable", reason=why, basis="describe")


def _digests(ours: Record, theirs: Record) -> bool | None:
    """True when digests prove the bytes different, False the same, None when they cannot say."""
    if not ours.digest or not theirs.digest or ours.dtype != theirs.dtype:
        return None
    if "sample" in (ours.kept, theirs.kept) and (
        ours.kept != theirs.kept or ours.sample_stride != theirs.sample_stride
    ):
        return None
    if ours.digest.partition(":")[0] != theirs.digest.partition(":")[0]:
        return None
    return ours.digest != theirs.digest


def summary_of(run: Run, record: Record) -> Summary | None:
    """The summary that was kept, or one made now from values that were."""
    if record.summary is not None:
        return record.summary
    if record.kept == "full" and not run.lost(record):
        count = math.prod(record.shape)
        return kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
    return None
