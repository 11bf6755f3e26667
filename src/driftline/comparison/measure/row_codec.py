"""Pairs and rows as plain values for other processes, reduced to what measuring needs.

A worker opens the same runs and receives the records, so that it need not read their indexes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, step_from_text
from driftline.comparison.measure.pair_rows import paired
from driftline.comparison.table.row import Row
from driftline.numerics.fields import Summary
from driftline.runs.records import Blob, Record, TensorKey

Names = dict[tuple[str, ...], int]
"""Index of each tuple of metric names; most rows of a task have the same names."""


def pair_to_plain(pair: Pair) -> list[Any]:
    """Return a pair without the fields that measuring does not need."""
    # A summary is long, and needed only if there are no values to measure.
    have_values = pair.reference.kept in _VALUES and pair.candidate.kept in _VALUES
    lost = pair.reference.lost or pair.candidate.lost
    with_summary = not have_values or bool(lost)
    recipes = (pair.reference_recipe, pair.candidate_recipe)
    return [
        _record(pair.reference, with_summary),
        _record(pair.candidate, with_summary),
        pair.by,
        pair.confidence,
        *(None if recipe is None else _recipe(recipe, with_summary) for recipe in recipes),
        pair.trouble,
    ]


def pair_from_plain(shown: Sequence[Any]) -> Pair:
    """The inverse of `pair_to_plain`."""
    reference, candidate, by, confidence, reference_recipe, candidate_recipe, trouble = shown
    return Pair(
        record_from_plain(reference),
        record_from_plain(candidate),
        by,
        confidence,
        None if reference_recipe is None else _recipe_from(reference_recipe),
        None if candidate_recipe is None else _recipe_from(candidate_recipe),
        trouble,
    )


_VALUES = ("full", "sample")


def record_to_plain(record: Record) -> list[Any]:
    """Return a record with all its fields."""
    return _record(record, True)


def _record(record: Record, with_summary: bool) -> list[Any]:
    summary = record.summary if with_summary else None
    # By position instead of name, because there are many records.
    return [*record[:11], None if summary is None else list(summary), *record[12:]]


def record_from_plain(shown: Sequence[Any]) -> Record:
    """The inverse of `record_to_plain`."""
    key, order, dtype, shape, alias, class_name, device, kept, digest, blob = shown[:10]
    stride, summary, placement, lost = shown[10:]
    return Record(
        TensorKey(*key),
        order,
        dtype,
        tuple(shape),
        alias,
        class_name,
        device,
        kept,
        digest,
        None if blob is None else Blob(*blob),
        stride,
        None if summary is None else Summary(*summary[:10], sketch=tuple(summary[10])),
        placement,
        lost,
    )


def _recipe(recipe: Recipe, with_summary: bool) -> dict[str, Any]:
    return {
        "sources": [
            _recipe(source, with_summary)
            if isinstance(source, Recipe)
            else _record(source, with_summary)
            for source in recipe.sources
        ],
        "steps": [step.text() for step in recipe.steps],
        "shape": list(recipe.shape),
    }


def _recipe_from(shown: Mapping[str, Any]) -> Recipe:
    sources: list[Source] = [
        _recipe_from(cast("Mapping[str, Any]", source))
        if isinstance(source, Mapping)
        else record_from_plain(source)
        for source in shown["sources"]
    ]
    steps = tuple(step_from_text(text) for text in shown["steps"])
    return Recipe(tuple(sources), steps, tuple(shown["shape"]))


def rows_to_plain(rows: Sequence[Row]) -> list[Any]:
    """Return measurements without the fields of their pairs: metric names, and a line per row."""
    kinds: Names = {}
    lines: list[list[Any]] = []
    for row in rows:
        metrics = row.metrics
        # Rows with the same metrics share one list of names.
        names = kinds.setdefault(tuple(metrics), len(kinds))
        values = [_number(value) for value in metrics.values()]
        line: list[Any] = [names, values]
        # Most rows were measured from values and need no further fields.
        if row.status != "unjudged" or row.reason or row.estimated or row.basis != "values":
            line += [row.status, row.reason, row.basis, row.estimated, row.severity]
        lines.append(line)
    return [list(kinds), lines]


def rows_from_plain(shown: Sequence[Any], pairs: Sequence[Pair]) -> list[Row]:
    """The inverse of `rows_to_plain`, for the pairs that were measured."""
    kinds, lines = shown
    rows: list[Row] = []
    for pair, line in zip(pairs, lines, strict=True):
        metrics = dict(zip(kinds[line[0]], line[1], strict=True))
        # The short form of a row without further fields.
        if len(line) == 2:
            rows.append(paired(pair, "values", metrics))
            continue
        status, reason, basis, estimated, severity = line[2:]
        row = paired(pair, basis, metrics)
        rows.append(
            row._replace(
                status=status, reason=reason, estimated=tuple(estimated), severity=severity
            )
        )
    return rows


def _number(value: Any) -> Any:
    """Convert numbers of numpy to those of Python, with the same bits."""
    if type(value) in (float, int):
        return value
    return int(value) if isinstance(value, int) else float(value)
