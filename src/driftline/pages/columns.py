"""Rows of a table as columns of a page: text by code, figures as arrays (docs/report-format.md).

Knows the three forms of a column and which fields of a row a reader of a page needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from driftline.comparison.row import Row
from driftline.comparison.storage import metric_names
from driftline.comparison.table import Table
from driftline.pages.packing import Array, singles

Column = dict[str, Any]

_TEXT: dict[str, Callable[[Row], str]] = {
    "site": lambda row: row.key.site,
    "port": lambda row: row.key.port,
    "slot": lambda row: row.key.slot,
    "phase": lambda row: row.key.phase,
    "moment": lambda row: row.key.moment,
    "status": lambda row: row.status,
    "reason": lambda row: row.reason,
    "candidate_site": lambda row: row.candidate_site,
    "candidate_port": lambda row: row.candidate_port,
    "candidate_slot": lambda row: row.candidate_slot,
    "by": lambda row: row.by,
    "reference_recipe": lambda row: row.reference_recipe,
    "candidate_recipe": lambda row: row.candidate_recipe,
    "class": lambda row: row.class_name,
    "candidate_class": lambda row: row.candidate_class,
    "reference_dtype": lambda row: row.reference_dtype,
    "candidate_dtype": lambda row: row.candidate_dtype,
    "reference_shape": lambda row: _dims(row.reference_shape),
    "candidate_shape": lambda row: _dims(row.candidate_shape),
    "line": lambda row: row.line,
    "fused": lambda row: row.fused,
    "culprit": lambda row: row.culprit,
    "basis": lambda row: row.basis,
    "estimated": lambda row: " ".join(row.estimated),
    "decided_by": lambda row: row.decided_by,
    "limit_from": lambda row: row.limit_from,
}
_NUMBERS: dict[str, Callable[[Row], float | int | None]] = {
    "step": lambda row: row.key.step,
    "rank": lambda row: row.key.rank,
    "visit": lambda row: row.key.visit,
    "process": lambda row: row.key.process,
    "order": lambda row: row.order,
    "candidate_step": lambda row: row.candidate_step,
    "candidate_visit": lambda row: row.candidate_visit,
    "candidate_rank": lambda row: row.candidate_rank,
    "confidence": lambda row: row.confidence,
    "limit": lambda row: row.limit,
    "severity": lambda row: row.severity,
}


def row_columns(table: Table) -> dict[str, Any]:
    """All rows of a table: their number, their fields and their metrics, by column."""
    rows = table.rows
    columns = {name: words([get(row) for row in rows]) for name, get in _TEXT.items()}
    columns |= {name: numbers([get(row) for row in rows]) for name, get in _NUMBERS.items()}
    metrics = {
        name: numbers([row.metrics.get(name) for row in rows]) for name in metric_names(table)
    }
    return {"count": len(rows), "columns": columns, "metrics": metrics}


def words(values: Sequence[str]) -> Column:
    """A column of text.

    >>> words(["a", "a"])
    {'same': 'a', 'n': 2}
    """
    codes: dict[str, int] = {}
    places = [codes.setdefault(value, len(codes)) for value in values]
    if len(codes) <= 1:
        return {"same": next(iter(codes), None), "n": len(values)}
    return {"words": list(codes), "codes": np.asarray(places, np.uint32).astype(_code(len(codes)))}


def numbers(values: Sequence[float | int | None]) -> Column:
    """A column of figures, some of which may be absent; NaN is a figure.

    >>> numbers([None, None])
    {'same': None, 'n': 2}
    """
    first = values[0] if values else None
    # `is`, because NaN is not equal to itself, and 1 is equal to True.
    if all(value is first or value == first for value in values):
        return {"same": first, "n": len(values)}
    if None not in values:
        return {"numbers": _narrow(cast("Sequence[float | int]", values)), "absent": None}
    absent = np.fromiter((value is None for value in values), np.bool_, len(values))
    filled = [0 if value is None else value for value in values]
    return {"numbers": _narrow(filled), "absent": absent.astype(np.uint8)}


def figures(values: Mapping[str, Array]) -> dict[str, Column]:
    """Columns of arrays that are there already; NaN stands for what is absent."""
    shown: dict[str, Column] = {}
    for name, array in values.items():
        known = array.dtype.kind != "f" or not bool(np.isnan(array).all())
        if not known:
            shown[name] = {"same": None, "n": int(array.size)}
            continue
        stored = singles(array) if array.dtype.kind == "f" else array
        shown[name] = {"numbers": stored, "absent": None}
    return shown


def _narrow(values: Sequence[float | int]) -> Array:
    if all(isinstance(value, int) for value in values):
        low, high = min(values), max(values)
        if low >= -(1 << 31) and high < 1 << 31:
            return np.asarray(values, np.int32)
        return np.asarray([float(value) for value in values], np.float64)
    return singles(np.asarray(values, np.float64))


def _code(count: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32


def _dims(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return ""
    return "x".join(map(str, shape)) or "scalar"
