"""Rows before anything is measured: which tensors are compared, and whether that is possible.

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
    reference, candidate = pair.reference, pair.candidate
    reference_class, candidate_class = reference.class_name, candidate.class_name
    row = Row(  # by place, as far as that goes: there are 10^5 of them
        reference.key,
        "unjudged",
        "",
        reference.order,
        *("", "", "", None, None, None),
        pair.by,
        pair.confidence,
        *("", ""),
        reference_class or candidate_class,
        "" if reference_class in ("", candidate_class) else candidate_class,
        reference.dtype,
        candidate.dtype,
        reference.shape,
        candidate.shape,
        pair.line,
        pair.fused,
        pair.culprit,
        basis,
        (),
        metrics,
    )
    if reference.key == candidate.key and pair.reference_recipe is pair.candidate_recipe is None:
        return row
    return _elsewhere(row, pair)


def _elsewhere(row: Row, pair: Pair) -> Row:
    """The row with what the candidate's own address and the recipes add to it."""
    candidate_key = pair.candidate.key
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    # The shapes that are compared are those after the recipes.
    return _at(row, candidate_key)._replace(
        reference_recipe="" if reference_recipe is None else str(reference_recipe),
        candidate_recipe="" if candidate_recipe is None else str(candidate_recipe),
        reference_shape=row.reference_shape if reference_recipe is None else reference_recipe.shape,
        candidate_shape=row.candidate_shape if candidate_recipe is None else candidate_recipe.shape,
    )


def _at(row: Row, other: TensorKey) -> Row:
    """The row with the other side's own address, as far as it is another one."""
    own = row.key
    return row._replace(
        candidate_site=other.site if other.site != own.site else "",
        candidate_port=other.port if other.port != own.port else "",
        candidate_slot=other.slot if other.slot != own.slot else "",
        candidate_step=other.step if other.step != own.step else None,
        candidate_visit=other.visit if other.visit != own.visit else None,
        candidate_rank=other.rank if other.rank != own.rank else None,
    )


def inside_of(row: Row, fused_key: TensorKey) -> Row:
    """The row of a lone tensor that is compared together with others, in what a fused node gives.

    Args:
        row: The row.
        whole: What the node gives, on the other side.
    """
    return _at(row, fused_key)._replace(by=FUSION)


def incompatibility(pair: Pair) -> str:
    """Why two tensors cannot be set against each other whatever their values; empty if they can."""
    reference, candidate = pair.reference, pair.candidate
    reference_shape = (
        reference.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    )
    candidate_shape = (
        candidate.shape if pair.candidate_recipe is None else pair.candidate_recipe.shape
    )
    if reference_shape != candidate_shape:
        return f"the shapes differ: {_dims(reference_shape)} against {_dims(candidate_shape)}"
    # An index of a newer version may name types that this one does not know.
    unknown = [name for name in (reference.dtype, candidate.dtype) if name not in DTYPES]
    if unknown:
        return f"the element type {unknown[0]} is not known"
    if (DTYPES[reference.dtype].kind == "complex") != (DTYPES[candidate.dtype].kind == "complex"):
        return f"a complex tensor against a real one: {reference.dtype} against {candidate.dtype}"
    if "bits" in (DTYPES[reference.dtype].kind, DTYPES[candidate.dtype].kind):
        return f"{reference.dtype} and {candidate.dtype} hold bits, not numbers"
    if (
        (reference.placement or candidate.placement)
        and not has_recipe(pair)
        and (placement_kind(reference) != placement_kind(candidate))
    ):
        return (
            f"placed differently: {reference.placement or 'whole'} against "
            f"{candidate.placement or 'whole'}"
        )
    return ""


def placement_kind(record: Record) -> str:
    """How a part of a tensor is placed, without where its rank stands; empty for what is whole.

    A plain tensor that was taken out of a distributed one is what it is.
    """
    text = record.placement
    # Sharded and partial tensors are parts; a local tensor is complete by itself.
    if text.startswith("local ") or not ("S(" in text or "P(" in text):
        return ""
    return text.partition(" at (")[0]


def has_recipe(pair: Pair) -> bool:
    """Whether elements must be moved or computed; another shape alone needs neither."""
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    return (reference_recipe is not None and not reference_recipe.keeps_order) or (
        candidate_recipe is not None and not candidate_recipe.keeps_order
    )


def lone(record: Record, status: Literal["missing", "extra"], reason: str, line: str = "") -> Row:
    if record.lost:
        # Lost values are counted as unread, which is worse than alone.
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
    for index, pair in enumerate(pairs):
        # What a recipe makes of the same bytes may be something else.
        if pair.reference_recipe is not None or pair.candidate_recipe is not None:
            continue
        reference_bytes = _bytes_of(pair.reference)
        candidate_bytes = _bytes_of(pair.candidate) if reference_bytes is not None else None
        if candidate_bytes is None:
            continue
        place = (reference_bytes, candidate_bytes)
        earlier = first.setdefault(place, index)
        if earlier != index:
            repeats.setdefault(earlier, []).append(index)
    return repeats


def _bytes_of(record: Record) -> tuple[object, ...] | None:
    if not record.digest or record.blob is None or record.kept != "full":
        return None
    key, blob = record.key, record.blob
    # Shape, dtype and placement belong to it: the same bytes may be read in another way.
    where = (key.rank, key.process, blob.shard, blob.offset, blob.length, record.digest)
    return (*where, record.dtype, record.shape, record.placement)


def repeated(pair: Pair, measured: Row) -> Row:
    """The row of a pair whose bytes were measured under another name."""
    row = paired(pair)
    # Why the first could not be measured holds for all of them.
    if measured.status != "unjudged":
        return row._replace(status=measured.status, reason=measured.reason, basis=measured.basis)
    return row.measured(
        measured.basis, measured.metrics, estimated=measured.estimated, reason=measured.reason
    )
