"""Pairs of the same bytes under several names: measured once, told of each."""

from __future__ import annotations

from collections.abc import Sequence

from driftline.alignment.plan import Pair
from driftline.comparison.row import Row
from driftline.comparison.unmeasured import paired
from driftline.runs.record import Record


def repeats_of(pairs: Sequence[Pair]) -> dict[int, list[int]]:
    """First pair of the same bytes → the later ones: a layer's output is the next one's input.

    37 % of a Llama's module dump. Same place and same digest: a place alone says little in memory
    and in foreign files, and a digest alone is only what an index claims.
    """
    first: dict[tuple[object, ...], int] = {}
    repeats: dict[int, list[int]] = {}
    for at, pair in enumerate(pairs):
        if pair.reference_recipe is not None or pair.candidate_recipe is not None:
            continue
        ours = _bytes_of(pair.reference)
        theirs = _bytes_of(pair.candidate) if ours is not None else None
        if theirs is None:
            continue
        place = (ours, theirs)
        earlier = first.setdefault(place, at)
        if earlier != at:
            repeats.setdefault(earlier, []).append(at)
    return repeats


def _bytes_of(record: Record) -> tuple[object, ...] | None:
    if not record.digest or record.blob is None or record.kept != "full":
        return None
    key, blob = record.key, record.blob
    where = (key.rank, key.process, blob.shard, blob.offset, blob.length, record.digest)
    return (*where, record.dtype, record.shape, record.placement)


def repeated(pair: Pair, measured: Row) -> Row:
    """The row of a pair whose bytes were measured under another name."""
    row = paired(pair)
    if measured.status != "unjudged":
        return row._replace(status=measured.status, reason=measured.reason, basis=measured.basis)
    return row.measured(
        measured.basis, measured.metrics, estimated=measured.estimated, reason=measured.reason
    )
