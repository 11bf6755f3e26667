"""Which operators of a comparison compute with integers on one side and with floats on the other.

Read off the rows: an integer that a recipe made numbers of, one that stands against a float without
a scale, and a lone one at a site whose partner has a float of its sizes instead. Says nothing of
limits.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.comparison.row import Row
from driftline.comparison.table import is_kept
from driftline.numerics.dtypes import DTYPES
from driftline.tolerance.defaults import QUANTISED

_CODES = ("int8", "int4", "uint4")
"""Integers that beside floats are codes; wider ones are ids and lengths as well."""

_Call = tuple[int, int, int, str]
_Sizes = tuple[int, ...]


def quantised_row(row: Row) -> str:
    """The integer type that a recipe made numbers of; empty when there is none."""
    for dtype, recipe in (
        (row.reference_dtype, row.reference_recipe),
        (row.candidate_dtype, row.candidate_recipe),
    ):
        if "dequantise" in recipe and "unpack" in recipe:
            return "int8" if "unpack(axis 0, 0:4)" in recipe else "int4"  # codes to a word
        if dtype in QUANTISED and "dequantise" in recipe:
            return dtype
    return ""


class Quantised:
    """The reference's sites that are quantised on one side, by step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._known: dict[_Call, str] = {}
        if is_kept(rows) and not rows.has_recipes and rows.dtypes.isdisjoint(_CODES):
            return
        codes: dict[_Call, list[tuple[_Sizes, str]]] = {}  # lone integers, by their own side's site
        floats: dict[_Call, set[_Sizes]] = {}
        extra: list[Row] = []
        for row in rows:
            if row.status == "extra":
                extra.append(row)
            elif row.status == "missing":
                _sort(row.reference_dtype, row.reference_shape, row, _ours(row), codes, floats)
            elif found := quantised_row(row) or _against_float(row):
                self._known.setdefault(_ours(row), found)
        if not codes and not any(row.candidate_dtype in _CODES for row in extra):
            return
        partner: dict[_Call, _Call] = {}
        for row in rows:
            if row.status not in ("extra", "missing"):
                partner.setdefault(_theirs(row), _ours(row))
        their_codes: dict[_Call, list[tuple[_Sizes, str]]] = {}
        their_floats: dict[_Call, set[_Sizes]] = {}
        for row in extra:
            _sort(
                row.candidate_dtype,
                row.candidate_shape,
                row,
                partner.get(_ours(row)),
                their_codes,
                their_floats,
            )
        for integers, others in ((codes, their_floats), (their_codes, floats)):
            for call, found in integers.items():
                for sizes, dtype in found:
                    if sizes in others.get(call, ()):
                        self._known.setdefault(call, dtype)

    def at(self, row: Row) -> str:
        """The integer type of a row's own site; empty for an ordinary one."""
        return self._known.get(_ours(row), "") if self._known else ""


def _sort(
    dtype: str,
    shape: _Sizes | None,
    row: Row,
    call: _Call | None,
    codes: dict[_Call, list[tuple[_Sizes, str]]],
    floats: dict[_Call, set[_Sizes]],
) -> None:
    """Put a lone matrix where it belongs; whole numbers of one axis are no operand."""
    if call is None or shape is None or len(shape) < 2 or "mask" in row.key.slot:
        return
    sizes = tuple(sorted(shape))  # weights may lie transposed
    if dtype in _CODES:
        codes.setdefault(call, []).append((sizes, dtype))
    elif dtype in DTYPES and DTYPES[dtype].is_floating:
        floats.setdefault(call, set()).add(sizes)


def _against_float(row: Row) -> str:
    """Codes that stand against a float and could not be made numbers, for want of a scale."""
    here, there = row.reference_dtype, row.candidate_dtype
    if row.status != "incomparable" or "mask" in row.key.slot:
        return ""
    for code, other in ((here, there), (there, here)):
        if code in _CODES and other in DTYPES and DTYPES[other].is_floating:
            return code
    return ""


def _ours(row: Row) -> _Call:
    return (row.key.rank, row.key.process, row.key.step, row.key.site)


def _theirs(row: Row) -> _Call:
    key = row.key
    return (
        key.rank if row.candidate_rank is None else row.candidate_rank,
        key.process,
        key.step if row.candidate_step is None else row.candidate_step,
        row.candidate_site or key.site,
    )
