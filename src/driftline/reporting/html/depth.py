"""The error along the depth of the model: which rows make the line, and the noise band around it.

Forward lines hold the output of every call in order of execution, backward lines the gradients in
theirs. Limits are not repeated here: they belong to the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
"""Metrics that have a noise band of their own where trusted runs were compared."""
_EXPECTED = "relative_l2"
"""What a diagnosis calls the error of a site."""
_BACKWARD = ("grad_input", "grad_output", "param_grad", "optimizer_grad")


def depth_lines(
    table: Table, *, diagnosis: Diagnosis | None = None, noise: Sequence[Table] = ()
) -> dict[str, Any]:
    """The lines of both directions; None for one that the table has nothing of."""
    metrics = {name for row in table.rows for name in row.metrics}
    if not metrics & {_EXPECTED, "abs_diff"}:  # single operators: no error that could be handed on
        return {"forward": None, "backward": None}
    measured = [index for index, row in enumerate(table.rows) if row.compared and row.metrics]
    forward = [index for index in measured if _gives(table.rows[index])]
    backward = [index for index in measured if table.rows[index].port in _BACKWARD]
    # A file of named tensors has no ports: then every row is part of the line.
    if not forward and not backward:
        forward = measured
    bands = _Bands(noise, diagnosis)
    return {
        "forward": _line(table, _first_slots(table, forward), bands, "forward"),
        "backward": _line(table, _first_slots(table, backward), bands, "backward"),
    }


def _gives(row: Row) -> bool:
    return row.port == "output" and row.key.phase != "backward"


def _first_slots(table: Table, places: Iterable[int]) -> list[int]:
    """One row per call and port: a second output, such as a cache, is no step of the depth."""
    seen: set[TensorKey] = set()
    kept: list[int] = []
    for index in places:
        call = table.rows[index].key.with_slot("")
        if call not in seen:
            seen.add(call)
            kept.append(index)
    return kept


def _line(table: Table, places: list[int], bands: _Bands, direction: str) -> Any:
    if not places:
        return None
    rows = [table.rows[index] for index in places]
    noise, source = bands.of(rows, direction)
    return {"rows": np.asarray(places, np.uint32), "noise": noise, "noise_from": source}


class _Bands:
    """What is normal at a tensor: from trusted runs, else as a diagnosis expects it."""

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
