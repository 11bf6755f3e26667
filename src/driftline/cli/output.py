"""Write and print what commands make, and refuse to overwrite what exists."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from driftline.cli import python_script as script
from driftline.cli.options import OutputOptions
from driftline.errors import AlreadyThere, BadInput

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table
    from driftline.runs.stores.upload import Sent


def refuse_overwriting(
    output: Path | None, csv: Path | None, force: bool, report: Path | None = None
) -> None:
    """Refuse existing output before anything is read, so that no long comparison is lost."""
    if output is not None and "://" in str(output):
        from driftline.runs.stores.api import refuse_overwriting

        # The store was asked; what follows looks at folders of this machine.
        refuse_overwriting(output, force=force)
        output = None
    if report is not None and "://" in str(report):
        raise BadInput(
            "the report of -gp and -mp goes into a folder of this machine", hint="give one with -o"
        )
    for folder in (output, report):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; -o takes a folder", hint="give another -o")
    if report is not None:
        # The folder may have to be made: the nearest one that exists must let us.
        existing = next(path for path in (report, *report.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
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


def write_table(
    table: Table, output: Path | None, csv: Path | None, *, force: bool, quiet: bool
) -> None:
    """Write a comparison to a folder or an address, and its rows to a file."""
    from driftline.comparison.table.table import Table

    if csv is not None:
        from driftline.comparison.table.files import save_csv

        try:
            script.act(save_csv, table, csv)
        # A traceback or a bare errno would hide which of the files it was.
        except OSError as error:
            raise BadInput(
                f"cannot write {csv}: {error.strerror}", hint="give another --csv"
            ) from error
    if output is not None:
        try:
            script.act(Table.write, table, output, force=force)
        except OSError as error:
            raise BadInput(
                f"cannot write {output}: {error.strerror}", hint="give another -o"
            ) from error
        if not quiet and not script.is_script():
            print(f"driftline: the comparison is in {output}", file=sys.stderr)
            from driftline.runs.stores.addresses import memory_warning

            if warning := memory_warning(output):
                print(f"  {warning}", file=sys.stderr)


def print_table(table: Table, options: OutputOptions, command: str = "compare") -> None:
    """Print a comparison in the format that the options name."""
    from driftline.reporting import writers

    writers.table(
        table,
        options.format,
        sys.stdout,
        everything=options.all,
        command=command,
        allow_incomplete=options.allow_incomplete,
    )


def run_place(output: str, stage: str) -> tuple[str, str]:
    """The folder that a run is written to, and the address it is sent to (empty if none)."""
    if "://" in output:
        from driftline.runs.stores.addresses import last_part, place_of, url_of

        if (url := url_of(place_of(output))) is not None:
            from driftline.runs.stores.upload import staging_for

            return str(staging_for(last_part(url), stage)), url
        output = str(place_of(output))
    if stage:
        raise BadInput(
            "--stage is for runs that are sent elsewhere, and -o is a folder here",
            hint="leave it out, or give an address with -o, such as s3://bucket/run",
        )
    # Absolute: the program that is captured may change its folder.
    return str(Path(output or f"driftline_{datetime.now():%Y%m%d_%H%M%S}").absolute()), ""


def refuse_memory(url: str) -> None:
    """Refuse a `memory://` address: what is stored there is lost when the command ends."""
    from driftline.runs.stores.addresses import memory_warning

    if warning := memory_warning(url):
        raise BadInput(warning, hint="give -o a folder, or an address such as s3://bucket/run")


def short_path(path: str) -> str:
    """A path as short as it still works from the current folder."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def unsent_lines(sent: Sent, url: str) -> list[str]:
    """Lines for a run that was sent in part: what is still on this machine, and how to go on."""
    folder = short_path(str(sent.folder))
    files = "1 file" if sent.left == 1 else f"{sent.left} files"
    return [
        f"driftline: not all of it is at {sent.url}: {sent.reason}",
        f"  {files} not sent yet, in {folder}",
        f"  hint: continue with: driftline push {shlex.quote(folder)} {shlex.quote(url)}",
    ]
