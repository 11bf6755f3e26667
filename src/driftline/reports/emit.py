"""A comparison table in one of the formats a user can ask for; the place that knows them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from driftline.comparison.table import Table

if TYPE_CHECKING:
    from driftline.diagnosis.finding import Diagnosis
    from driftline.reports.checks import Checks

Format: TypeAlias = Literal["table", "json", "csv", "markdown", "github", "junit"]


def checks(found: Checks, format: Literal["github", "junit"], stream: TextIO) -> None:
    """Write checks for CI; with github also the summary of the step, where there is one."""
    if format == "junit":
        from driftline.reports import junit

        junit.write(found, stream)
    else:
        from driftline import settings
        from driftline.reports import github

        github.write(found, stream, settings.step_summary())


def table(
    found: Table,
    format: Format,
    stream: TextIO,
    *,
    everything: bool = False,
    command: str = "compare",
) -> None:
    """Write a table to a stream.

    Args:
        found: The table.
        format: table for people; json and csv for programs, always whole; markdown for a review;
            github and junit for CI.
        stream: Where to.
        everything: For people too, every row.
        command: Which command made it, as CI shall call it.
    """
    if format in ("github", "junit"):
        from driftline.reports.checks import of_table

        checks(of_table(found, command), format, stream)
        return
    if format == "json":
        import json

        # Compact lines: one row each reads and diffs well, and 100 000 rows stay bearable.
        head = json.dumps(found.head_as_json(), ensure_ascii=False, allow_nan=False, indent=1)
        stream.write(head.removesuffix("\n}") + ',\n "rows": [')
        for at, row in enumerate(found.rows):
            stream.write(",\n  " if at else "\n  ")
            stream.write(json.dumps(row.as_json(), ensure_ascii=False, allow_nan=False))
        stream.write("\n ]\n}\n" if len(found.rows) else "]\n}\n")
    elif format == "csv":
        from driftline.comparison.storage import write_csv

        write_csv(found, stream)
    elif format == "markdown":
        from driftline.reports import comparison, markdown

        stream.write(markdown.paint(comparison.view(found, everything=everything)))
    else:
        from driftline.reports import comparison, terminal

        terminal.show(comparison.view(found, everything=everything), stream)


def diagnosis(
    found: Diagnosis,
    format: Literal["table", "json", "markdown", "github", "junit"],
    stream: TextIO,
    *,
    everything: bool = False,
) -> None:
    """Write a diagnosis to a stream; see `table`."""
    if format in ("github", "junit"):
        from driftline.reports.checks import of_diagnosis

        checks(of_diagnosis(found), format, stream)
        return
    if format == "json":
        import json

        json.dump(found.as_json(), stream, ensure_ascii=False, allow_nan=False, indent=1)
        stream.write("\n")
        return
    from driftline.reports import diagnosis as report

    if format == "markdown":
        from driftline.reports import markdown

        stream.write(markdown.paint(report.view(found, everything=everything)))
    else:
        from driftline.reports import terminal

        terminal.show(report.view(found, everything=everything), stream)
