"""Rows that fail only at positions that the model's own attention mask excludes.

The values at a padding position depend on the kernel: softmax over nothing is zero in one kernel,
an average in another, NaN in a third. No result that counts reads them, because the mask excludes
them. So if rows fail, and both runs have the same attention_mask, and it excludes positions, then
all rows of the steps in question are measured and judged again without these positions. All rows
are measured again because a site is judged by its inputs and its outputs, which must either both
include pads or both exclude them. A wrong mask shows at positions that count; one that shows only
at pads changes nothing. A note names what was left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from driftline.alignment.plan import Plan
from driftline.comparison.measure.scheduler import Elementwise, measure_pairs
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.table.row import MANY, Row
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import GIVEN, HALF, REST
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_Place = tuple[TensorKey, str]
"""A tensor of the reference, and the site with which it was compared."""
_MOST = 20_000
"""Largest number of rows to measure again in memory; if more fail, pads are not the only reason."""
_ONLY_THERE = "differs only at positions that attention_mask leaves out"
_WITHOUT = "positions that attention_mask leaves out do not count"


def masked_rows(
    suspects: Iterable[Row],
    plan: Plan,
    reference: Run,
    candidate: Run,
    metrics: Sequence[Metric],
    elementwise: Elementwise,
) -> list[Row]:
    """Return rows measured again without the pads of the captured attention_mask, if there is one.

    Args:
        suspects: Rows of steps in which rows fail, or may fail when all rows are known.
        plan: The pairs that were compared.
        reference: The reference run.
        candidate: The candidate run.
        metrics: The metrics to measure.
        elementwise: The tolerances of `outside_share`.
    """
    wanted: set[_Place] = set()
    for row in suspects:
        if row.compared and _is_float(row):
            wanted.add(_place(row))
        if len(wanted) > _MOST:
            return []
    from driftline.alignment.reconcile.masks import without_pads
    from driftline.alignment.reconcile.tokens import is_mask

    if not wanted or not any(map(is_mask, itertools.chain(reference.records, candidate.records))):
        return []

    # Pairs are needed, because rows do not have recipes; a mask becomes another step of the recipe.
    pairs = [p for p in plan.pairs if (p.reference.key, p.candidate.key.site) in wanted]
    sides = reference, candidate
    # Masks are searched among all records of a run, so a long run is first reduced to the steps.
    if len(plan.pairs) > MANY:
        sides = (
            _moments_of(reference, [pair.reference.key for pair in pairs]),
            _moments_of(candidate, [pair.candidate.key for pair in pairs]),
        )
    masked = without_pads(pairs, *sides)
    if not masked:
        return []
    return [*measure_pairs(masked, reference, candidate, metrics=metrics, elementwise=elementwise)]


def judged_without_pads(
    judged: Table, measured: Table, masked: Iterable[Row], judge: Callable[[Table], Table]
) -> Table:
    """Return the table, judged without pads if that changes something.

    Args:
        judged: The table with its verdict.
        measured: The table before it was judged.
        masked: Rows that were measured again without pads.
        judge: Function that judges a table.
    """
    failing = {_place(row) for row in judged.rows if row.status == "fail" and _is_float(row)}
    again = {_place(row): row for row in masked}
    # If more rows fail than a comparison holds in memory, pads are not the only reason.
    if failing.isdisjoint(again) or len(failing) > _MOST:
        return judged
    # The whole table is judged again, because the error that a site adds depends on its inputs.
    counted = judge(
        measured.with_rows(_without(row, again.get(_place(row))) for row in measured.rows)
    )
    failing &= again.keys()
    places = {p for row in counted.rows if row.status == "pass" and (p := _place(row)) in failing}
    return _excused(counted, places, failing) if places else judged


def _moments_of(run: Run, keys: Iterable[TensorKey]) -> Run:
    """Return the part of a long run that belongs to the steps of some tensors."""
    from driftline.runs.views import only

    moments = {(key.rank, key.process, key.step) for key in keys}

    def belongs(record: Record) -> bool:
        return (record.key.rank, record.key.process, record.key.step) in moments

    return only(run, belongs)


def _without(row: Row, again: Row | None) -> Row:
    """Return a row as measured without pads, with the metrics that evidence has added."""
    if again is None:
        return row
    # The figures of second looks are dropped, because they were taken on whole tensors.
    kept = {name: value for name, value in row.metrics.items() if name not in (GIVEN, HALF, REST)}
    return again._replace(metrics={**kept, **again.metrics})


def _excused(counted: Table, passing: set[_Place], again: Iterable[_Place]) -> Table:
    """Return the table without pads, with reasons that say so in its rows."""
    # Rows that still fail were measured without pads too, and say so.
    measured = set(again)

    def said(row: Row) -> Row:
        if _place(row) not in measured or row.status not in ("pass", "fail"):
            return row
        why = _ONLY_THERE if _place(row) in passing else _WITHOUT
        return row._replace(reason="; ".join(filter(None, (row.reason, why))))

    note = (
        f"{_tensors(len(passing))} only at positions that the captured attention_mask leaves out "
        "(pads), which each kernel fills in its own way; they were not counted there; --mask none "
        "counts them"
    )
    return counted.with_rows(map(said, counted.rows)).changed(
        first=None if counted.first is None else said(counted.first),
        finding=f"{counted.finding}; pads were left out of {len(passing)} tensors",
        notes=(*counted.notes, note),
    )


def _tensors(count: int) -> str:
    return "1 tensor differs" if count == 1 else f"{count} tensors differ"


def _place(row: Row) -> _Place:
    return row.key, row.candidate_site or row.key.site


def _is_float(row: Row) -> bool:
    kinds = (DTYPES[name].kind for name in (row.reference_dtype, row.candidate_dtype))
    return all(kind == "float" for kind in kinds)
