"""`driftline trend`: a figure of every layer over steps or releases."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.diagnosis.trend import Series, Trend
from driftline.diagnosis.trend import trend as follow
from driftline.errors import EXIT_FINE, BadInput
from driftline.formats.registry import open_run
from driftline.reporting.formatting import spark
from driftline.reporting.terminal import written_for

_SHOWN = 20


def trend(
    *runs: Path,
    figure: Literal["rms", "max_abs", "mean", "std", "nonfinite", "zeros"] = "rms",
    port: Annotated[list[str] | None, Option(several=True, metavar="PORT")] = None,
    site: Annotated[list[str] | None, Option(several=True, metavar="GLOB")] = None,
    all: bool = False,
    format_: Literal["table", "csv", "json"] = "table",
) -> int:
    """Follow a figure of every layer over the steps of a run, or over several runs.

        driftline dump -o train --step '*' --keep summary --exec "python train.py"
        driftline trend train
        driftline trend release-1 release-2 release-3 --figure max_abs

    Shows first the layers that left their usual size (twice as large or half as large, for good),
    the earliest first: when did this layer start to grow? Runs that hold summaries only are enough.

    Args:
        runs: One run of many steps, or several runs in their order.
        figure: What is followed.
        port: Which sides: output, input, grad_output, param, ... Default: output.
        site: Only module paths that match.
        all: Every layer, in execution order.
        format_: csv has one line per tensor and point, json everything.
    """
    if not runs:
        raise BadInput("`driftline trend` needs a run", hint="see driftline trend --help")
    opened = [script.part(open_run, path) for path in runs]
    found = script.step(
        "found",
        follow,
        opened,
        figure=figure,
        ports=tuple(port or ("output",)),
        sites=tuple(site or ()),
    )
    script.end(found)
    if format_ == "json":
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
    elif format_ == "csv":
        _write_csv(found)
    else:
        for line in lines(found, everything=all):
            print(written_for(sys.stdout, line))
    return EXIT_FINE


def lines(found: Trend, *, everything: bool = False) -> Iterator[str]:
    """What a person reads."""
    moved = found.moved()
    points = f"{len(found.points)} {found.over}, {found.points[0]} to {found.points[-1]}"
    if moved:
        first = moved[0]
        word = "grew" if first.ratio > 1 else "shrank"
        yield (
            f"{len(moved)} of {len(found.series)} tensors left their usual {found.figure}; "
            f"the first is {first.site}, which {word} from "
            f"{_point(found, first)} on ({_times(first.ratio)})"
        )
    else:
        yield f"all {len(found.series)} tensors kept their usual {found.figure} ({points})"
    shown = list(found.series) if everything or not moved else moved
    cut = shown if everything else shown[:_SHOWN]
    yield ""
    width = max(len(_name(one)) for one in cut)
    yield f"{'tensor':<{width}}  {'first':>10}  {'last':>10}  {'since':>8}  {points}"
    for one in cut:
        known = [v for v in one.values if v is not None]
        since = "" if one.since is None else found.points[one.since]
        yield (
            f"{_name(one):<{width}}  {known[0]:>10.4g}  {known[-1]:>10.4g}  {since[-8:]:>8}  "
            f"{spark(one.values)}"
        )
    if len(shown) > len(cut):
        yield f"... and {len(shown) - len(cut)} more (--all shows every one)"
    for note in found.notes:
        yield f"note: {note}"


def _name(one: Series) -> str:
    slot = "" if one.slot == "0" else f" {one.slot}"
    return f"{one.site} {one.port}{slot}"


def _point(found: Trend, one: Series) -> str:
    name = found.points[one.since or 0]
    return f"step {name}" if found.over == "steps" else f"run {name}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "from nothing"


def _write_csv(found: Trend) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["site", "port", "slot", found.over.removesuffix("s"), found.figure])
    for one in found.series:
        for point, value in zip(found.points, one.values, strict=True):
            writer.writerow([one.site, one.port, one.slot, point, "" if value is None else value])
