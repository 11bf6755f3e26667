"""Trends: how a statistic of each site develops over the steps of a run, or over several runs.

Uses stored summaries where a run has nothing else, and computes them from values where it has.
Says since when a site has grown; does not say why.
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
"""A site has grown (or shrunk) when it is this many times (or this fraction of) its usual size."""


class Series(NamedTuple):
    """One tensor's figure over all points.

    Attributes:
        site: Where.
        port: Which side of it.
        slot: Which tensor.
        values: One per point; None where there is none.
        ratio: The last value over the usual one of the beginning.
        since: Index of the first point that is out of the usual and is not followed by a usual one;
            None if there is no such point.
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
        over: steps or runs.
        points: Names of the points.
        series: One per tensor, in execution order.
        notes: What could not be taken into account.
        faults: What is wrong with the runs themselves, the gravest first: a program that did not
            end well, NaN and infinity, tensors that cannot be read.
    """

    figure: str
    over: str
    points: tuple[str, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def moved(self) -> list[Series]:
        """Series that left their usual size: the earliest first, then in execution order."""
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
    """Follow one figure of every tensor.

    Args:
        runs: One run: its steps are the points. Several: each run is one, its steps taken together.
        figure: rms, max_abs, mean, std, nonfinite or zeros.
        ports: Which sides.
        sites: Globs; only sites that match one of them. All, when none is given.

    Raises:
        BadInput: A figure that does not exist, one point only, or nothing to follow.
    """
    if figure not in FIGURES:
        raise BadInput(f"there is no figure '{figure}'", hint=did_you_mean(figure, FIGURES))
    if sites:
        # Filtering comes first, so that steps which only other sites have are no points.
        runs = [only(run, lambda r: any(fnmatchcase(r.key.site, g) for g in sites)) for run in runs]
    over = "steps" if len(runs) == 1 else "runs"
    # Steps are points only within one run; several runs are compared as wholes, because their steps
    # need not correspond.
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
        # If every tensor was skipped, the first reason explains the failure best.
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
    """A tensor with NaN or infinity in it: at which point, where, how many of how many."""

    point: int
    order: int
    key: TensorKey
    nonfinite: int
    elements: int


def _endings(runs: Sequence[Run]) -> Iterator[str]:
    """Programs that did not end well."""
    for run in runs:
        scope = scope_of(run)
        for words in (scope.ending, *(f"left {step} unfinished" for step in scope.unfinished)):
            if words:
                yield f"the program of {run.name} {words}"


def _poison_sentences(
    poisoned: Sequence[_Poisoned], points: Sequence[str], over: str
) -> Iterator[str]:
    """Who has the first NaN or infinity, and how far it went."""
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
    """Tensors that were captured and cannot be read."""
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
    """Site, port and slot -> the values at every point, which are steps or, without them, runs."""
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
            # Figures leave these out, so a run that has blown up would look like any other.
            bad = summary.nan + summary.pos_inf + summary.neg_inf
            if bad:
                poisoned.append(_Poisoned(position, record.order, record.key, bad, summary.count))
            value = figure_of(summary, figure)
            if value is None:
                continue
            key = (record.key.site, record.key.port, record.key.slot)
            gathered.setdefault(key, [[] for _ in range(count)])[position].append(value)
        # Tensors that were read are dropped run by run; many runs together may not fit into memory.
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
    """One statistic of a summary; None if it is not known."""
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
    """One series; several tensors of one point (visits, ranks, steps) count as their largest."""
    values = tuple(
        max(point_values, key=abs) if point_values else None for point_values in gathered
    )
    usual, since = _departure(values, grows_from_nothing=figure in ("nonfinite", "zeros"))
    last = next((v for v in reversed(values) if v is not None), math.nan)
    # A first value of zero makes every growth infinite; two zeros are no growth.
    ratio = abs(last) / usual if usual else (1.0 if not last else math.inf)
    return Series(*key, values, ratio, since)


def _departure(
    values: Sequence[float | None], *, grows_from_nothing: bool
) -> tuple[float, int | None]:
    """The usual size at the beginning, and where the values leave it for good.

    The usual size is the median of the first third, at least one point and at most twenty.
    """
    sizes = [(position, abs(value)) for position, value in enumerate(values) if value is not None]
    if not sizes:
        return 0.0, None
    head = sizes[: max(1, min(20, len(sizes) // 3))]
    usual = median(size for _, size in head)
    # A statistic that starts at zero has no size to grow from, except counts, where zero is the
    # usual.
    if not usual and not grows_from_nothing:
        usual = min((size for _, size in sizes if size), default=0.0)
    since: int | None = None
    # From the end backwards: only a departure that lasts to the last point counts.
    for position, size in reversed(sizes):
        away = size > 0 if not usual else not usual / GREW < size < usual * GREW
        if not away:
            break
        since = position
    return usual, since
