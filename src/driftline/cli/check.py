"""`driftline check`: a comparison or layer files → limits → a report and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from driftline.cli.parsing import Option
from driftline.errors import BadInput

if TYPE_CHECKING:
    from driftline.comparison.table import Table
    from driftline.tolerance.thresholds import Thresholds


def check(
    table: Annotated[Path, Option(metavar="TABLE")],
    /,
    *,
    thresholds: Annotated[Path | None, Option(metavar="FILE.json")] = None,
    max: Annotated[list[str] | None, Option(metavar="METRIC=VALUE")] = None,
    min: Annotated[list[str] | None, Option(metavar="METRIC=VALUE")] = None,
    slack: Annotated[float, Option(metavar="TIMES")] = 1.0,
    min_coverage: Annotated[float, Option(metavar="SHARE")] = 0.0,
    model: str | None = None,
    output: Annotated[Path | None, Option(names=("--output", "-o"), metavar="DIR")] = None,
    format: Literal["table", "json", "csv", "markdown"] = "table",
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
        format: table for people; json, csv and markdown for programs and reviews.
        all: Show every row rather than the worst.
        quiet: Print nothing; the exit code says it.
        force: Replace output that is there already.
    """
    if thresholds is None and not max and not min:
        raise BadInput(
            "nothing says what is allowed",
            hint="--thresholds FILE.json, --max relative_l2=0.01 or --min cosine=0.999",
        )
    from driftline.gating.checking import check as judge_again
    from driftline.gating.judge import exit_code
    from driftline.tolerance.limits import limits_from

    known = None
    if thresholds is not None:
        from driftline.tolerance.thresholds import load_thresholds

        known = load_thresholds(thresholds, model=model)
    found = _open(table, known)
    limits = limits_from(None, found.columns, at_most=max or (), at_least=min or ())
    judged = judge_again(
        found, thresholds=known, limits=limits, slack=slack, min_coverage=min_coverage
    )
    if output is not None:
        judged.write(output, force=force)
    if not quiet:
        from driftline.reports import emit

        emit.table(judged, format, sys.stdout, everything=all)
    return exit_code(judged)


def _open(path: Path, known: Thresholds | None) -> Table:
    from driftline.comparison.storage import TABLE_FILE, is_table, open_table

    if known is not None and is_table(path):
        from driftline.decoding.layer_table import table_of_files

        files = table_of_files(path, known)
        if files is not None:
            return files

    if path.is_dir() and not is_table(path):
        from driftline.decoding.layer_table import layer_table
        from driftline.decoding.metric_files import find_metric_files

        found = find_metric_files(path)
        if any(file.layer for file in found.files):
            return layer_table(found, str(path), known)
        if found.files:
            raise BadInput(
                f"{path} holds scores of tokens, not of layers",
                hint="`driftline validate` applies thresholds to those",
            )
    if path.is_file() and path.name != TABLE_FILE:
        raise BadInput(f"{path} is a file; a comparison is the folder that `compare -o` wrote")
    return open_table(path)
