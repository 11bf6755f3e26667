"""`driftline merge`: the parts of all shards of a comparison → its table, report and exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import OUTPUT, OutputOptions, place
from driftline.cli.output import print_table, refuse_overwriting, write_table
from driftline.errors import BadInput


def merge(
    *parts: Annotated[Path, place("PART")],
    csv: Annotated[Path | None, Parameter(metavar="FILE", group=OUTPUT)] = None,
    output: OutputOptions = OutputOptions(),
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
        csv: Also write the rows to this file.
    """
    if not parts:
        raise BadInput(
            "`driftline merge` needs the parts of a comparison",
            hint="driftline merge DIR, where DIR is the -o of `driftline compare --shard`",
        )
    if not script.is_script():
        refuse_overwriting(output.output, csv, output.force)
    from driftline.comparison.shards import merge as merge_parts
    from driftline.comparison.shards import remarks
    from driftline.comparison.table.part import open_parts

    if script.is_script():
        table = script.step("table", merge_parts, list(parts))
    else:
        # Opened once, for the table and for the remarks.
        opened = open_parts(parts)
        table = merge_parts(opened)
        for line in [] if output.quiet else remarks(opened):
            print(f"driftline: {line}", file=sys.stderr)
    write_table(table, output.output, csv, force=output.force, quiet=output.quiet)
    script.end(table)
    if not output.quiet:
        print_table(table, output)
    return output.exit_code(table.verdict)
