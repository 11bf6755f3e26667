"""The state of the viewer: one page of two runs, and the tensors that are open.

The page is made again when the runs have changed. This file does not compare runs or serve pages.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from driftline.errors import BadInput
from driftline.reporting.html.page import pack, singles
from driftline.reporting.html.report import Page
from driftline.reporting.html.tensors.pair import OpenedPair, Region, open_pair
from driftline.reporting.html.tensors.pair_statistics import (
    Scale,
    error_histogram,
    histogram,
    statistics,
)
from driftline.reporting.html.tensors.pictures import (
    Element,
    error_map,
    largest_errors,
    pictures,
    values,
)
from driftline.runs.layout import INDEX, MANIFEST, PROCESS

BUDGET = 1 << 22
"""Most elements that are read for one answer; more would take too long."""
MOST_CELLS = 512
MOST_BINS = 256
MOST_VALUES = 1 << 12
_OPEN = 4
"""Most pairs that stay open: a recipe may hold a copy of a tensor in memory."""
_LISTED = 20_000
"""Most files of a dump that are checked for changes."""

SHARDS = "*.safetensors"

Fingerprint = tuple[tuple[str, int, int], ...]


class RunsChanged(BadInput):
    """A request about rows of an older version of the page."""


class Session:
    """The page, and pairs of it.

    Args:
        make: Opens the runs and compares them.
        watched: Paths that the page depends on; if they change, the page is made again.
    """

    def __init__(self, make: Callable[[], Page], watched: Sequence[Path]) -> None:
        self._make = make
        self._watched = tuple(watched)
        self._lock = threading.RLock()
        self._pairs: OrderedDict[int, OpenedPair] = OrderedDict()
        self._seen: Fingerprint = ()
        self._sizes: dict[Path, int] = {}
        self._content = b""
        self.generation = 0
        self.page = self._made()

    def refreshed(self) -> Page:
        """The page, made anew if the runs have changed.

        Raises:
            DriftlineError: The runs cannot be compared now; the earlier page stays.
        """
        with self._lock:
            if fingerprint(self._watched) != self._seen or self._cut_off():
                self.page = self._made()
            return self.page

    def content(self) -> bytes:
        """The page's data, as a front end reads them."""
        with self._lock:
            if not self._content:
                about = {
                    "generation": self.generation,
                    "tensors": self.page.reference is not None and self.page.candidate is not None,
                }
                self._content = pack({**self.page.document, "view": about})
            return self._content

    def sheet(self, row: int, generation: int) -> dict[str, Any]:
        """The layout of a pair, which a reader needs before requesting a part of it."""
        pair = self._opened(row, generation)
        return {
            "rows": pair.rows,
            "columns": pair.columns,
            "shape": list(pair.shape),
            "axes": list(pair.axes),
            "stride": pair.stride,
            "complex": pair.reference.dtype.kind == "complex",
            "reference": pair.reference.dtype.name,
            "candidate": pair.candidate.dtype.name,
        }

    def pictures(self, row: int, generation: int) -> dict[str, Any]:
        """The pictures of a pair that a page shows at first."""
        return {"row": row, **pictures(self._opened(row, generation), budget=BUDGET)}

    def map(
        self, row: int, generation: int, region: Region | None, height: int, width: int
    ) -> dict[str, Any]:
        """The error of a region, cell by cell."""
        pair = self._opened(row, generation)
        cells = error_map(
            pair,
            region,
            height=min(height, MOST_CELLS),
            width=min(width, MOST_CELLS),
            budget=BUDGET,
        )
        inside = cells.extent.region
        return {
            "top": inside.top,
            "bottom": inside.bottom,
            "left": inside.left,
            "right": inside.right,
            "height": cells.height,
            "width": cells.width,
            "max": singles(cells.largest),
            "mean": singles(cells.mean),
            "reference": singles(cells.reference),
            "candidate": singles(cells.candidate),
            "note": cells.extent.note,
        }

    def region(
        self, row: int, generation: int, region: Region | None, bins: int, scale: Scale
    ) -> dict[str, Any]:
        """Figures and histograms of a region."""
        pair = self._opened(row, generation)
        bins = min(bins, MOST_BINS)
        figures = statistics(pair, region, budget=BUDGET)
        return {
            "statistics": figures.as_json(),
            "histogram": histogram(pair, region, bins=bins, scale=scale, budget=BUDGET).as_json(),
            "error": error_histogram(pair, region, bins=bins, budget=BUDGET).as_json(),
            "note": figures.extent.note,
        }

    def values(self, row: int, generation: int, region: Region) -> dict[str, Any]:
        """Both sides of a small region, element by element."""
        pair = self._opened(row, generation)
        block = values(pair, region, most=MOST_VALUES)
        rows = range(block["top"], block["top"] + block["height"])
        return {**block, "names": [pair.row_name(index) for index in rows]}

    def worst(self, row: int, generation: int) -> dict[str, Any]:
        """The position of the largest error that is known; else the first element."""
        pair = self._opened(row, generation)
        worst = largest_errors(pair, count=1, budget=BUDGET) if pair.elements else []
        element = worst[0] if worst else Element(0, 0, 0.0, 0.0)
        return {"row": element.row, "column": element.column}

    def _made(self) -> Page:
        seen = fingerprint(self._watched)  # before, so that changes in between are seen next time
        sizes = sizes_of(self._watched)
        page = self._make()
        self._seen, self._sizes = seen, sizes
        self._pairs.clear()
        self._content = b""
        self.generation += 1
        return page

    def _cut_off(self) -> Path | None:
        """A mapped file that became shorter, so that the missing bytes read as zeros."""
        for path, size in self._sizes.items():
            try:
                if path.stat().st_size < size:
                    return path
            except OSError:
                continue  # deleted: its mapped pages stay readable
        return None

    def _opened(self, row: int, generation: int) -> OpenedPair:
        with self._lock:
            if generation != self.generation:
                raise RunsChanged(
                    "the runs have changed since this page was made", hint="reload the page"
                )
            if (short := self._cut_off()) is not None:
                raise RunsChanged(
                    f"{short.name} has become shorter than it was", hint="reload the page"
                )
            opened = self._pairs.get(row)
            if opened is not None:
                self._pairs.move_to_end(row)
                return opened
            page = self.page
            if not 0 <= row < len(page.table.rows):
                raise BadInput(f"the page has no row {row}")
            pair = page.pairs.get(row)
            if pair is None or page.reference is None or page.candidate is None:
                shown = page.table.rows[row]
                why = shown.reason or "the runs behind this comparison are not there"
                raise BadInput(f"there are no two tensors to look at: {why}")
            opened = open_pair(page.reference, page.candidate, pair)
            self._pairs[row] = opened
            while len(self._pairs) > _OPEN:
                self._pairs.popitem(last=False)
            return opened


def fingerprint(paths: Sequence[Path]) -> Fingerprint:
    """Names, sizes and times of the files that describe a run, or of all files of a dump."""
    states: list[tuple[str, int, int]] = []
    for path in paths:
        indexes = [*path.glob(f"rank*/{INDEX}"), *path.glob(f"rank*/{PROCESS}")]
        if path.is_dir() and not indexes and not (path / MANIFEST).is_file():
            indexes = _everything(path)
        for file in (path, path / MANIFEST, *indexes):
            try:
                about = file.stat()
            except OSError:
                continue
            states.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(sorted(states))


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """The files of tensors that are mapped, with their sizes."""
    files = [path for path in paths if path.is_file()]
    for path in paths:
        files += path.glob(f"rank*/{SHARDS}")
    sizes: dict[Path, int] = {}
    for path in files:
        try:
            sizes[path] = path.stat().st_size
        except OSError:
            continue
    return sizes


def _everything(path: Path) -> list[Path]:
    listed: list[Path] = []
    for folder, _, files in os.walk(path):
        listed += [Path(folder, name) for name in files]
        if len(listed) > _LISTED:
            break
    return listed[:_LISTED]
