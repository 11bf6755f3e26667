"""`driftline trend`: a figure of every layer over steps or releases."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import SELECTION, SEVERAL, place
from driftline.diagnosis.trend import Series, Trend
from driftline.diagnosis.trend import trend as follow
from driftline.errors import EXIT_FINE, BadInput
from driftline.formats.registry import open_run
from driftline.reporting.formatting import spark
from driftline.reporting.terminal import written_for
from driftline.units import csv_cell, printed_json, visible

# About one screen; --all shows the rest.
MOST_SHOWN = 20


def trend(
    *runs: Annotated[Path, place("RUNS")],
    figure: Literal["rms", "max_abs", "mean", "std", "nonfinite", "zeros"] = "rms",
    port: Annotated[list[str] | None, SEVERAL, Parameter(metavar="PORT", group=SELECTION)] = None,
    site: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB", group=SELECTION)] = None,
    all: bool = False,
    format: Literal["table", "csv", "json"] = "table",
) -> int:
    """Follow a figure of every layer over the steps of a run, or over several runs.

        driftline dump -o train --step '*' --keep summary --exec "python train.py"
        driftline trend train
        driftline trend release-1 release-2 release-3 --figure max_abs

    Lists the layers whose figure became, and stayed, twice as large or half as large as usual,
    the earliest first. Problems of the runs themselves are printed before: NaN and infinity,
    damaged tensors, a program that was killed. Runs with summaries only are enough.

    Args:
        runs: One run of many steps, or several runs in their order.
        figure: The figure to follow.
        port: Only these ports: output, input, grad_output, param, ... Default: output.
        site: Only module paths that match.
        all: Show every layer, in execution order.
        format: csv has one line per tensor and point; json has everything.
    """
    if not runs:
        raise BadInput("`driftline trend` needs a run", hint="see driftline trend --help")
    opened = [script.part(open_run, path) for path in runs]
    course = script.step(
        "found",
        follow,
        opened,
        figure=figure,
        ports=tuple(port or ("output",)),
        sites=tuple(site or ()),
    )
    script.end(course)
    if format == "json":
        print(printed_json(course.to_json(), indent=1))
    elif format == "csv":
        _write_csv(course)
    else:
        for line in lines(course, everything=all):
            print(written_for(sys.stdout, visible(line)))
    return EXIT_FINE


def lines(course: Trend, *, everything: bool = False) -> Iterator[str]:
    """The lines of the table for people."""
    yield from course.faults
    moved = course.moved()
    points = f"{len(course.points)} {course.over}, {course.points[0]} to {course.points[-1]}"
    if moved:
        first = moved[0]
        verb = "grew" if first.ratio > 1 else "shrank"
        yield (
            f"{len(moved)} of {len(course.series)} tensors left their usual {course.figure}; "
            f"the first is {first.site}, which {verb} from "
            f"{_point(course, first)} on ({_times(first.ratio)})"
        )
    else:
        # Figures are those of the finite elements.
        rest = "apart from that, " if course.faults else ""
        yield f"{rest}all {len(course.series)} tensors kept their usual {course.figure} ({points})"
    # If no tensor moved, all of them are listed.
    listed = list(course.series) if everything or not moved else moved
    shown = listed if everything else listed[:MOST_SHOWN]
    yield ""
    width = max(len(_name(series)) for series in shown)
    yield f"{'tensor':<{width}}  {'first':>10}  {'last':>10}  {'since':>8}  {points}"
    for series in shown:
        values = [value for value in series.values if value is not None]
        since = "" if series.since is None else course.points[series.since]
        yield (
            f"{_name(series):<{width}}  {values[0]:>10.4g}  {values[-1]:>10.4g}  {since[-8:]:>8}  "
            f"{spark(series.values)}"
        )
    if len(listed) > len(shown):
        yield f"... and {len(listed) - len(shown)} more (--all shows every one)"
    for note in course.notes:
        yield f"note: {note}"


def _name(series: Series) -> str:
    slot = "" if series.slot == "0" else f" {series.slot}"
    return f"{series.site} {series.port}{slot}"


def _point(course: Trend, series: Series) -> str:
    name = course.points[series.since or 0]
    return f"step {name}" if course.over == "steps" else f"run {name}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "from nothing"


def _write_csv(course: Trend) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["site", "port", "slot", course.over.removesuffix("s"), course.figure])
    for series in course.series:
        for point, value in zip(course.points, series.values, strict=True):
            writer.writerow(map(csv_cell, (series.site, series.port, series.slot, point, value)))
