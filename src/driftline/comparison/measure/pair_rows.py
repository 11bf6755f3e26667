"""Rows before measuring: which tensors are compared, and whether a comparison is possible.

This file looks at records and recipes only, and reads no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from driftline.alignment.plan import Pair
from driftline.comparison.table.row import FUSION, LOST, NO_METRICS, Basis, Number, Row
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey


def paired(pair: Pair, basis: Basis = "", metrics: Mapping[str, Number] = NO_METRICS) -> Row:
    """Return the unjudged row of a pair, with the given measurements."""
    reference, candidate = pair.reference, pair.candidate
    reference_class, candidate_class = reference.class_name, candidate.class_name
    row = Row(  # by position, for speed: there are 10^5 rows
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
    """Return the row with the candidate's own address and the recipes."""
    candidate_key = pair.candidate.key
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    # The compared shapes are those after the recipes.
    return _at(row, candidate_key)._replace(
        reference_recipe="" if reference_recipe is None else str(reference_recipe),
        candidate_recipe="" if candidate_recipe is None else str(candidate_recipe),
        reference_shape=row.reference_shape if reference_recipe is None else reference_recipe.shape,
        candidate_shape=row.candidate_shape if candidate_recipe is None else candidate_recipe.shape,
    )


def _at(row: Row, other: TensorKey) -> Row:
    """Return the row with the parts of the other side's address that differ."""
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
    """Return the row of a tensor without a partner that is compared as part of a fused node.

    Args:
        row: The row.
        fused_key: Key of the fused node's result, on the other side.
    """
    return _at(row, fused_key)._replace(by=FUSION)


def incompatibility(pair: Pair) -> str:
    """Return why two tensors cannot be compared, whatever their values; empty if they can."""
    reference, candidate = pair.reference, pair.candidate
    reference_shape = (
        reference.shape if pair.reference_recipe is None else pair.reference_recipe.shape
    )
    candidate_shape = (
        candidate.shape if pair.candidate_recipe is None else pair.candidate_recipe.shape
    )
    if reference_shape != candidate_shape:
        return f"the shapes differ: {_dims(reference_shape)} against {_dims(candidate_shape)}"
    # An index of a newer version may name types that are unknown here.
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
    """Return how a part of a tensor is placed, without its rank; empty for a whole tensor.

    A plain tensor taken from a distributed one counts as whole.
    """
    text = record.placement
    # Sharded and partial tensors are parts; a local tensor is complete in itself.
    if text.startswith("local ") or not ("S(" in text or "P(" in text):
        return ""
    return text.partition(" at (")[0]


def has_recipe(pair: Pair) -> bool:
    """Return whether elements must be moved or computed; a change of shape alone needs neither."""
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    return (reference_recipe is not None and not reference_recipe.keeps_order) or (
        candidate_recipe is not None and not candidate_recipe.keeps_order
    )


def lone(record: Record, status: Literal["missing", "extra"], reason: str, line: str = "") -> Row:
    if record.lost:
        # Lost values also count as unread, which is worse than a missing partner.
        reason += f"; {LOST}: {record.lost}"
    row = Row(record.key, status, reason, record.order, class_name=record.class_name, line=line)
    if status == "missing":
        return row._replace(reference_dtype=record.dtype, reference_shape=record.shape)
    return row._replace(candidate_dtype=record.dtype, candidate_shape=record.shape)


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# Pairs of the same bytes under several names, which are measured only once.


def repeats_of(pairs: Sequence[Pair]) -> dict[int, list[int]]:
    """Return, by the first pair of the same bytes, the later ones.

    A layer's output is the next one's input, so these are 37 % of a Llama's module dump. Both the
    place and the digest must be equal: the place alone proves little in memory and in foreign
    files, and the digest alone is only a claim of the index.
    """
    first: dict[tuple[object, ...], int] = {}
    repeats: dict[int, list[int]] = {}
    for index, pair in enumerate(pairs):
        # A recipe may turn the same bytes into something else.
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
    # Shape, dtype and placement are included, because they determine how the bytes are read.
    where = (key.rank, key.process, blob.shard, blob.offset, blob.length, record.digest)
    return (*where, record.dtype, record.shape, record.placement)


def repeated(pair: Pair, measured: Row) -> Row:
    """Return the row of a pair whose bytes were measured under another name."""
    row = paired(pair)
    # The reason why the first pair could not be measured holds for all of them.
    if measured.status != "unjudged":
        return row._replace(status=measured.status, reason=measured.reason, basis=measured.basis)
    return row.measured(
        measured.basis, measured.metrics, estimated=measured.estimated, reason=measured.reason
    )
