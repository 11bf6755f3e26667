"""Layer files as a comparison table: one row per layer, so that thresholds can be held to them.

The same statistic as the threshold's is made of a layer's values. Where nothing says in which order
layers ran, that of usual decoders is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.table import Side, Table
from driftline.comparison.tolerance.statistics import AVERAGE, Statistic, parse_statistic
from driftline.decoding.metric_files import (
    LAYER_METRICS,
    Found,
    MetricFile,
    by_layer,
    find_metric_files,
    read_values,
)
from driftline.decoding.told import told_beside
from driftline.errors import BadInput
from driftline.runs.records import TensorKey

if TYPE_CHECKING:
    from driftline.comparison.tolerance.thresholds import Thresholds

_LAYERS = ".layers"


def layer_table(found: Found, path: str, known: Thresholds | None = None) -> Table:
    """The layer files of a folder as a table.

    Args:
        found: The files.
        path: What the table calls the folder.
        known: Thresholds that say whose files to take, and which statistic to make of each metric.

    Raises:
        BadInput: The folder holds files of other models only, or of several and nobody says whose.
        BadFile: A file that cannot be read.
    """
    files = [file for file in found.files if file.layer]
    models = sorted({file.named.model for file in files})
    if known is not None and known.model_id:
        mine = [model for model in models if known.belongs_to(model)]
        if not mine:
            raise BadInput(
                f"{known.path or 'the thresholds'} is for the model '{known.model_id}'; {path} "
                f"holds layers of {', '.join(models[:3])}"
            )
        models = mine
    if len(models) > 1:
        raise BadInput(
            f"{path} holds layers of several models: {', '.join(models[:4])}",
            hint="give a folder of one of them",
        )
    files = [file for file in files if file.named.model == models[0]]
    rows: list[Row] = []
    for order, (layer, own) in enumerate(by_layer(files, told_beside(files).layers).items()):
        metrics = {
            metric: _statistic(metric, known).of(_values(own, metric), direction)
            for metric, direction in LAYER_METRICS.items()
            if any(file.metric == metric for file in own)
        }
        row = Row(TensorKey.of(layer, "output"), "unjudged", order=order)
        rows.append(row._replace(basis="values", metrics=metrics))
    columns = tuple(
        Column(metric, direction, f"{_statistic(metric, known).name} of the layer's file")
        for metric, direction in LAYER_METRICS.items()
    )
    return Table(tuple(rows), columns, reference=Side(path), candidate=Side(path))


def table_of_files(table: Path, known: Thresholds) -> Table | None:
    """The layer files beside a `….layers` table, where thresholds are of such files.

    A threshold that was made of all values of a layer's file is held to all values of a layer's
    file: single outputs and iterations, which are the table's rows, lie on both sides of it.

    Returns:
        None for other tables and other thresholds, and where the files are gone.
    """
    named = {entry.metric for entry in known.entries if entry.site}
    if table.suffix != _LAYERS or not named or not named <= set(LAYER_METRICS):
        return None
    start = table.name.removesuffix(_LAYERS) + "--"
    found = find_metric_files(table.parent, below=False)
    mine = [file for file in found.files if file.layer and file.path.name.startswith(start)]
    return layer_table(Found(mine, 0), str(table), known) if mine else None


def _values(files: list[MetricFile], metric: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    mine = [read_values(file.path, metric) for file in files if file.metric == metric]
    return np.concatenate(mine)


def _statistic(metric: str, known: Thresholds | None) -> Statistic:
    said = next((e.statistic for e in known.entries if e.metric == metric), "") if known else ""
    return parse_statistic(said) if said else AVERAGE
