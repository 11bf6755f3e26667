"""Trends: how a statistic of each site develops over the steps of a run, or over several runs.

Stored summaries are used if a run has them; otherwise they are computed from values. A trend says
since when a site has grown or shrunk, but not why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, NamedTuple

from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.numerics.kernel import summarize
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, kept_elements
from driftline.runs.scope import scope_of
from driftline.runs.views import only

SCHEMA = 1
FIGURES = ("rms", "max_abs", "mean", "std", "nonfinite", "zeros")
GREW = 2.0
"""A site has grown (or shrunk) at this multiple of its usual size (or at the inverse of it)."""


class Series(NamedTuple):
    """One tensor's figure over all points.

    Attributes:
        site: The site.
        port: The port of the site, such as `output`.
        slot: The slot of the port.
        values: One value per point; None if the point has none.
        ratio: The last value divided by the usual one at the beginning.
        since: Index of the point from which all values are unusual; None if there is none.
    """

    site: str
    port: str
    slot: str
    values: tuple[float | None, ...]
    ratio: float
    since: int | None


class Trend(NamedTuple):
    """All series.

    Attributes:
        figure: The statistic.
        over: What the points are: steps or runs.
        points: Names of the points.
        series: One series per tensor, in execution order.
        notes: Tensors that were left out, and why.
        faults: Problems of the runs themselves, the most serious first: a program that did not end
            normally, NaN and infinity, tensors that cannot be read.
    """

    figure: str
    over: str
    points: tuple[str, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def moved(self) -> list[Series]:
        """Series that left their usual size; the earliest first, then in execution order."""
        departed = [series for series in self.series if series.since is not None]
        order = {id(series): position for position, series in enumerate(self.series)}
        return sorted(departed, key=lambda series: (series.since or 0, order[id(series)]))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "figure": self.figure,
            "over": self.over,
            "points": list(self.points),
            "notes": list(self.notes),
            "faults": list(self.faults),
            "series": [
                {
                    "site": series.site,
                    "port": series.port,
                    "slot": series.slot,
                    "since": None if series.since is None else self.points[series.since],
                    "ratio": series.ratio if math.isfinite(series.ratio) else None,
                    "values": [v if v is None or math.isfinite(v) else None for v in series.values],
                }
                for series in self.series
            ],
        }


def trend(
    runs: Sequence[Run],
    *,
    figure: str = "rms",
    ports: Sequence[str] = ("output",),
    sites: Sequence[str] = (),
) -> Trend:
    """Follow one figure of each tensor over the points.

    Args:
        runs: One run, whose steps are the points, or several runs, each of which is a point for all
            its steps.
        figure: rms, max_abs, mean, std, nonfinite or zeros.
        ports: Ports of the sites.
        sites: Globs; only sites that match one of them are followed. All sites by default.

    Raises:
        BadInput: The figure does not exist, there is only one point, or there is no tensor.
    """
    if figure not in FIGURES:
        raise BadInput(f"there is no figure '{figure}'", hint=did_you_mean(figure, FIGURES))
    if sites:
        # Sites are filtered first, so that steps that only other sites have do not become points.
        runs = [only(run, lambda r: any(fnmatchcase(r.key.site, g) for g in sites)) for run in runs]
    over = "steps" if len(runs) == 1 else "runs"
    # Steps are points only within one run. Several runs are compared as a whole, because their
    # steps need not correspond.
    points: list[Any] = (
        sorted({record.key.step for record in runs[0].records})
        if over == "steps"
        else list(range(len(runs)))
    )
    if len(points) < 2:
        raise BadInput(
            f"a trend needs more than one point, and '{runs[0].name}' has one step",
            hint="dump all steps with --step '*' --keep summary, or give several runs",
        )
    notes: dict[str, int] = {}
    poisoned: list[_Poisoned] = []
    gathered = _gathered(runs, points if over == "steps" else None, figure, ports, notes, poisoned)
    names = tuple(map(str, points)) if over == "steps" else tuple(run.name for run in runs)
    faults = (*_endings(runs), *_poison_sentences(poisoned, names, over), *_losses(runs))
    if faults and not gathered:
        raise BadInput(f"there is nothing to follow: {faults[0]}", hint="dump it again")
    if not gathered:
        # If all tensors were skipped, the first reason is reported.
        why = next(iter(notes), f"no floating-point tensor of {', '.join(ports)}")
        raise BadInput(f"there is nothing to follow: {why}", hint="dump with --keep summary")
    return Trend(
        figure,
        over,
        names,
        tuple(_series(key, values, figure) for key, values in gathered.items()),
        tuple(f"{count} tensors: {why}" for why, count in notes.items()),
        faults,
    )


class _Poisoned(NamedTuple):
    """A tensor with NaN or infinity: its point, its place, the number of such elements."""

    point: int
    order: int
    key: TensorKey
    nonfinite: int
    elements: int


def _endings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each program that did not end normally."""
    for run in runs:
        scope = scope_of(run)
        for words in (scope.ending, *(f"left {step} unfinished" for step in scope.unfinished)):
            if words:
                yield f"the program of {run.name} {words}"


