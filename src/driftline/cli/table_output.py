"""Where the commands that end in a comparison's table put it, and what they would not overwrite."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from driftline.cli import script
from driftline.errors import AlreadyThere, BadInput

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table


def refuse_overwriting(
    output: Path | None, csv: Path | None, force: bool, report: Path | None = None
) -> None:
    """Before anything is read: a comparison of an hour must not end in a refusal."""
    if output is not None and "://" in str(output):
        from driftline.runs.stores.api import refuse_overwriting

        refuse_overwriting(output, force=force)
        output = None
    if report is not None and "://" in str(report):
        raise BadInput("the report of -gp and -mp goes into a folder of this machine")
    for folder in (output, report):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; -o takes a folder")
    if report is not None:
        there = next(place for place in (report, *report.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise BadInput(
                f"cannot write the report into {report}",
                hint="-o takes a folder that can be written",
            )
    if force:
        return
    if output is not None and output.is_dir() and any(output.iterdir()):
        raise AlreadyThere(f"{output} is not empty", hint="give another -o, or --force")
    if csv is not None and csv.exists():
        raise AlreadyThere(f"{csv} exists", hint="give another --csv, or --force")


def write(table: Table, output: Path | None, csv: Path | None, force: bool, quiet: bool) -> None:
    from driftline.comparison.table.table import Table

    if csv is not None:
        from driftline.comparison.table.files import save_csv

        try:
            script.act(save_csv, table, csv)
        except OSError as trouble:
            raise BadInput(f"cannot write {csv}: {trouble.strerror}") from trouble
    if output is not None:
        try:
            script.act(Table.write, table, output, force=force)
        except OSError as trouble:
            raise BadInput(f"cannot write {output}: {trouble.strerror}") from trouble
        if not quiet and not script.asked():
            print(f"driftline: the comparison is in {output}", file=sys.stderr)
            from driftline.runs.stores.addresses import memory_warning

            if gone := memory_warning(output):
                print(f"  {gone}", file=sys.stderr)
