"""Reads the JSON of `driftline opcheck` as a comparison of operators with their definitions.

One row per output. The metric is the share of elements within their bound; nothing is computed
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from driftline.comparison.table.row import Column, Row, Status, Verdict
from driftline.comparison.table.table import Side, Table
from driftline.errors import BadFile
from driftline.runs.records import Phase, TensorKey, usual_moment

FORMAT = "driftline-operators/1"
KIND = "operators"
"""The kind of such a table, so that it is not read as a comparison of two runs."""
_COLUMNS = (
    Column("share", "higher", "percent of elements within their bound", "%"),
    Column("max_rel_error", "lower", "largest |actual - golden| / |golden|"),
    Column("max_abs_error", "lower", "largest |actual - golden|", "the tensor's own unit"),
    Column("abs_share", "higher", "percent of elements whose absolute error is in bound", "%"),
    Column("cos_sim", "higher", "cosine of the two tensors"),
    Column("kl", "lower", "KL divergence of the two read as distributions", "nats"),
    Column("elements", "none", "how many elements there are", "elements"),
)
_STATUS: dict[str, Status] = {"pass": "pass", "fail": "fail"}


def is_operators(document: Any) -> bool:
    """Whether a JSON document is the result of an operator check."""
    return isinstance(document, dict) and cast("dict[str, Any]", document).get("format") == FORMAT


def operator_table(document: Mapping[str, Any], name: str) -> Table:
    """The check as a table.

    Raises:
        BadFile: It is damaged.
    """
    try:
        rows = tuple(_row(entry, index) for index, entry in enumerate(document["rows"]))
        source = str(document["source"])
        remarks = tuple(str(remark) for remark in document.get("remarks", ()))
    # The document comes from a file and may have been edited.
    except (KeyError, TypeError, ValueError, AttributeError) as trouble:
        raise BadFile(
            f"{name} is a damaged operator check: {type(trouble).__name__}: {trouble}"
        ) from None
    failing = [row for row in rows if row.status == "fail"]
    checked = [row for row in rows if row.compared]
    first = failing[0] if failing else None
    verdict: Verdict = "fail" if failing else "pass" if checked else "incomparable"
    if first is not None:
        finding = (
            f"'{first.site}' ({first.class_name}) is the first operator that is not what it should "
            f"compute, in its output: {first.reason}; {len(failing)} of {len(checked)} checked "
            f"outputs fail"
        )
    elif checked:
        finding = f"{len(checked)} outputs of operators are what they should be"
    else:
        finding = "no operator could be checked"
    return Table(
        rows,
        _COLUMNS,
        verdict,
        first,
        first.site if first is not None else "",
        finding,
        {"said": "bounds of each operator's number format", "kind": KIND},
        Side("golden values in float64"),
        Side(source),
        remarks,
    )


def _row(entry: Mapping[str, Any], order: int) -> Row:
    metrics = {
        column.name: float(entry[column.name])
        for column in _COLUMNS
        if entry.get(column.name) is not None
    }
    # Any other status means that the operator could not be checked.
    status = _STATUS.get(str(entry["status"]), "incomparable")
    required = entry.get("required")
    limit = None if required is None else float(required)
    shape = entry.get("shape")
    dims = None if shape is None else tuple(int(size) for size in shape)
    dtype = str(entry.get("dtype") or "")
    key = TensorKey(
        str(entry["site"]),
        "output",
        str(entry.get("output") or "0"),
        int(entry.get("step", 0)),
        int(entry.get("visit", 0)),
        int(entry.get("rank", 0)),
        int(entry.get("process", 0)),
        cast(Phase, str(entry.get("phase", "forward"))),
        usual_moment("output"),
    )
    row = Row(key, status, str(entry.get("reason") or ""), order=order, by="name")
    return row._replace(
        class_name=str(entry.get("op_type", "")),
        reference_dtype=dtype,
        candidate_dtype=dtype,
        reference_shape=dims,
        candidate_shape=dims,
        basis="values" if metrics else "",
        metrics=metrics,
        decided_by="share" if "share" in metrics else "",
        limit=limit,
        limit_from=str(entry.get("bound_name") or ""),
        severity=_severity(metrics.get("share"), limit, status),
    )


def _severity(share: float | None, required: float | None, status: Status) -> float:
    """Elements outside their bound over the allowed number; above 1 for every failing output."""
    # If every element must be right, there is no quotient: only right or wrong.
    if share is None or required is None or required >= 100.0:
        return math.inf if status == "fail" else 0.0
    outside = (100.0 - share) / (100.0 - required)
    return max(outside, 1.01) if status == "fail" else min(outside, 0.99)
