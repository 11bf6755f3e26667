"""Results written to a stream in the format that the user chose.

`WRITERS` is the table of output formats; commands take their choices from it, and only the format
that is asked for is imported. `write_json` and `write_csv` serve all commands. JSON has no
non-finite numbers, so they are the words "nan", "inf" and "-inf". In CSV every row and digit is
written, and an absent value is an empty cell.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias, cast

from driftline.errors import BadInput, did_you_mean
from driftline.registry import Address
from driftline.units import csv_cell, printed_json

if TYPE_CHECKING:  # help pages read the table of formats: nothing heavy is loaded for it
    from driftline.comparison.table.table import Table
    from driftline.diagnosis.result import Diagnosis
    from driftline.reporting.ci import Checks
    from driftline.reporting.view import Sheet, View


def write_json(document: Any, stream: TextIO, *, indent: int | None = 2) -> None:
    """The document, ended by a newline."""
    stream.write(printed_json(safe(document), indent=indent))
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
        from driftline.comparison.table.row import number_to_json

        return number_to_json(value)
    return value


# CSV for spreadsheets.


def write_csv(sheet: Sheet, stream: TextIO) -> None:
    """One line per row under a header."""
    # Python's default is a carriage return and a newline, which line tools trip over.
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(csv_cell, sheet.headings))
    for line in sheet.lines:
        writer.writerow(map(csv_cell, line))


# Results in any of the formats; each format's code is imported on use.


Content: TypeAlias = Literal["view", "json", "csv", "checks"]
"""What a result can offer: a view for people, checks for CI, documents for programs."""


class Writer(NamedTuple):
    """An output format.

    Attributes:
        takes: Which content of a result it writes.
        function: Function of (content, stream). None for json and csv, which every kind of result
            writes itself: their fields are documented for each.
    """

    takes: Content
    function: Address | None = None


WRITERS: dict[str, Writer] = {
    "table": Writer("view", Address("driftline.reporting.terminal:show")),
    "json": Writer("json"),
    "csv": Writer("csv"),
    "markdown": Writer("view", Address("driftline.reporting.markdown:write")),
    "github": Writer("checks", Address("driftline.reporting.ci:write_github")),
    "junit": Writer("checks", Address("driftline.reporting.ci:write_junit")),
}
"""Every output format by its name, in the order of the help pages."""


def formats(*contents: Content) -> tuple[str, ...]:
    """Names of the formats for a result that offers these contents."""
    return tuple(name for name, writer in WRITERS.items() if writer.takes in contents)


def write(
    format: str,
    stream: TextIO,
    *,
    view: Callable[[], View] | None = None,
    checks: Callable[[], Checks] | None = None,
    json: Callable[[TextIO], None] | None = None,
    csv: Callable[[TextIO], None] | None = None,
) -> None:
    """Write a result in one of the formats; contents that the result does not offer are None.

    Args:
        format: A name of `WRITERS`.
        stream: Where to.
        view: Returns what people are shown.
        checks: Returns the list of checks.
        json: Writes the result's document to a stream.
        csv: Writes the result's rows to a stream.

    Raises:
        BadInput: There is no such format for this result.
    """
    contents = {"view": view, "checks": checks, "json": json, "csv": csv}
    writer = WRITERS.get(format)
    content: Callable[..., Any] | None = None if writer is None else contents[writer.takes]
    if writer is None or content is None:
        names = [name for name in WRITERS if contents[WRITERS[name].takes]]
        raise BadInput(f"there is no format '{format}' for this", hint=did_you_mean(format, names))
    if writer.function is None:
        content(stream)
    else:
        writer.function.load()(content(), stream)


def write_view(view: View, format: str, stream: TextIO) -> None:
    """Write a view in one of the formats for people."""
    write(format, stream, view=lambda: view)


def table(
    compared: Table,
    format: str,
    stream: TextIO,
    *,
    everything: bool = False,
    command: str = "compare",
    allow_incomplete: bool = False,
) -> None:
    """Write a table to a stream.

    Args:
        compared: The table.
        format: table for people; json and csv for programs, always whole; markdown for a review;
            github and junit for CI.
        stream: Where to.
        everything: For people too, every row.
        command: The command that made it, for CI.
        allow_incomplete: For CI: whether INCOMPLETE counts as success.
    """

    def view() -> View:
        from driftline.reporting.views import comparison

        return comparison.view(compared, everything=everything)

    def checks() -> Checks:
        from driftline.reporting.ci import of_table

        return of_table(compared, command, allow_incomplete=allow_incomplete)

    def write_rows(stream: TextIO) -> None:
        from driftline.comparison.table import files

        files.write_csv(compared, stream)

    def write_document(stream: TextIO) -> None:
        # One compact line per row is easy to read and to diff, also with 100 000 rows.
        head = printed_json(compared.head_as_json(), indent=1)
        stream.write(head.removesuffix("\n}") + ',\n "rows": [')
        for index, row in enumerate(compared.rows):
            stream.write(",\n  " if index else "\n  ")
            stream.write(printed_json(row.as_json()))
        stream.write("\n ]\n}\n" if len(compared.rows) else "]\n}\n")

    write(format, stream, view=view, checks=checks, csv=write_rows, json=write_document)


def diagnosis(
    diagnosed: Diagnosis,
    format: str,
    stream: TextIO,
    *,
    everything: bool = False,
    allow_incomplete: bool = False,
) -> None:
    """Write a diagnosis to a stream; see `table`."""

    def view() -> View:
        from driftline.reporting.views import diagnosis as report

        return report.view(diagnosed, everything=everything)

    def checks() -> Checks:
        from driftline.reporting.ci import of_diagnosis

        return of_diagnosis(diagnosed, allow_incomplete=allow_incomplete)

    def write_document(stream: TextIO) -> None:
        stream.write(printed_json(diagnosed.as_json(), indent=1) + "\n")

    write(format, stream, view=view, checks=checks, json=write_document)
