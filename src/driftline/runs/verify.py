"""Verification: are the bytes of a run still those that were captured?

It computes digests again and compares them with those of the index. It does not know why bytes
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from driftline.errors import DriftlineError
from driftline.numerics.kernel import digest as digest_of
from driftline.runs.records import Record
from driftline.runs.run import Loss, Run, Storage

_CLASH = "its bytes have digest"


def verify(run: Run) -> Iterator[Loss]:
    """Yield every tensor whose values cannot be read or do not match the stored digest.

    Tensors whose digest cannot be computed on this machine are reported as not verified. Tensors
    without stored values are skipped. Shared bytes are read once.
    """
    seen: dict[tuple[object, ...], str] = {}
    for tensor in run.tensors():
        record = tensor.record
        if record.kept not in ("full", "sample") or not record.digest:
            continue
        if record.blob is None and not record.lost:
            continue
        # Tensors with the same bytes share a blob, and weights repeat in every step.
        place = (record.key.rank, record.key.process, record.blob, record.digest)
        reason = seen.get(place)
        if reason is None or record.lost:
            try:
                reason = _clash(tensor.raw(), record.digest)
            except DriftlineError as error:
                reason = str(error)
            seen[place] = reason
        if reason:
            yield Loss(str(record.key), reason, record.key)


def is_damaged(raw: Storage, record: Record) -> bool:
    """Whether values do not match their captured digest; False if that cannot be checked."""
    return bool(record.digest) and _clash(raw, record.digest).startswith(_CLASH)


def _clash(raw: Storage, expected: str) -> str:
    data = raw.view(np.uint8)
    algorithm = expected.partition(":")[0]
    computed = digest_of(data)
    # The kernel computes one kind of digest here; blake2b-128 can be computed everywhere.
    if computed.partition(":")[0] != algorithm:
        if algorithm != "blake2b-128":
            return f"not verified: digest {algorithm} cannot be computed here"
        computed = "blake2b-128:" + hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
    return "" if computed == expected else f"{_CLASH} {computed}, not {expected}"
