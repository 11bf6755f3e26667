"""`driftline show`: what is in a run, a comparison table, a thresholds or a tensor file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table
    from driftline.reporting.view import View
    from driftline.runs.run import Run

Format = Literal["table", "json", "csv", "markdown"]


def show(
    path: Annotated[Path, Option(urls=True)],
    /,
    *,
    tensors: bool = False,
    site: Annotated[list[str] | None, Option(metavar="GLOB")] = None,
    format: Format = "table",
    all: bool = False,
    verify: bool = False,
) -> int:
    """Look at a run, a comparison table, a thresholds file or a tensor file.

    A run shows where it comes from, its module tree with the ids that `dump -ids` takes, and what
    is missing from it. A folder that `compare -o` wrote shows the comparison again.

    Args:
        path: A run, a dump of another program, a comparison's folder, a thresholds file, or a
            tensor file.
        tensors: List the tensors with their statistics instead of the modules.
        site: Only sites that match, such as 'model.layers.*.mlp'; lists their tensors.
        format: table for people; json and csv for programs, whole; markdown for a review.
        all: Leave nothing out for length.
        verify: Read every byte of a run and say which are not those that were captured; exit 1.
    """
    from driftline.comparison.table.files import TABLE_FILE, is_table, open_table

    if is_table(path) or path.name == TABLE_FILE:
        return _show_table(script.step("found", open_table, path), format, all)
    from driftline.comparison.tolerance.thresholds import looks_like_thresholds

    if looks_like_thresholds(path):
        return _show_thresholds(path, format, all)
    from driftline.formats.registry import open_run

    run = script.step("run", open_run, path)
    if verify:
        return _verify(run)
    return _show_run(run, tuple(site or ()), tensors, format, all)


def _verify(run: Run) -> int:
    from driftline.errors import EXIT_DIFFERENT, EXIT_FINE
    from driftline.reporting.formatting import counted
    from driftline.runs.verify import verify

    lost = script.step("damaged", list, script.part(verify, run))
    script.end(lost)
    damaged = 0
    for loss in lost:
        damaged += 1
        print(loss)
    tensors = counted(sum(1 for record in run.records if record.digest), "tensor")
    kept = "their bytes are" if not damaged else f"{damaged} of them not"
    print(f"{run.name}: {tensors} with a digest, {kept} what was captured")
    return EXIT_DIFFERENT if damaged else EXIT_FINE


def _show_table(table: Table, format: Format, everything: bool) -> int:
    from driftline.reporting import writers

    script.act(writers.table, table, format, sys.stdout, everything=everything)
    script.end()
    return 0


def _show_thresholds(path: Path, format: Format, everything: bool) -> int:
    from driftline.comparison.tolerance.thresholds import load_thresholds
    from driftline.reporting.views import thresholds as report

    found = script.step("found", load_thresholds, path)
    if format == "json":
        from driftline.comparison.tolerance.thresholds import Thresholds
        from driftline.reporting import writers

        script.act(writers.write_json, script.part(Thresholds.as_json, found), sys.stdout)
    elif format == "csv":
        from driftline.reporting import writers

        script.act(writers.write_csv, script.part(report.sheet, found), sys.stdout)
    else:
        _paint(script.part(report.view, found, everything=everything or format != "table"), format)
    script.end()
    return 0


def _show_run(
    run: Run, globs: tuple[str, ...], tensors: bool, format: Format, everything: bool
) -> int:
    from driftline.reporting.views import run as report

    if format == "json":
        from driftline.reporting import writers

        document = script.part(report.document, run, globs=globs, tensors=tensors)
        script.act(writers.write_json, document, sys.stdout)
    elif format == "csv":
        from driftline.reporting import writers

        script.act(
            writers.write_csv,
            script.part(report.sheet, run, globs=globs, statistics=tensors),
            sys.stdout,
        )
    else:
        whole = everything or format != "table"
        _paint(
            script.part(report.view, run, globs=globs, tensors=tensors, everything=whole), format
        )
    script.end()
    return 0


def _paint(view: View, format: Format) -> None:
    if format == "markdown":
        from driftline.reporting import markdown

        script.act(print, script.part(markdown.paint, view), end="")
    else:
        from driftline.reporting import terminal

        script.act(terminal.show, view)
