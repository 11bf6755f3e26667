"""The report of `ait llm compare`: a judged table as `ait_cmp_report_{timestamp}.csv`.

It has 22 columns in the order of the original, with the figures of the table. Rows that the
original leaves out (tensors without a partner, different shapes, unreadable files) are written with
a reason. docs/seed-differences.md lists figures that differ from the original, with reasons.
"""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe
from driftline.comparison.evidence.conversions import CONVERSION, conversions_of
from driftline.comparison.table.row import Number, Row
from driftline.comparison.table.table import Table
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, kept_elements
from driftline.units import csv_cell

COLUMNS = (
    "token_id",
    "data_id",
    "golden_data_path",
    "golden_dtype",
    "golden_shape",
    "golden_max_value",
    "golden_min_value",
    "golden_mean_value",
    "my_data_path",
    "my_dtype",
    "my_shape",
    "my_max_value",
    "my_min_value",
    "my_mean_value",
    "cosine_similarity",
    "max_relative_error",
    "mean_relative_error",
    "max_absolute_error",
    "mean_absolute_error",
    "kl_divergence",
    "relative_euclidean_distance",
    "cmp_fail_reason",
)

METRICS = ("kl",)
"""Metrics that the table needs in addition to the standard ones."""

_MEASURED = (
    "cosine",
    "max_rel_error",
    "mean_rel_error",
    "max_abs_error",
    "mean_abs_error",
    "kl",
    "relative_l2",
)
# Elements decoded at a time; as float64 a whole tensor would take eight bytes each.
_CHUNK = 4 << 20
Cell = str | int | float


class Figures(NamedTuple):
    """Extremes and mean of one tensor, including NaN and Inf, as numpy and torch compute them."""

    max: float
    min: float
    mean: float


