"""`driftline check`: a comparison or layer files → limits → a report and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import LIMITS, URLS, LimitOptions, OutputOptions, place
from driftline.cli.output import print_table
from driftline.errors import BadInput


def check(
    table: Annotated[Path, URLS, place("TABLE")],
    /,
    *,
    limits: LimitOptions = LimitOptions(),
    slack: Annotated[float, Parameter(metavar="TIMES", group=LIMITS)] = 1.0,
    model: Annotated[str | None, Parameter(metavar="MODEL", group=LIMITS)] = None,
    output: OutputOptions = OutputOptions(),
) -> int:
    """Judge a comparison by thresholds or other limits, and name the first layer beyond its limit.

        driftline check table --thresholds tiny-thresholds.json
        driftline check table --max relative_l2=0.01
        driftline check table

    No tensor is read: the table holds what was measured, and also the evidence of a replay, of
    noise runs or of a bisection. Without any limit, the verdict is that of `compare` or
    `layer-metrics`. Exit code 1 if a limit is broken, 2 if too little could be judged.

    Args:
        table: A folder that `driftline compare -o` wrote, the `….layers` of `layer-metrics`, or a
            folder of layer files (.abs_diff.csv, .cos_sim.csv), which need limits.
        slack: Factor on every threshold. If a threshold is an average of clean runs, about half of
            all clean runs exceed it: give 2 or more then.
        model: Refuse thresholds that were made for another model.
    """
    from driftline.comparison.pipeline import check as judge_again
    from driftline.comparison.table.files import is_table, open_table
    from driftline.comparison.table.table import Table
    from driftline.decoding.files.layer_files import table_to_judge
    from driftline.decoding.files.names import LAYER_TABLE

    judged_before = is_table(table)
    # Layer files record no number format, so there are no default limits for them.
    if not judged_before and not table.exists() and not script.is_script():
        raise BadInput(
            f"there is no '{table}'", hint="`driftline compare REF CAND -o TABLE` writes a table"
        )
    if not judged_before and limits.thresholds is None and not limits.words:
        tables = sorted(table.glob(f"*{LAYER_TABLE}")) if table.is_dir() else []
        raise BadInput(
            "no limit is given",
            hint=f"the table next to these files has limits of its own: driftline check {tables[0]}"
            if tables
            else "--thresholds FILE.json, --max relative_l2=0.01 or --min cosine=0.999",
        )
    thresholds = None
    if limits.thresholds is not None:
        from driftline.comparison.tolerance.thresholds import load_thresholds

        thresholds = script.part(load_thresholds, limits.thresholds, model=model)
    # Thresholds of layer files apply to a statistic of the files next to a table: read those files.
    if judged_before and not (thresholds and table.suffix == LAYER_TABLE):
        measured = script.part(open_table, table)
    else:
        measured = script.part(table_to_judge, table, thresholds)
    value_limits = None
    if limits.words:  # only what was measured can be limited
        columns = table_to_judge(table).columns if script.is_script() else measured.columns
        value_limits = limits.limits(columns)
    judged = script.step(
        "table",
        judge_again,
        measured,
        thresholds=thresholds,
        limits=value_limits,
        slack=slack,
        min_coverage=limits.min_coverage,
    )
    if output.output is not None:
        script.act(Table.write, judged, output.output, force=output.force)
    script.end(judged)
    if not output.quiet:
        print_table(judged, output, command="check")
    return output.exit_code(judged.verdict)
