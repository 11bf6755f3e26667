"""Clean comparisons become thresholds: how much two good runs of a model differ, per layer.

The input is any number of tables of runs that are known to be right. For every site, port and
metric, the threshold is a quantile of the measured values, counted towards the bad side, times a
margin. Nothing is judged here. A NaN on either side is refused, because such a comparison is not
clean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.statistics import CONFIDENCE, RESAMPLES, Statistic
from driftline.comparison.tolerance.thresholds import PerShape, Threshold, Thresholds
from driftline.comparison.tolerance.tolerance import widened
from driftline.errors import BadInput, did_you_mean
from driftline.runs.provenance import provenance

if TYPE_CHECKING:
    from _typeshed import StrPath

METRICS = ("relative_l2",)
"""Metrics calibrated by default: scale-free, and insensitive to a single element."""
QUANTILE = 0.99
MARGIN = 2.0
"""The difference of a layer depends on its input, and a few clean runs do not show all inputs."""

Measured = tuple[Row, float]


def calibrate(
    tables: Sequence[Table | StrPath],
    *,
    metrics: Sequence[str] = METRICS,
    quantile: float = QUANTILE,
    margin: float = MARGIN,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
    model: str = "",
    seed: int = 0,
) -> Thresholds:
    """Derive thresholds from comparisons of runs that are known to be right.

    Args:
        tables: Tables, or the folders that `compare -o` wrote.
        metrics: The metrics of the tables that get limits.
        quantile: The quantile of a layer's values, from 0 to 1, counted towards the bad side: low
            values of a cosine, large values of an error.
        margin: The limit is this many times the quantile, at least 1. For a cosine, the limit is
            this many times as far from 1.
        sites: Globs; only sites that match one of them. All by default.
        ports: Only these ports. All by default.
        model: The model that the thresholds are for; `check` can refuse others.
        seed: Seed of the bootstrap that computes the intervals.

    Raises:
        BadInput: There is no table, a metric is unknown, nothing was measured, or a comparison has
            NaN or Inf.
        BadFile: A folder has no table.
    """
    if not 0.0 <= quantile <= 1.0:
        raise BadInput(f"the quantile is {quantile}; it must lie between 0 and 1", hint="0.99")
    # A margin below 1 would fail the very runs from which it was calibrated.
    if not 1.0 <= margin < math.inf:
        raise BadInput(f"the margin is {margin}; it must be 1 or more", hint="2, for one")
    opened = [source if isinstance(source, Table) else open_table(source) for source in tables]
    if not opened:
        raise BadInput(
            "there is no table to calibrate from",
            hint="`driftline compare REF CAND -o DIR` writes one",
        )
    columns = _columns(opened, [metrics] if isinstance(metrics, str) else metrics)
    globs = [sites] if isinstance(sites, str) else list(sites)
    sides = [ports] if isinstance(ports, str) else list(ports)
    places: dict[tuple[str, str], list[Row]] = {}
    for table in opened:
        for row in table.rows:
            if _wanted(row, globs, sides):
                _refuse_non_finite(row, table)
                places.setdefault((row.key.site, row.key.port), []).append(row)
    statistic = Statistic(f"p{100.0 * quantile:g}", 100.0 * quantile)
    entries: list[Threshold] = []
    for column in columns:
        for (site, port), rows in places.items():
            measured = [
                (row, float(row.metrics[column.name])) for row in rows if column.name in row.metrics
            ]
            if measured:
                entry = _threshold(column, measured, statistic, margin, seed)
                entries.append(entry._replace(site=site, port=port))
    if not entries:
        raise BadInput(
            f"the tables hold no floating-point tensor with {', '.join(metrics)} to calibrate from",
            hint="look at one of them with `driftline show`",
        )
    facts = provenance()
    return Thresholds(
        model.rstrip("/").replace("/", "--"),
        tuple(entries),
        settings={
            "made_by": "driftline calibrate",
            "statistic": statistic.name,
            "margin": margin,
            "tables": len(opened),
            "resamples": RESAMPLES,
            "confidence": CONFIDENCE,
            "seed": seed,
        },
        sources=tuple(_source(table) for table in opened),
        provenance={
            name: facts[name]
            for name in ("created", "driftline", "command", "cwd", "git", "python", "platform")
        },
    )


def _columns(tables: Sequence[Table], metrics: Sequence[str]) -> list[Column]:
    by_name = {column.name: column for table in tables for column in table.columns}
    # Descriptive metrics, such as a minimum, have no better and worse.
    usable = [name for name, column in by_name.items() if column.direction != "none"]
    if not metrics:
        raise BadInput("no metric is named", hint="relative_l2, for one")
    for name in metrics:
        if name not in by_name:
            raise BadInput(
                f"there is no metric '{name}' in these tables", hint=did_you_mean(name, usable)
            )
        if name not in usable:
            raise BadInput(
                f"{name} describes; no limit can be put on it", hint=did_you_mean("", usable)
            )
    return [by_name[name] for name in dict.fromkeys(metrics)]


def _wanted(row: Row, sites: Sequence[str], ports: Sequence[str]) -> bool:
    """Whether a row is selected, has metrics and has a floating-point side; integers are exact."""
    # One floating-point side is enough, because then both are compared as numbers.
    floating = any(
        "float" in d or "complex" in d for d in (row.reference_dtype, row.candidate_dtype)
    )
    if not row.metrics or not floating:
        return False
    if ports and row.key.port not in ports:
        return False
    return not sites or any(fnmatchcase(row.key.site, glob) for glob in sites)


def _refuse_non_finite(row: Row, table: Table) -> None:
    counts = {
        f"{side} {what}": int(row.metrics.get(f"{side}_{what.lower()}", 0))
        for side in ("reference", "candidate")
        for what in ("NaN", "Inf")
    }
    complaints = [f"{count} {what}" for what, count in counts.items() if count and "NaN" in what]
    # Inf on both sides may be a mask and clean; Inf on one side never is.
    one_sided = int(row.metrics.get("one_sided", 0))
    if one_sided and not complaints:
        complaints = [f"{one_sided} NaN or Inf on one side only"]
    if complaints:
        raise BadInput(
            f"'{row.key.site}' {row.key.port} is not clean in {_source(table)}: "
            f"{', '.join(complaints)}",
            hint="calibrate from runs that are right; --site and --port choose a part of them",
        )


def _threshold(
    column: Column, measured: Sequence[Measured], statistic: Statistic, margin: float, seed: int
) -> Threshold:
    values = np.array([value for _, value in measured])
    observed = statistic.of(values, column.direction)
    shapes: dict[str, list[Measured]] = {}
    for row, value in measured:
        # Long and short prompts differ, so each shape gets its own value as well.
        shapes.setdefault(_shape(row), []).append((row, value))
    return Threshold(
        column.name,
        widened(observed, column, margin),
        statistic=statistic.name,
        direction=column.direction,
        samples=len(values),
        interval=statistic.interval(values, column.direction, seed=seed),
        observed=observed,
        nan=int(np.isnan(values).sum()),
        inf=int(np.isinf(values).sum()),
        dtypes=tuple(dict.fromkeys(_dtypes(row) for row, _ in measured)),
        shapes=tuple(
            PerShape(
                _about(of_shape[0][0]),
                widened(
                    statistic.of(np.array([value for _, value in of_shape]), column.direction),
                    column,
                    margin,
                ),
                len(of_shape),
            )
            for of_shape in shapes.values()
        ),
    )


def _shape(row: Row) -> str:
    return f"{row.reference_shape} {_dtypes(row)}"


def _about(row: Row) -> dict[str, Any]:
    return {"shape": list(row.reference_shape or ()), "dtype": _dtypes(row)}


def _dtypes(row: Row) -> str:
    return f"{row.reference_dtype} against {row.candidate_dtype}"


def _source(table: Table) -> str:
    reference, candidate = table.reference.path or "a run", table.candidate.path or "a run"
    return f"{reference} against {candidate}"
