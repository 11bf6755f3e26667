"""`driftline merge`: the parts of all shards of a comparison → its table, report and exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.cli.table_output import refuse_overwriting, write
from driftline.errors import BadInput


def merge(
    *parts: Annotated[Path, Option(metavar="PART")],
    output: Annotated[
        Path | None, Option(names=("--output", "-o"), metavar="DIR", urls=True)
    ] = None,
    csv: Annotated[Path | None, Option(metavar="FILE")] = None,
    format: Literal["table", "json", "csv", "markdown", "github", "junit"] = "table",
    all: bool = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"))] = False,
    force: bool = False,
) -> int:
    """Merge the shards of a comparison into its table.

        driftline compare ref cand --shard 1/2 -o parts
        driftline compare ref cand --shard 2/2 -o parts
        driftline merge parts -o table

    The table, the report and the exit code are those of `driftline compare` without --shard, bit
    for bit. A shard that is missing or there twice is named; parts of different runs, options or
    versions are refused.

    Args:
        parts: Files that `compare --shard` wrote, or folders that hold them.
        output: Also write the comparison there: table.json, rows.parquet and rows.csv.
        csv: Also write the rows to this file.
        format: table for people; json, csv and markdown for programs and reviews; github
            (annotations and a step summary) and junit for CI.
        all: Show every row rather than the worst.
        quiet: Print nothing; the exit code says it.
        force: Replace output that is there already.
    """
    if not parts:
        raise BadInput(
            "`driftline merge` needs the parts of a comparison",
            hint="driftline merge DIR, where DIR is the -o of `driftline compare --shard`",
        )
    if not script.asked():
        refuse_overwriting(output, csv, force)
    from driftline.comparison.shards import merge as merged
    from driftline.comparison.shards import remarks
    from driftline.comparison.table.part import open_parts
    from driftline.comparison.verdict.judge import exit_code

    if script.asked():
        table = script.step("table", merged, list(parts))
    else:
        found = open_parts(parts)
        table = merged(found)
        for line in [] if quiet else remarks(found):
            print(f"driftline: {line}", file=sys.stderr)
    write(table, output, csv, force, quiet)
    script.end(table)
    if not quiet:
        from driftline.reporting import writers

        writers.table(table, format, sys.stdout, everything=all)
    return exit_code(table)
