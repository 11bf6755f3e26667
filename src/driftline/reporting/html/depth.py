"""The error along the depth of the model: which rows make the line, and the noise band around it.

The forward line holds the output of every call in order of execution, the backward line the
gradients in theirs, the optimizer line the gradients that the optimizer was given (after clipping
and unscaling). Limits are not repeated here: they belong to the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.reporting.html.page import Array, singles
from driftline.runs.records import TensorKey

if TYPE_CHECKING:
    from driftline.diagnosis.result import Diagnosis

DRAWN = (
    *("relative_l2", "cosine", "max_abs_error", "mean_abs_error", "rmse", "max_rel_error"),
    *("mean_rel_error", "projection", "max_ulp", "kl"),
)
"""Metrics that have their own noise band if trusted runs were compared."""
_EXPECTED = "relative_l2"
"""What a diagnosis calls the error of a site."""
Pass: TypeAlias = Literal["forward", "backward", "optimizer"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "optimizer")
"""The parts of a training step that have a line of their own, in order of execution."""
_PASS_OF: dict[str, Pass] = {
    "output": "forward",
    "grad_input": "backward",
    "grad_output": "backward",
    "param_grad": "backward",
    "optimizer_grad": "optimizer",
}


def pass_of(key: TensorKey) -> Pass | None:
    """Part of the step whose line a tensor belongs to; None for inputs and weights."""
    drawn = _PASS_OF.get(key.port)
    return None if drawn == "forward" and key.phase == "backward" else drawn


def depth_lines(
    table: Table, *, diagnosis: Diagnosis | None = None, noise: Sequence[Table] = ()
) -> dict[str, Any]:
    """The line of each pass; None for a pass that is not in the table."""
    metrics = {name for row in table.rows for name in row.metrics}
    if not metrics & {_EXPECTED, "abs_diff"}:  # single operators do not pass errors on
        return dict.fromkeys(PASSES)
    measured = [index for index, row in enumerate(table.rows) if row.compared and row.metrics]
    places: dict[Pass, list[int]] = {name: [] for name in PASSES}
    for index in measured:
        if name := pass_of(table.rows[index].key):
            places[name].append(index)
    # A file of named tensors has no ports: then every row is part of the line.
    if not any(places.values()):
        places["forward"] = measured
    bands = _Bands(noise, diagnosis)
    return {name: _line(table, _first_slots(table, places[name]), bands, name) for name in PASSES}


def _first_slots(table: Table, places: Iterable[int]) -> list[int]:
    """One row per call and port: a second output, such as a cache, is not part of the line.

    The slots of a parameter's port are parameters, and all of them are part of the line.
    """
    seen: set[TensorKey] = set()
    kept: list[int] = []
    for index in places:
        key = table.rows[index].key
        call = key if key.port in ("param_grad", "optimizer_grad") else key.with_slot("")
        if call not in seen:
            seen.add(call)
            kept.append(index)
    return kept


def _line(table: Table, places: list[int], bands: _Bands, direction: Pass) -> Any:
    if not places:
        return None
    rows = [table.rows[index] for index in places]
    noise, source = bands.of(rows, direction)
    return {"rows": np.asarray(places, np.uint32), "noise": noise, "noise_from": source}


class _Bands:
    """The normal error of a tensor: from trusted runs, else as a diagnosis expects it."""

    def __init__(self, noise: Sequence[Table], diagnosis: Diagnosis | None) -> None:
        self._trusted: list[Mapping[TensorKey, Row]] = [
            {row.key: row for row in table.rows if row.compared} for table in noise
        ]
        self._expected: dict[tuple[str, str], float] = {}
        for site in diagnosis.sites if diagnosis is not None else ():
            self._expected[site.direction, site.site] = site.noise

    def of(self, rows: Sequence[Row], direction: str) -> tuple[dict[str, Any], str]:
        if self._trusted:
            # Measured noise is better evidence than expected noise, so it goes first.
            bands: dict[str, Any] = {}
            for metric in DRAWN:
                low, high = self._spread(rows, metric)
                if not np.isnan(high).all():
                    bands[metric] = {"low": singles(low), "high": singles(high)}
            count = len(self._trusted)
            return bands, f"{count} trusted run{'' if count == 1 else 's'}"
        high = np.asarray(
            [self._expected.get((direction, row.site), np.nan) for row in rows], np.float64
        )
        if np.isnan(high).all():
            return {}, ""
        # An expectation gives an upper bound only.
        low = np.full(len(rows), np.nan)
        return (
            {_EXPECTED: {"low": low.astype(np.float32), "high": singles(high)}},
            "what the input and the number format of each site explain",
        )

    def _spread(self, rows: Sequence[Row], metric: str) -> tuple[Array, Array]:
        low, high = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        for index, row in enumerate(rows):
            errors = [
                float(trusted[row.key].metrics[metric])
                for trusted in self._trusted
                if row.key in trusted and metric in trusted[row.key].metrics
            ]
            if errors:
                low[index], high[index] = min(errors), max(errors)
        if len(self._trusted) == 1:  # a band between a run and itself could not be seen
            low[:] = np.nan
        return low, high
