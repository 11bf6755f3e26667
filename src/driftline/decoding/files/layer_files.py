"""CSV files of layers: written while the models run, and read back as a table that can be judged.

One number per row of a layer's outputs, in the order of iterations, then outputs, prompts and
tokens. At most the rows of one output are in memory. A layer's file becomes one row of a comparison
table by the same statistic that its threshold was made with.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driftline.comparison.table.files import TABLE_FILE, is_table, open_table
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.table import Side, Table
from driftline.comparison.tolerance.statistics import AVERAGE, Statistic, parse_statistic
from driftline.decoding.files.metric_files import (
    LAYER_METRICS,
    MetricFile,
    MetricFiles,
    by_layer,
    find_metric_files,
    read_provenance,
    read_values,
)
from driftline.decoding.files.names import LAYER_CSV_METRICS, LAYER_TABLE, file_layer, layer_csv
from driftline.decoding.layerwise.row_metrics import RowMetrics
from driftline.errors import BadInput
from driftline.runs.records import TensorKey

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.table.table import Table
    from driftline.comparison.tolerance.thresholds import Thresholds

_BLOCK = 1 << 16


class LayerSum(NamedTuple):
    """A summary of one layer's files.

    Attributes:
        layer: Its name in file names.
        site: Its name in the model.
        outputs: How many outputs of how many iterations were compared.
        rows: Rows that count.
        nonfinite: Rows that are NaN: non-finite on one side only, or altogether.
        nan: Elements that are NaN on both sides.
        one_sided: Elements that are NaN or infinite on one side only.
        abs_diff: Mean over all other rows.
        largest: Of abs_diff, over all other rows.
        cos_sim: Smallest over all other rows.
    """

    layer: str
    site: str
    outputs: int = 0
    rows: int = 0
    nonfinite: int = 0
    nan: int = 0
    one_sided: int = 0
    abs_diff: float = 0.0
    largest: float = 0.0
    cos_sim: float = math.inf

    def with_rows(self, abs_diff: Any, cos_sim: Any, nan: int = 0, one_sided: int = 0) -> LayerSum:
        # A running mean over finite rows: rows themselves are not kept.
        counted = self.rows - self.nonfinite
        good = ~np.isnan(abs_diff)
        count = int(good.sum())
        total = counted + count
        mean = float(abs_diff[good].mean()) if count else 0.0
        return self._replace(
            outputs=self.outputs + 1,
            rows=self.rows + len(abs_diff),
            nonfinite=self.nonfinite + len(abs_diff) - count,
            nan=self.nan + nan,
            one_sided=self.one_sided + one_sided,
            abs_diff=self.abs_diff + (mean - self.abs_diff) * count / total if total else 0.0,
            largest=max(self.largest, float(abs_diff[good].max(initial=0.0))),
            cos_sim=min(self.cos_sim, float(cos_sim[good].min(initial=math.inf))),
        )


class LayerFiles:
    """Appends figures to draft files, and gives the files their final names at the end.

    Args:
        drafts: Folder of the draft files.
        library: The library whose names the model has.
        elements: Whether abs_diff files hold every element.
    """

    def __init__(self, drafts: Path, library: str, *, elements: bool = False) -> None:
        self._drafts = drafts
        self._library = library
        self._elements = elements
        self.sums: dict[str, LayerSum] = {}
        self._numbers: dict[str, int] = {}

    def take(self, metrics: RowMetrics) -> None:
        """Append the rows of one output."""
        site = metrics.row.site
        if not len(metrics.abs_diff):
            return
        new = site not in self.sums
        if new:
            self._numbers[site] = len(self.sums)
            self.sums[site] = LayerSum(file_layer(site, self._library), site)
        number = self._numbers[site]
        one_sided = int(metrics.row.metrics.get("one_sided", 0))
        self.sums[site] = self.sums[site].with_rows(
            metrics.abs_diff, metrics.cos_sim, metrics.nan, one_sided
        )
        differences = metrics.abs_diff
        if self._elements and metrics.elements is not None:
            differences = metrics.elements
        for name, values in zip(LAYER_CSV_METRICS, (differences, metrics.cos_sim), strict=True):
            # Opened for each output: a model has more layers than a process may have open files.
            with self._draft(number, name).open("ab") as file:
                if new:
                    file.write(f"{name}\n".encode("ascii"))
                for start in range(0, len(values), _BLOCK):
                    lines = map(repr, values[start : start + _BLOCK].tolist())
                    file.write(("\n".join(lines) + "\n").encode("ascii"))

    def finish(self, folder: Path, prefix: str) -> list[str]:
        """Move every file to its name in the folder of the results; returns the names."""
        names: list[str] = []
        for number, layer in enumerate(self.sums.values()):
            for metric in LAYER_CSV_METRICS:
                draft = self._draft(number, metric)
                # The content must be on disk before the name is: a crash would leave an empty file.
                with draft.open("rb") as file:
                    os.fsync(file.fileno())
                names.append(layer_csv(prefix, layer.layer, metric))
                draft.replace(folder / names[-1])
        return names

    def _draft(self, number: int, metric: str) -> Path:
        return self._drafts / f"{number}.{metric}"


def layer_table(
    metric_files: MetricFiles, path: str, thresholds: Thresholds | None = None
) -> Table:
    """The layer files of a folder as a table.

    Args:
        metric_files: The files.
        path: What the table calls the folder.
        thresholds: Say whose files to take, and which statistic to make of each metric.

    Raises:
        BadInput: The folder holds files of other models only, or of several and nobody says whose.
        BadFile: A file that cannot be read.
    """
    files = [file for file in metric_files.files if file.layer]
    models = sorted({file.named.model for file in files})
    if thresholds is not None and thresholds.model_id:
        own_models = [model for model in models if thresholds.belongs_to(model)]
        if not own_models:
            raise BadInput(
                f"{thresholds.path or 'the thresholds'} is for the model "
                f"'{thresholds.model_id}'; {path} holds layers of {', '.join(models[:3])}",
                hint="give thresholds of a model that is there",
            )
        models = own_models
    # Layers of two models may have the same names, and would be pooled.
    if len(models) > 1:
        raise BadInput(
            f"{path} holds layers of several models: {', '.join(models[:4])}",
            hint="give a folder of one of them",
        )
    files = [file for file in files if file.named.model == models[0]]
    rows: list[Row] = []
    for order, (layer, layer_files) in enumerate(
        by_layer(files, read_provenance(files).layers).items()
    ):
        metrics = {
            metric: _statistic(metric, thresholds).of(_values(layer_files, metric), direction)
            for metric, direction in LAYER_METRICS.items()
            # A file that was deleted leaves its column empty.
            if any(file.metric == metric for file in layer_files)
        }
        row = Row(TensorKey.of(layer, "output"), "unjudged", order=order)
        rows.append(row._replace(basis="values", metrics=metrics))
    columns = tuple(
        Column(metric, direction, f"{_statistic(metric, thresholds).name} of the layer's file")
        for metric, direction in LAYER_METRICS.items()
    )
    return Table(tuple(rows), columns, reference=Side(path), candidate=Side(path))


def table_of_files(table: Path, thresholds: Thresholds) -> Table | None:
    """The layer files of a `….layers` table as a table, if thresholds were made from such files.

    A threshold that was made from all values of a layer's file must be compared with all values of
    a layer's file: single outputs and iterations, which are the table's rows, are above and below
    it.

    Returns:
        None for other tables and other thresholds, and if the files are missing.
    """
    # Thresholds of a comparison's own columns are compared with the table itself.
    metrics = {entry.metric for entry in thresholds.entries if entry.site}
    if table.suffix != LAYER_TABLE or not metrics or not metrics <= set(LAYER_METRICS):
        return None
    # Files of other shapes may be in the same folder: only those of this table count.
    start = table.name.removesuffix(LAYER_TABLE) + "--"
    metric_files = find_metric_files(table.parent, below=False)
    layer_files = [
        file for file in metric_files.files if file.layer and file.path.name.startswith(start)
    ]
    return layer_table(MetricFiles(layer_files, 0), str(table), thresholds) if layer_files else None


def _values(files: list[MetricFile], metric: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    parts = [read_values(file.path, metric) for file in files if file.metric == metric]
    return np.concatenate(parts)


def _statistic(metric: str, thresholds: Thresholds | None) -> Statistic:
    name = (
        next((e.statistic for e in thresholds.entries if e.metric == metric), "")
        if thresholds
        else ""
    )
    return parse_statistic(name) if name else AVERAGE


def table_to_judge(path: StrPath, thresholds: Thresholds | None = None) -> Table:
    """The table behind a path.

    Args:
        path: A folder that `compare -o` wrote, or one of layer files.
        thresholds: The limits that will be applied: they select the model's files and statistics.

    Raises:
        BadInput: There is neither.
    """
    folder = Path(path)
    if thresholds is not None and is_table(folder):
        files = table_of_files(folder, thresholds)
        if files is not None:
            return files
    if folder.is_dir() and not is_table(folder):
        metric_files = find_metric_files(folder)
        if any(file.layer for file in metric_files.files):
            return layer_table(metric_files, str(path), thresholds)
        if metric_files.files:
            raise BadInput(
                f"{path} holds scores of tokens, not of layers",
                hint="`driftline validate` applies thresholds to those",
            )
    if folder.is_file() and folder.name != TABLE_FILE:
        raise BadInput(
            f"{path} is a file; a comparison is the folder that `compare -o` wrote",
            hint="give that folder",
        )
    return open_table(folder)
