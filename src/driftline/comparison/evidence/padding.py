"""Rows that fail only where the model's own attention mask says that nothing counts.

What a position that is a pad holds is left to the kernel: softmax over nothing is zero in one,
an average in another, NaN in a third. Nothing that counts reads it, because the mask leaves it out.
So where rows fail, the two runs were given one and the same attention_mask, and it leaves positions
out, all rows of the steps in question are measured again without these, and judged by that: a site
is judged by what it was given and what it made, and pads must be in both or in neither. A wrong
mask shows at positions that count; one that shows at pads alone changes nothing. A note says what
was left out.
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
"""A tensor of the reference, and the site that it was compared with."""
_MOST = 20_000
"""Where more rows fail they are not held in memory to be measured again: pads are not all of it."""
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
    """Rows measured again without the pads of the captured attention_mask, where it has any.

    Args:
        suspects: Rows of steps in which rows fail, or may fail when all rows are known.
        plan: What was compared with what.
        reference: The one run.
        candidate: The other.
        metrics: What is measured.
        elementwise: What `outside_share` counts as outside.
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

    # Pairs, not rows, know their recipes; masks are further steps of these.
    pairs = [p for p in plan.pairs if (p.reference.key, p.candidate.key.site) in wanted]
    sides = reference, candidate
    # Masks are looked up among all records of a run; a long one is narrowed to the steps first.
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
    """The table, judged without pads where that changes something.

    Args:
        judged: The table with its verdict.
        measured: The same before it was judged.
        masked: Rows that were measured again without pads.
        judge: Judges a table.
    """
    failing = {_place(row) for row in judged.rows if row.status == "fail" and _is_float(row)}
    again = {_place(row): row for row in masked}
    # Where more rows fail than a comparison holds in memory, pads are not all of it.
    if failing.isdisjoint(again) or len(failing) > _MOST:
        return judged
    # Judged anew as a whole: what a site adds hangs on what it was given.
    counted = judge(
        measured.with_rows(_without(row, again.get(_place(row))) for row in measured.rows)
    )
    failing &= again.keys()
    places = {p for row in counted.rows if row.status == "pass" and (p := _place(row)) in failing}
    return _excused(counted, places, failing) if places else judged


def _moments_of(run: Run, keys: Iterable[TensorKey]) -> Run:
    """What a long run has of the steps of some tensors: what they worked on is looked up there."""
    from driftline.runs.views import only

    moments = {(key.rank, key.process, key.step) for key in keys}

    def belongs(record: Record) -> bool:
        return (record.key.rank, record.key.process, record.key.step) in moments

    return only(run, belongs)


def _without(row: Row, again: Row | None) -> Row:
    """A row as it was measured without pads, with what evidence has added to it."""
    if again is None:
        return row
    # Second looks were taken at the whole tensor.
    kept = {name: value for name, value in row.metrics.items() if name not in (GIVEN, HALF, REST)}
    return again._replace(metrics={**kept, **again.metrics})


def _excused(counted: Table, passing: set[_Place], again: Iterable[_Place]) -> Table:
    """The table without pads, its rows with a word about that."""
    # Also rows that still fail were measured without pads, and say so.
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
