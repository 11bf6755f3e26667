"""`driftline check`: a comparison or layer files → limits → a report and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import BadInput


def check(
    table: Annotated[Path, Option(metavar="TABLE", urls=True)],
    /,
    *,
    thresholds: Annotated[Path | None, Option(metavar="FILE.json")] = None,
    max: Annotated[list[str] | None, Option(metavar="METRIC=VALUE")] = None,
    min: Annotated[list[str] | None, Option(metavar="METRIC=VALUE")] = None,
    slack: Annotated[float, Option(metavar="TIMES")] = 1.0,
    min_coverage: Annotated[float, Option(metavar="SHARE")] = 0.0,
    model: str | None = None,
    output: Annotated[
        Path | None, Option(names=("--output", "-o"), metavar="DIR", urls=True)
    ] = None,
    format: Literal["table", "json", "csv", "markdown", "github", "junit"] = "table",
    all: bool = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"))] = False,
    force: bool = False,
) -> int:
    """Judge a comparison by thresholds or other limits; names the first layer beyond its own.

        driftline check table --thresholds tiny-thresholds.json
        driftline check table --max relative_l2=0.01

    Reads no tensor: what was measured is in the table. Exit code 1 if a limit is broken, 2 if
    nothing could be judged.

    Args:
        table: A folder that `driftline compare -o` wrote, or one of layer files (.abs_diff.csv,
            .cos_sim.csv).
        thresholds: What `driftline calibrate` or `driftline thresholds --layer_io` wrote.
        max: The largest value of a metric that passes, for every tensor; may be repeated.
        min: The smallest value that passes, for metrics such as cosine; may be repeated.
        slack: How many times its threshold a tensor may reach. An average of clean runs is passed
            by about half of all clean runs: allow 2 or more there.
        min_coverage: Fail when less than this share of all tensors was judged, such as 0.9.
        model: Refuse thresholds for another model than this.
        output: Also write the judged comparison there.
        format: table for people; json, csv and markdown for programs and reviews; github
            (annotations and a step summary) and junit for CI.
        all: Show every row rather than the worst.
        quiet: Print nothing; the exit code says it.
        force: Replace output that is there already.
    """
    if thresholds is None and not max and not min:
        raise BadInput(
            "nothing says what is allowed",
            hint="--thresholds FILE.json, --max relative_l2=0.01 or --min cosine=0.999",
        )
    from driftline.comparison.pipeline import check as judge_again
    from driftline.comparison.table.files import is_table, open_table
    from driftline.comparison.table.table import Table
    from driftline.comparison.tolerance.tolerance import limits_from
    from driftline.comparison.verdict.judge import exit_code
    from driftline.decoding.files.layer_files import table_to_judge

    known = None
    if thresholds is not None:
        from driftline.comparison.tolerance.thresholds import load_thresholds

        known = script.part(load_thresholds, thresholds, model=model)
    if is_table(table) and table.suffix != ".layers":
        found = script.part(open_table, table)
    else:
        found = script.part(table_to_judge, table, known)
    limits = None
    if max or min:  # what may be limited is what was measured
        columns = table_to_judge(table).columns if script.asked() else found.columns
        limits = limits_from(None, columns, at_most=max or (), at_least=min or ())
    judged = script.step(
        "table",
        judge_again,
        found,
        thresholds=known,
        limits=limits,
        slack=slack,
        min_coverage=min_coverage,
    )
    if output is not None:
        script.act(Table.write, judged, output, force=force)
    script.end(judged)
    if not quiet:
        from driftline.reporting import writers

        writers.table(judged, format, sys.stdout, everything=all, command="check")
    return exit_code(judged)
