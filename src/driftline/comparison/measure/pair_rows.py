"""Rows before anything is measured: who is set against whom, and whether that is possible at all.

Looks at records and recipes only; reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from driftline.alignment.plan import Pair
from driftline.comparison.table.row import FUSION, LOST, NO_METRICS, Basis, Number, Row
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey


def paired(pair: Pair, basis: Basis = "", metrics: Mapping[str, Number] = NO_METRICS) -> Row:
    """The row of a pair, not judged; measured only where its measurements are given."""
    ours, theirs = pair.reference, pair.candidate
    here, there = ours.class_name, theirs.class_name
    row = Row(  # by place, as far as that goes: there are 10^5 of them
        ours.key,
        "unjudged",
        "",
        ours.order,
        *("", "", "", None, None, None),
        pair.by,
        pair.confidence,
        *("", ""),
        here or there,
        "" if here in ("", there) else there,
        ours.dtype,
        theirs.dtype,
        ours.shape,
        theirs.shape,
        pair.line,
        pair.fused,
        pair.culprit,
        basis,
        (),
        metrics,
    )
    if ours.key == theirs.key and pair.reference_recipe is pair.candidate_recipe is None:
        return row
    return _elsewhere(row, pair)


def _elsewhere(row: Row, pair: Pair) -> Row:
    """The row with what the candidate's own address and the recipes add to it."""
    there = pair.candidate.key
    ours, theirs = pair.reference_recipe, pair.candidate_recipe
    return _at(row, there)._replace(
        reference_recipe="" if ours is None else str(ours),
        candidate_recipe="" if theirs is None else str(theirs),
        reference_shape=row.reference_shape if ours is None else ours.shape,
        candidate_shape=row.candidate_shape if theirs is None else theirs.shape,
    )


def _at(row: Row, there: TensorKey) -> Row:
    """The row with the other side's own address, as far as it is another one."""
    here = row.key
    return row._replace(
        candidate_site=there.site if there.site != here.site else "",
        candidate_port=there.port if there.port != here.port else "",
        candidate_slot=there.slot if there.slot != here.slot else "",
        candidate_step=there.step if there.step != here.step else None,
        candidate_visit=there.visit if there.visit != here.visit else None,
        candidate_rank=there.rank if there.rank != here.rank else None,
    )


def inside_of(row: Row, whole: TensorKey) -> Row:
    """The row of a lone tensor that is compared together with others, in what a fused node gives.

    Args:
        row: The row.
        whole: What the node gives, on the other side.
    """
    return _at(row, whole)._replace(by=FUSION)


def clash(pair: Pair) -> str:
    """Why two tensors cannot be set against each other whatever their values; empty if they can."""
    ours, theirs = pair.reference, pair.candidate
    here = ours.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    there = theirs.shape if pair.candidate_recipe is None else pair.candidate_recipe.shape
    if here != there:
        return f"the shapes differ: {_dims(here)} against {_dims(there)}"
    unknown = [name for name in (ours.dtype, theirs.dtype) if name not in DTYPES]
    if unknown:
        return f"the element type {unknown[0]} is not known"
    if (DTYPES[ours.dtype].kind == "complex") != (DTYPES[theirs.dtype].kind == "complex"):
        return f"a complex tensor against a real one: {ours.dtype} against {theirs.dtype}"
    if "bits" in (DTYPES[ours.dtype].kind, DTYPES[theirs.dtype].kind):
        return f"{ours.dtype} and {theirs.dtype} hold bits, not numbers"
    if (
        (ours.placement or theirs.placement)
        and not has_recipe(pair)
        and (lies(ours) != lies(theirs))
    ):
        return (
            f"placed differently: {ours.placement or 'whole'} against {theirs.placement or 'whole'}"
        )
    return ""


def lies(record: Record) -> str:
    """How a part of a tensor lies, without where its rank stands; empty for what is whole.

    A plain tensor that was taken out of a distributed one is what it is.
    """
    text = record.placement
    if text.startswith("local ") or not ("S(" in text or "P(" in text):
        return ""
    return text.partition(" at (")[0]


def has_recipe(pair: Pair) -> bool:
    """Whether elements must be moved or computed; another shape alone needs neither."""
    ours, theirs = pair.reference_recipe, pair.candidate_recipe
    return (ours is not None and not ours.keeps_order) or (
        theirs is not None and not theirs.keeps_order
    )


def lone(record: Record, status: Literal["missing", "extra"], reason: str, line: str = "") -> Row:
    if record.lost:
        reason += f"; {LOST}: {record.lost}"
    row = Row(record.key, status, reason, record.order, class_name=record.class_name, line=line)
    if status == "missing":
        return row._replace(reference_dtype=record.dtype, reference_shape=record.shape)
    return row._replace(candidate_dtype=record.dtype, candidate_shape=record.shape)


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# Pairs of the same bytes under several names: measured once, told of each.


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
