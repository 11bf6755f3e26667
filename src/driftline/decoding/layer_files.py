"""The csv files of layers: written beside the results while the models run, named when all is done.

One number per row of a layer's outputs, in the order of iterations, then of outputs, prompts and
tokens. At no time are more rows in memory than one output has.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.decoding.layer_names import METRICS, file_layer, layer_csv
from driftline.decoding.row_figures import Figures

_BLOCK = 1 << 16


class LayerSum(NamedTuple):
    """What one layer's files hold, in short.

    Attributes:
        layer: As in the file names.
        site: As the model calls it.
        outputs: How many outputs of how many iterations were compared.
        rows: Rows that count.
        nonfinite: Rows that are NaN: non-finite on one side only, or altogether.
        nan: Elements that are NaN on both sides.
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
    abs_diff: float = 0.0
    largest: float = 0.0
    cos_sim: float = math.inf

    def with_rows(self, abs_diff: Any, cos_sim: Any, nan: int = 0) -> LayerSum:
        known = self.rows - self.nonfinite
        good = ~np.isnan(abs_diff)
        count = int(good.sum())
        total = known + count
        mean = float(abs_diff[good].mean()) if count else 0.0
        return self._replace(
            outputs=self.outputs + 1,
            rows=self.rows + len(abs_diff),
            nonfinite=self.nonfinite + len(abs_diff) - count,
            nan=self.nan + nan,
            abs_diff=self.abs_diff + (mean - self.abs_diff) * count / total if total else 0.0,
            largest=max(self.largest, float(abs_diff[good].max(initial=0.0))),
            cos_sim=min(self.cos_sim, float(cos_sim[good].min(initial=math.inf))),
        )


class LayerFiles:
    """Takes figures as they come, and names the files in the end.

    Args:
        desk: Folder where the files grow.
        library: Whose names the model has.
        elements: Whether abs_diff files hold every element.
    """

    def __init__(self, desk: Path, library: str, *, elements: bool = False) -> None:
        self._desk = desk
        self._library = library
        self._elements = elements
        self.sums: dict[str, LayerSum] = {}
        self._places: dict[str, int] = {}

    def take(self, found: Figures) -> None:
        """Append the rows of one output."""
        site = found.row.site
        if not len(found.abs_diff):
            return
        new = site not in self.sums
        if new:
            self._places[site] = len(self.sums)
            self.sums[site] = LayerSum(file_layer(site, self._library), site)
        at = self._places[site]
        self.sums[site] = self.sums[site].with_rows(found.abs_diff, found.cos_sim, found.nan)
        every = found.elements if self._elements and found.elements is not None else found.abs_diff
        for metric, values in zip(METRICS, (every, found.cos_sim), strict=True):
            with self._draft(at, metric).open("ab") as file:
                if new:
                    file.write(f"{metric}\n".encode("ascii"))
                for start in range(0, len(values), _BLOCK):
                    lines = map(repr, values[start : start + _BLOCK].tolist())
                    file.write(("\n".join(lines) + "\n").encode("ascii"))

    def finish(self, folder: Path, prefix: str) -> list[str]:
        """Give every file its name in the folder of the results; the names."""
        names: list[str] = []
        for at, layer in enumerate(self.sums.values()):
            for metric in METRICS:
                draft = self._draft(at, metric)
                with draft.open("rb") as file:
                    os.fsync(file.fileno())
                names.append(layer_csv(prefix, layer.layer, metric))
                draft.replace(folder / names[-1])
        return names

    def _draft(self, at: int, metric: str) -> Path:
        return self._desk / f"{at}.{metric}"
