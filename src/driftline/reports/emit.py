"""A comparison table in one of the formats a user can ask for; the place that knows them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from driftline.comparison.table import Table

if TYPE_CHECKING:
    from driftline.diagnosis.finding import Diagnosis

Format: TypeAlias = Literal["table", "json", "csv", "markdown"]


def table(found: Table, format: Format, stream: TextIO, *, everything: bool = False) -> None:
    """Write a table to a stream.

    Args:
        found: The table.
        format: table for people; json and csv for programs, always whole; markdown for a review.
        stream: Where to.
        everything: For people too, every row.
    """
    if format == "json":
        import json

        # Compact lines: one row each reads and diffs well, and 100 000 rows stay bearable.
        document = found.as_json()
        rows = document.pop("rows")
        head = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)
        stream.write(head.removesuffix("\n}") + ',\n "rows": [')
        for at, row in enumerate(rows):
            stream.write(",\n  " if at else "\n  ")
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False))
        stream.write("\n ]\n}\n" if rows else "]\n}\n")
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
    format: Literal["table", "json", "markdown"],
    stream: TextIO,
    *,
    everything: bool = False,
) -> None:
    """Write a diagnosis to a stream; see `table`."""
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