def write_report(table: Table, plan: Plan, reference: Run, candidate: Run, folder: Path) -> Path:
    """Write the report into a folder, which is made if it is not there.

    Args:
        table: The comparison, measured with `METRICS`.
        plan: The pairs of the comparison.
        reference: The golden run, for the paths and figures of tensors that were not compared.
        candidate: The other run.
        folder: The folder of the report; the file is written completely or not at all.

    Returns:
        The report's path; a report of the same second is never overwritten.

    Raises:
        BadInput: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Reserved first, so that two reports of one second do not collide.
        goal = _free_name(folder)
        try:
            write_whole(goal, COLUMNS, report_rows(table, plan, reference, candidate))
        except BaseException:
            with suppress(OSError):
                goal.unlink()
            raise
    except OSError as trouble:
        raise BadInput(
            f"cannot write the report into {folder}: {trouble.strerror or trouble}",
            hint="-o takes a folder that can be written",
        ) from trouble
    return goal


def write_whole(goal: Path, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Write a csv, completely or not at all."""
    # In the same folder: a rename across file systems is not atomic.
    handle, scratch = tempfile.mkstemp(prefix=f".{goal.name}.", dir=goal.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(map(csv_cell, row) for row in rows)
        Path(scratch).chmod(0o666 & ~_umask())  # mkstemp makes files for their owner alone
        Path(scratch).replace(goal)
    except BaseException:
        with suppress(OSError):
            Path(scratch).unlink()
        raise


def _umask() -> int:
    # The mask can only be read by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _free_name(folder: Path) -> Path:
    """Reserve `ait_cmp_report_{YYYYmmddHHMMSS}.csv`; a taken second gives way to the next."""
    moment = datetime.now()
    while True:
        goal = folder / f"ait_cmp_report_{moment:%Y%m%d%H%M%S}.csv"
        with suppress(FileExistsError):
            os.close(os.open(goal, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return goal
        moment += timedelta(seconds=1)


def report_rows(table: Table, plan: Plan, reference: Run, candidate: Run) -> Iterator[list[Cell]]:
    """The report's lines under `COLUMNS`, in the order of the table."""
    reference_side, candidate_side = _Side(reference, "reference"), _Side(candidate, "candidate")
    # One tensor may be in several pairs (parts of a fused one); the table keeps their order.
    pairs: dict[TensorKey, deque[Pair]] = {}
    for pair in plan.pairs:
        pairs.setdefault(pair.reference.key, deque()).append(pair)
    alone = {record.key: record for record in plan.missing}
    extra = {record.key: record for record in plan.extra}
    # Conversions are pairs within one run, which the plan does not have.
    own: list[tuple[Run, dict[TensorKey, Pair]]] = []
    if any(row.by == CONVERSION for row in table.rows):
        own = [(run, conversions_of(run)) for run in (reference, candidate)]
    for index, row in enumerate(table.rows):
        if row.by == CONVERSION:
            run, pair_of_key = next(side for side in own if row.key in side[1])
            reference_cells = _Side(run, "reference").cells(row, (pair_of_key[row.key].reference,))
            candidate_cells = _Side(run, "candidate").cells(row, (pair_of_key[row.key].candidate,))
        elif row.status == "missing":
            reference_cells, candidate_cells = (
                reference_side.cells(row, (alone[row.key],)),
                [""] * 6,
            )
        elif row.status == "extra":
            reference_cells, candidate_cells = (
                [""] * 6,
                candidate_side.cells(row, (extra[row.key],)),
            )
        else:
            pair = pairs[row.key].popleft()
            reference_cells = reference_side.cells(
                row, _sources(pair.reference, pair.reference_recipe)
            )
            candidate_cells = candidate_side.cells(
                row, _sources(pair.candidate, pair.candidate_recipe)
            )
        measured = [_cell(row.metrics.get(name)) for name in _MEASURED]
        yield [row.step, index, *reference_cells, *candidate_cells, *measured, _reason(row)]


def _sources(record: Record, recipe: Recipe | None) -> tuple[Record, ...]:
    """The records of all stored tensors that make up a side of a pair, its own record first."""
    if recipe is None:
        return (record,)
    stored: list[Record] = []
    for source in recipe.sources:
        stored += (source,) if isinstance(source, Record) else _sources(record, source)
    # A recipe may use one stored tensor twice; its path is written once.
    return tuple(dict.fromkeys(stored)) or (record,)


class _Side:
    """One of the two runs, and the cells of its tensors."""

    def __init__(self, run: Run, name: Literal["reference", "candidate"]) -> None:
        self.run = run
        self.name = name
        self.lone = len(run) == 1

    def cells(self, row: Row, sources: Sequence[Record]) -> list[Cell]:
        """Path, dtype, shape, max, min and mean; a joined tensor has several paths."""
        record = sources[0]
        is_reference = self.name == "reference"
        dtype = (row.reference_dtype if is_reference else row.candidate_dtype) or record.dtype
        shape = row.reference_shape if is_reference else row.candidate_shape
        shape = record.shape if shape is None else shape
        figures = self._figures(row, record, as_stored=len(sources) == 1 and shape == record.shape)
        return [
            ";".join(data_path(self.run, source, lone=self.lone) for source in sources),
            f"torch.{dtype}",
            listed(shape),
            *(["", "", ""] if figures is None else map(_cell, figures)),
        ]

    def _figures(self, row: Row, record: Record, *, as_stored: bool) -> Figures | None:
        metrics = row.metrics
        measured = _measured_figures(metrics, self.name)
        # Figures of the table leave out NaN and Inf, those of the original do not: if there are
        # any, the figures are computed again.
        strange = metrics.get(f"{self.name}_nan", 0) or metrics.get(f"{self.name}_inf", 0)
        if measured is not None and not (strange and as_stored):
            return measured
        # Without values only a summary from the dump can answer.
        if record.kept not in ("full", "sample") or self.run.lost(record):
            summary = record.summary
            return None if summary is None else Figures(summary.max, summary.min, summary.mean)
        try:
            return figures_of(self.run, record)
        except (DriftlineError, OSError, ValueError, KeyError):
            return measured


def _measured_figures(metrics: Mapping[str, Number], side: str) -> Figures | None:
    figures = [metrics.get(f"{side}_{what}") for what in ("max", "min", "mean")]
    high, low, mean = figures
    if high is None or low is None or mean is None:
        return None
    return Figures(high, low, mean)


def figures_of(run: Run, record: Record) -> Figures | None:
    """Extremes and mean of a stored tensor, block by block; None if it is empty or complex."""
    dtype, count = DTYPES[record.dtype], kept_elements(record)
    # Complex numbers have no order, so no extremes.
    if not count or dtype.kind in ("complex", "bits"):
        return None
    raw = run.raw(record)
    high, low, total = -math.inf, math.inf, 0.0
    with np.errstate(all="ignore"):
        for start in range(0, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            # Two 4-bit elements share a byte.
            part = raw[start // 2 : (stop + 1) // 2] if dtype.bits == 4 else raw[start:stop]
            block = to_float64(part, dtype, stop - start).astype(np.float64, copy=False)
            high, low = float(np.maximum(high, block.max())), float(np.minimum(low, block.min()))
            total += float(block.sum())
    return Figures(high, low, total / count)


def data_path(run: Run, record: Record, *, lone: bool = False) -> str:
    """The file of a tensor; followed by the tensor's key if several tensors share the file."""
    if source := run.source(record):
        place = Path(run.name)
        # A single file has its own name, with the suffix of the original: `...,inputs,0`.
        return str(place.with_name(source) if place.is_file() else place / source)
    if run.manifest.get("format") and "path" in run.manifest:  # a file of tensors
        return run.name if lone else f"{run.name}:{record.key.site}"
    return f"{run.name}/{record.key}"


def listed(shape: Sequence[int]) -> str:
    """`[2, 4]`, as the original prints a shape."""
    return "[" + ", ".join(map(str, shape)) + "]"


def _cell(value: Number | None) -> Cell:
    return "" if value is None else float(value)


def _reason(row: Row) -> str:
    """Why a row has no figures, or which elements its figures leave out."""
    if not row.compared:
        return row.reason or row.status
    return figures_leave_out(row) or (
        row.reason if row.basis in ("digest", "summary", "describe") else ""
    )


def figures_leave_out(row: Row) -> str:
    """The elements that the figures of a compared row leave out; empty if they include all."""
    remarks: list[str] = []
    if apart := int(row.metrics.get("one_sided", 0)):
        index = row.metrics.get("one_sided_at")
        where = "" if index is None else f", the first at index {int(index)}"
        remarks.append(f"{_elements(apart)} NaN or Inf on one side only{where}")
    strange = [
        int(row.metrics.get(f"{side}_nan", 0)) + int(row.metrics.get(f"{side}_inf", 0))
        for side in ("reference", "candidate")
    ]
    # The remark about one-sided values is more important, and includes these.
    if any(strange) and not apart:
        remarks.append(f"{_elements(max(strange))} NaN, Inf or a mask's lowest value on both sides")
    if remarks:
        remarks.append("the figures are over the other elements")
    return "; ".join(remarks)


def _elements(count: int) -> str:
    return "1 element is" if count == 1 else f"{count} elements are"
