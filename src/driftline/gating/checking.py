"""A comparison that is there already, judged by other limits: thresholds of clean runs, or numbers.

No tensor is read: the table has all metrics that were measured. The first layer beyond its limit is
the table's `first_site`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from driftline.comparison.row import Row
from driftline.comparison.storage import open_table
from driftline.comparison.table import Table
from driftline.errors import BadInput
from driftline.gating.judge import NO_THRESHOLD, judge
from driftline.tolerance.layer_names import LayerNames
from driftline.tolerance.limits import Limit, Tolerance, limits_from
from driftline.tolerance.thresholds import Thresholds, load_thresholds

if TYPE_CHECKING:
    from _typeshed import StrPath

_NOTE = "thresholds: "


def check(
    table: Table | StrPath,
    *,
    thresholds: Thresholds | StrPath | None = None,
    limits: Mapping[str, float] | Sequence[Limit] | None = None,
    slack: float = 1.0,
    min_coverage: float = 0.0,
    model: str | None = None,
) -> Table:
    """Judge a comparison again.

    Args:
        table: A table, or the folder that `compare -o` wrote.
        thresholds: What `calibrate` gave, or the path of a thresholds file. Tensors of layers it
            does not speak of are not judged by it.
        limits: Metric → worst value that passes, for every tensor.
        slack: How many times its threshold a tensor may reach.
        min_coverage: The share of all tensors that must be judged for a pass.
        model: Refuse thresholds that are for another model.

    Raises:
        BadInput: Thresholds that speak of no layer of this table, or an unknown metric.
        BadFile: No table or no thresholds file there.
    """
    found = table if isinstance(table, Table) else open_table(table)
    if limits is None or isinstance(limits, Mapping):
        allowed = limits_from(limits, found.columns)
    else:
        allowed = tuple(limits)
    known = None
    if thresholds is not None:
        known = thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)
        if model is not None:
            known.require_model(model)
    tolerance = Tolerance(allowed, min_coverage=min_coverage, thresholds=known, slack=slack)
    fresh = found.with_rows(_forgotten(row) for row in found.rows)
    return judge_by(fresh, tolerance)


def judge_by(table: Table, tolerance: Tolerance) -> Table:
    """`judge`, with what is to be said of thresholds that do not fit the table.

    Raises:
        BadInput: They fit nothing of it.
    """
    judged = judge(table, tolerance)
    known = tolerance.thresholds
    if known is None:
        return judged
    called = known.path or "the thresholds"
    if not known.sites:
        raise BadInput(
            f"{called} has thresholds for the model as a whole ({', '.join(known.metrics)}), none "
            "for layers",
            hint="`driftline validate` applies those; make others with --layer_io or calibrate",
        )
    names = LayerNames({row.key.site for row in table.rows})
    absent = [site for site in known.sites if names.find(site) is None]
    if len(absent) == len(known.sites):
        whose = f" ('{known.model_id}')" if known.model_id else ""
        raise BadInput(
            f"{called} speaks of no layer of this comparison: it seems to be for another "
            f"model{whose}",
            hint=f"it has '{known.sites[0]}', the comparison "
            f"'{next(iter(row.key.site for row in table.rows), '')}'",
        )
    notes = [note for note in judged.notes if not note.startswith(_NOTE)]
    notes += [f"{_NOTE}{note}" for note in known.notes]
    broken = [entry for entry in known.entries if not entry.usable]
    if broken:
        notes.append(
            f"{_NOTE}{len(broken)} thresholds are no number, {broken[0].metric} of "
            f"'{broken[0].site}' for one; they judge nothing"
        )
    if absent:
        notes.append(
            f"{_NOTE}{len(absent)} of {len(known.sites)} layers with a threshold are not in the "
            f"comparison, '{absent[0]}' for one"
        )
    silent = sum(row.reason.startswith(NO_THRESHOLD) for row in judged.rows)
    if silent:
        notes.append(f"{_NOTE}{silent} tensors that were compared have none, and are not judged")
    return judged.changed(notes=tuple(notes))


def _forgotten(row: Row) -> Row:
    """What was measured may be judged again; what could not be measured stays as it is."""
    if row.status == "incomparable" and row.metrics:
        return row.judged("unjudged")
    return row
