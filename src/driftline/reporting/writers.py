"""Results written to a stream in the format that the user chose.

`table` and `diagnosis` know every format of a result and load only the one they need; `write_json`
and `write_csv` serve all commands. JSON has no non-finite numbers, so they are the words "nan",
"inf" and "-inf". In CSV every row and digit is written, and an absent value is an empty cell.
"""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, cast

from driftline.comparison.table.row import number_to_json
from driftline.comparison.table.table import Table
from driftline.reporting.view import Sheet

if TYPE_CHECKING:
    from driftline.diagnosis.result import Diagnosis
    from driftline.reporting.ci import Checks


def write_json(document: Any, stream: TextIO, *, indent: int | None = 2) -> None:
    """The document, ended by a newline."""
    stream.write(json.dumps(safe(document), indent=indent, ensure_ascii=False, allow_nan=False))
    stream.write("\n")


def safe(value: Any) -> Any:
    """The same values with non-finite numbers in words and tuples as lists.

    >>> safe({"a": (1, float("nan"))})
    {'a': [1, 'nan']}
    """
    if isinstance(value, dict):
        return {str(k): safe(v) for k, v in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [safe(v) for v in cast(list[Any], value)]
    # JSON has no nan and no infinity; readers of our files know these words.
    if isinstance(value, float):
        return number_to_json(value)
    return value


# CSV for spreadsheets.


def write_csv(sheet: Sheet, stream: TextIO) -> None:
    """One line per row under a header."""
    # Python's default is a carriage return and a newline, which line tools trip over.
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(sheet.headings)
    for line in sheet.lines:
        writer.writerow(["" if value is None else value for value in line])


# Results in any of the formats; each format's code is imported on use.


Format: TypeAlias = Literal["table", "json", "csv", "markdown", "github", "junit"]


def checks(results: Checks, format: Literal["github", "junit"], stream: TextIO) -> None:
    """Write checks for CI; with github also the summary of the step, where there is one."""
    if format == "junit":
        from driftline.reporting import ci

        ci.write_junit(results, stream)
    else:
        from driftline import settings
        from driftline.reporting import ci

        ci.write_github(results, stream, settings.step_summary())


def table(
    compared: Table,
    format: Format,
    stream: TextIO,
    *,
    everything: bool = False,
    command: str = "compare",
) -> None:
    """Write a table to a stream.

    Args:
        compared: The table.
        format: table for people; json and csv for programs, always whole; markdown for a review;
            github and junit for CI.
        stream: Where to.
        everything: For people too, every row.
        command: Which command made it, as CI shall call it.
    """
    if format in ("github", "junit"):
        from driftline.reporting.ci import of_table

        checks(of_table(compared, command), format, stream)
        return
    if format == "json":
        import json

        # Compact lines: one row each reads and diffs well, and 100 000 rows stay bearable.
        head = json.dumps(compared.head_as_json(), ensure_ascii=False, allow_nan=False, indent=1)
        stream.write(head.removesuffix("\n}") + ',\n "rows": [')
        for index, row in enumerate(compared.rows):
            stream.write(",\n  " if index else "\n  ")
            stream.write(json.dumps(row.as_json(), ensure_ascii=False, allow_nan=False))
        stream.write("\n ]\n}\n" if len(compared.rows) else "]\n}\n")
    elif format == "csv":
        from driftline.comparison.table.files import write_csv

        write_csv(compared, stream)
    elif format == "markdown":
        from driftline.reporting import markdown
        from driftline.reporting.views import comparison

        stream.write(markdown.paint(comparison.view(compared, everything=everything)))
    else:
        from driftline.reporting import terminal
        from driftline.reporting.views import comparison

        terminal.show(comparison.view(compared, everything=everything), stream)


def diagnosis(
    diagnosed: Diagnosis,
    format: Literal["table", "json", "markdown", "github", "junit"],
    stream: TextIO,
    *,
    everything: bool = False,
) -> None:
    """Write a diagnosis to a stream; see `table`."""
    if format in ("github", "junit"):
        from driftline.reporting.ci import of_diagnosis

        checks(of_diagnosis(diagnosed), format, stream)
        return
    if format == "json":
        import json

        json.dump(diagnosed.as_json(), stream, ensure_ascii=False, allow_nan=False, indent=1)
        stream.write("\n")
        return
    from driftline.reporting.views import diagnosis as report

    if format == "markdown":
        from driftline.reporting import markdown

        stream.write(markdown.paint(report.view(diagnosed, everything=everything)))
    else:
        from driftline.reporting import terminal

        terminal.show(report.view(diagnosed, everything=everything), stream)
