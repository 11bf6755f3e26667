"""The state behind one viewer: its page, the pairs of tensors that are open, rows measured before.

`Session` answers questions about the page and makes it anew when the runs have changed. `RowCache`
compares growing runs: a line of a run's index is final once written, so a pair of two known lines
need not be measured again. Judging is repeated each time, because which row fails first depends on
all of them. Knows nothing of HTTP.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.evidence.conversions import with_conversions
from driftline.comparison.evidence.rules import with_evidence
from driftline.comparison.measure.scheduler import Progress, measure
from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.defaults import elementwise
from driftline.comparison.tolerance.thresholds import Thresholds, load_thresholds
from driftline.comparison.tolerance.tolerance import Tolerance
from driftline.comparison.verdict.judge import judge
from driftline.errors import BadInput
from driftline.reporting.html.page import pack, singles
from driftline.reporting.html.report import Page
from driftline.reporting.html.tensors.pair import OpenedPair, Region, open_pair
from driftline.reporting.html.tensors.pictures import (
    Element,
    error_map,
    largest_errors,
    pictures,
    values,
)
from driftline.reporting.html.tensors.statistics import (
    Scale,
    error_histogram,
    histogram,
    statistics,
)
from driftline.runs.layout import INDEX, MANIFEST, PROCESS
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


class RowCache:
    """Rows of pairs that were measured; calling it compares two runs as `driftline.compare` does.

    Args:
        thresholds: Limits of each layer, or the path of a file of them.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all), the first time.
    """

    def __init__(
        self,
        thresholds: Thresholds | StrPath | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        # Loaded once; the file may change while the viewer runs.
        if thresholds is not None and not isinstance(thresholds, Thresholds):
            thresholds = load_thresholds(thresholds)
        self._tolerance = Tolerance(thresholds=thresholds)
        self._threads = threads
        self._progress = progress
        self._rows: dict[Pair, Row] = {}
        self.measured = 0

    def __call__(self, reference: Run, candidate: Run, plan: Plan) -> Table:
        """The judged table of a plan."""
        fresh = tuple(pair for pair in plan.pairs if pair not in self._rows)
        # Pairs and lone tensors apart: rows of pairs alone come in the order of the pairs.
        new = measure(
            Plan(fresh),
            reference,
            candidate,
            elementwise=elementwise,
            threads=self._threads,
            progress=self._progress,
        )
        self._progress = None  # the next time somebody waits in a browser, not at a terminal
        self.measured += len(fresh)
        row_of_pair = {**self._rows, **dict(zip(fresh, new.rows, strict=True))}
        # Only what could be measured is final: a tensor that is not whole yet will be.
        self._rows = {
            pair: row_of_pair[pair] for pair in plan.pairs if row_of_pair[pair].status == "unjudged"
        }
        table = measure(plan._replace(pairs=()), reference, candidate)
        rows = [row_of_pair[pair] for pair in plan.pairs]
        rows += [row for row in table.rows if row.status != "extra"]
        extra = [row for row in table.rows if row.status == "extra"]
        rows.sort(key=lambda row: (row.key.rank, row.key.process, row.order))
        table = table.with_rows((*rows, *extra))
        # Only lone tensors can turn out to be conversions of one another.
        if plan.missing or plan.extra:
            table = with_conversions(table, reference, candidate, STANDARD, elementwise)
        table = table.with_rows(with_evidence(table.rows, plan.pairs, reference, candidate))
        if self._tolerance.thresholds is None:
            return judge(table, self._tolerance)
        from driftline.comparison.pipeline import judge_by

        return judge_by(table, self._tolerance)


# The session: one page, and the pairs of tensors that are open.


BUDGET = 1 << 22
"""Elements that are looked at for one answer; more would keep a reader waiting."""
MOST_CELLS = 512
MOST_BINS = 256
MOST_VALUES = 1 << 12
_OPEN = 4
"""Pairs that stay open: a recipe may have made a copy of a tensor."""
_LISTED = 20_000
"""Files of a dump that are looked at to see whether it has changed."""

SHARDS = "*.safetensors"

Fingerprint = tuple[tuple[str, int, int], ...]


class RunsChanged(BadInput):
    """A question about rows of a page that has been made anew since."""


class Session:
    """The page, and pairs of it.

    Args:
        make: Opens the runs and compares them.
        watched: What the page depends on; when it changes, the next reader gets a new one.
    """

    def __init__(self, make: Callable[[], Page], watched: Sequence[Path]) -> None:
        self._make = make
        self._watched = tuple(watched)
        # Requests come from several threads; the page and its opened pairs change together.
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
            DriftlineError: They cannot be compared as they are now; the page before stays.
        """
        with self._lock:
            # A page is made anew only when somebody loads it, not while it is being
            # read.
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
        """How a pair is laid out: what a reader needs to know before asking for a part of it."""
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
        """What a page shows of a pair without being asked."""
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
        window = values(pair, region, most=MOST_VALUES)
        rows = range(window["top"], window["top"] + window["height"])
        return {**window, "names": [pair.row_name(row_number) for row_number in rows]}

    def worst(self, row: int, generation: int) -> dict[str, Any]:
        """Where the error is largest, as far as that was looked at; the first element if not."""
        pair = self._opened(row, generation)
        largest = largest_errors(pair, count=1, budget=BUDGET) if pair.elements else []
        element = largest[0] if largest else Element(0, 0, 0.0, 0.0)
        return {"row": element.row, "column": element.column}

    def _made(self) -> Page:
        seen = fingerprint(self._watched)  # before: what is written meanwhile is seen next time
        sizes = sizes_of(self._watched)
        page = self._make()
        self._seen, self._sizes = seen, sizes
        self._pairs.clear()
        self._content = b""
        self.generation += 1
        return page

    def _cut_off(self) -> Path | None:
        """A mapped file that has lost bytes: to read them would end the process."""
        for path, size in self._sizes.items():
            try:
                if path.stat().st_size < size:
                    return path
            except OSError:
                continue  # gone altogether: what is mapped of it stays
        return None

    def _opened(self, row: int, generation: int) -> OpenedPair:
        with self._lock:
            # Row numbers of an older page may now mean other tensors.
            if generation != self.generation:
                raise RunsChanged(
                    "the runs have changed since this page was made", hint="reload the page"
                )
            if (short := self._cut_off()) is not None:
                raise RunsChanged(
                    f"{short.name} has become shorter than it was", hint="reload the page"
                )
            cached = self._pairs.get(row)
            if cached is not None:
                # The pair used longest ago is closed first.
                self._pairs.move_to_end(row)
                return cached
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
    """Names, sizes and times of the files that say what is in a run, or of all of a dump's."""
    entries: list[tuple[str, int, int]] = []
    for path in paths:
        indexes = [*path.glob(f"rank*/{INDEX}"), *path.glob(f"rank*/{PROCESS}")]
        # Dumps of other programs have no index, so every file counts.
        if path.is_dir() and not indexes and not (path / MANIFEST).is_file():
            indexes = _everything(path)
        for file in (path, path / MANIFEST, *indexes):
            try:
                about = file.stat()
            except OSError:
                continue
            entries.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(sorted(entries))


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """Files of tensors that are mapped while somebody looks, and how long they are."""
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
    listing: list[Path] = []
    for folder, _, files in os.walk(path):
        listing += [Path(folder, name) for name in files]
        # Walking a folder of millions of files would stall every reload.
        if len(listing) > _LISTED:
            break
    return listing[:_LISTED]