def _poison_sentences(
    poisoned: Sequence[_Poisoned], points: Sequence[str], over: str
) -> Iterator[str]:
    """Yield a sentence that names the first NaN or infinity, and how many tensors have one."""
    if not poisoned:
        return
    first = min(poisoned, key=lambda tensor: (tensor.point, tensor.order))
    tensors = {(tensor.key.site, tensor.key.port, tensor.key.slot) for tensor in poisoned}
    place = f"step {points[first.point]}" if over == "steps" else f"run {points[first.point]}"
    others = len(tensors) - 1
    more = f"; in {others} more tensor{'s' if others > 1 else ''}, too" if others else ""
    yield (
        f"NaN or infinity from {place} on: first in {first.key.site or '(model)'} "
        f"{first.key.port}, {first.nonfinite} of {first.elements} elements{more}; "
        "driftline errcheck names the operator"
    )


def _losses(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each run with captured tensors that cannot be read."""
    for run in runs:
        losses = list(run.losses)
        if losses:
            more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
            yield f"{run.name} is damaged: {losses[0]}{more}; driftline show {run.name} lists them"


def _gathered(
    runs: Sequence[Run],
    steps: Sequence[int] | None,
    figure: str,
    ports: Sequence[str],
    notes: dict[str, int],
    poisoned: list[_Poisoned],
) -> dict[tuple[str, str, str], list[list[float]]]:
    """Values at each point by site, port and slot; points are steps, or runs if `steps` is None."""
    index = {step: position for position, step in enumerate(steps or ())}
    count = len(runs) if steps is None else len(steps)
    gathered: dict[tuple[str, str, str], list[list[float]]] = {}
    for number, run in enumerate(runs):
        for record in run.records:
            if record.key.port not in ports or not DTYPES[record.dtype].is_floating:
                continue
            summary = _summary(run, record, notes)
            if summary is None:
                continue
            position = number if steps is None else index[record.key.step]
            # Figures leave these out, so without this list a run with overflow would look normal.
            bad = summary.nan + summary.pos_inf + summary.neg_inf
            if bad:
                poisoned.append(_Poisoned(position, record.order, record.key, bad, summary.count))
            value = figure_of(summary, figure)
            if value is None:
                continue
            key = (record.key.site, record.key.port, record.key.slot)
            gathered.setdefault(key, [[] for _ in range(count)])[position].append(value)
        # Memory is released after each run, because many runs together may not fit.
        run.release()
    return gathered


def _summary(run: Run, record: Record, notes: dict[str, int]) -> Summary | None:
    summary = record.summary
    if summary is None:
        if record.kept not in ("full", "sample"):
            why = f"only the {record.kept} was kept, which has no figures"
            notes[why] = notes.get(why, 0) + 1
            return None
        try:
            raw = run.raw(record)
        except DriftlineError as problem:
            notes[str(problem)] = notes.get(str(problem), 0) + 1
            return None
        summary = summarize(raw, DTYPES[record.dtype], count=kept_elements(record))
    return summary


def figure_of(summary: Summary, figure: str) -> float | None:
    """One statistic of a summary; None if it is NaN."""
    if figure == "rms":
        finite = summary.count - summary.nan - summary.pos_inf - summary.neg_inf
        value = summary.l2 / math.sqrt(finite) if finite > 0 else math.nan
    elif figure == "max_abs":
        value = max(abs(summary.min), abs(summary.max))
    elif figure == "nonfinite":
        value = float(summary.nan + summary.pos_inf + summary.neg_inf)
    else:
        figures: Mapping[str, float] = {
            "mean": summary.mean,
            "std": summary.std,
            "zeros": float(summary.zeros),
        }
        value = figures[figure]
    return None if math.isnan(value) else value


def _series(key: tuple[str, str, str], gathered: Sequence[Sequence[float]], figure: str) -> Series:
    """One series; of several values at one point (visits, ranks, steps), the largest counts."""
    values = tuple(
        max(point_values, key=abs) if point_values else None for point_values in gathered
    )
    usual, since = _departure(values, grows_from_nothing=figure in ("nonfinite", "zeros"))
    last = next((v for v in reversed(values) if v is not None), math.nan)
    # If the usual value is zero, any growth is infinite, and a last value of zero is no growth.
    ratio = abs(last) / usual if usual else (1.0 if not last else math.inf)
    return Series(*key, values, ratio, since)


def _departure(
    values: Sequence[float | None], *, grows_from_nothing: bool
) -> tuple[float, int | None]:
    """The usual size at the beginning, and the point from which all values are unusual.

    The usual size is the median of the first third, at least one point and at most twenty.
    """
    sizes = [(position, abs(value)) for position, value in enumerate(values) if value is not None]
    if not sizes:
        return 0.0, None
    head = sizes[: max(1, min(20, len(sizes) // 3))]
    usual = median(size for _, size in head)
    # If a statistic is usually zero, the smallest other size is the usual one. For counts zero
    # itself is usual.
    if not usual and not grows_from_nothing:
        usual = min((size for _, size in sizes if size), default=0.0)
    since: int | None = None
    # The search runs backwards, because only a departure that lasts to the last point counts.
    for position, size in reversed(sizes):
        away = size > 0 if not usual else not usual / GREW < size < usual * GREW
        if not away:
            break
        since = position
    return usual, since
