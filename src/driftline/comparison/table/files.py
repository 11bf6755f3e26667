"""A table on disk: `table.json` is the table, `rows.parquet` and `rows.csv` are for other programs.

Rows of long tables are written and read one by one, so that no file is ever in memory as a whole.
docs/table-format.md is the specification.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from driftline.comparison.table.row import JSON, ROW_FIELDS, Number, Row
from driftline.comparison.table.table import Table, is_spooled
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.registry import require
from driftline.units import csv_cell

if TYPE_CHECKING:
    from _typeshed import StrPath


ROWS = ', "rows": ['
"""What comes before the first row. Keys of ours that come earlier hold no such text."""
_CHUNK = 1 << 20
_LONGEST = 16 << 20
"""Characters of a head or of one row; what is longer was not written by us."""


def write_rows(rows: Iterable[Row], stream: TextIO) -> None:
    """The rows, without the brackets around them."""
    encode = json.JSONEncoder(allow_nan=False).encode
    between = ""
    for row in rows:
        stream.write(between + encode(row.as_json()))
        between = ", "


class OtherText(ValueError):
    """The file is not as we write it."""


class RowText:
    """A file of rows: what comes before them, they themselves, what comes after.

    Attributes:
        head: All before the rows, without the mark; an open JSON object.
    """

    def __init__(self, stream: TextIO) -> None:
        """Reads as far as the first row.

        Raises:
            OtherText: There is none.
        """
        self._stream = stream
        self._text = ""
        self._at = 0
        while (offset := self._text.find(ROWS)) < 0:
            if len(self._text) > _LONGEST or not self._more():
                raise OtherText
        self.head: str = self._text[:offset]
        self._at = offset + len(ROWS)

    def rows(self) -> Iterator[Any]:
        """Every row, once.

        Raises:
            OtherText: One is no row, or they do not end as they should.
        """
        read: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
        while True:
            while self._at >= len(self._text) - 2 and self._more():
                pass
            if self._text[self._at : self._at + 1] != "{":
                return
            try:
                value, end = read(self._text, self._at)
            except ValueError:
                if len(self._text) - self._at > _LONGEST or not self._more():
                    raise OtherText from None
                continue
            self._at = end
            while self._at >= len(self._text) - 2 and self._more():
                pass
            self._at += 2 if self._text[self._at : self._at + 2] == ", " else 0
            yield value

    def tail(self) -> str:
        """What comes after the rows, from the bracket that closes them on.

        Raises:
            OtherText: It is too long.
        """
        while self._more():
            if len(self._text) - self._at > _LONGEST:
                raise OtherText
        return self._text[self._at :]

    def _more(self) -> bool:
        text = self._stream.read(_CHUNK)
        self._text = self._text[self._at :] + text
        self._at = 0
        return bool(text)


# A table on disk: `table.json` is the table, `rows.parquet` and `rows.csv` are for other
# programs.


TABLE_FILE = "table.json"
PARQUET_FILE = "rows.parquet"
CSV_FILE = "rows.csv"
_FILES = (TABLE_FILE, PARQUET_FILE, CSV_FILE)
_LARGEST = 16 << 30
_ROW_GROUP = 1 << 16
_PIECE = 1 << 12
_LONG = 16 << 20
_CSV_BUFFER = 1 << 20
"""Bytes that are written at once."""
_INTEGER_FIELDS = (
    *("step", "rank", "visit", "process", "order"),
    *("candidate_step", "candidate_visit", "candidate_rank"),
)
_NUMBER_FIELDS = ("limit", "severity", "confidence")
_NUMBER_PLACES = tuple(map(ROW_FIELDS.index, _NUMBER_FIELDS))
_MOST_CELLS = 1 << 14
"""Texts of cells that are remembered."""


def write_table(table: Table, folder: StrPath, *, force: bool = False) -> Path:
    """Write the files of a table; the folder appears complete or not at all.

    `rows.parquet` is written where pyarrow is installed.

    Args:
        table: What to write.
        folder: Made if it is not there.
        force: Replace an older table. Other files of the folder are never touched.

    Raises:
        AlreadyThere: The folder holds something and `force` was not given.
        BadInput: The path is a file.
    """
    if (url := _url_of(folder)) is not None:
        from driftline.runs.stores.api import uploaded

        with uploaded(url, tuple(reversed(_FILES)), force=force) as upload_folder:
            _write_files(table, upload_folder)
        return Path(folder)
    goal = Path(folder)
    if goal.exists() and not goal.is_dir():
        raise BadInput(f"{goal} is a file; a table is a folder", hint="give another -o")
    if goal.is_dir() and any(goal.iterdir()) and not force:
        raise AlreadyThere(f"{goal} is not empty", hint="give another -o, or --force to replace")
    goal.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", dir=goal.parent))
    try:
        _write_files(table, scratch)
        goal.mkdir(exist_ok=True)
        for name in reversed(_FILES):  # table.json last: a folder with one is a whole table
            if (scratch / name).exists():
                (scratch / name).replace(goal / name)
            else:
                (goal / name).unlink(missing_ok=True)  # of an older table, and not of this one
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return goal


def _write_files(table: Table, folder: Path) -> None:
    with (folder / CSV_FILE).open("w", encoding="utf-8", newline="") as stream:
        write_csv(table, stream)
    # Parquet is for other programs, and costs 55 MB to install: whoever wants it has it.
    if importlib.util.find_spec("pyarrow") is not None:
        write_parquet(table, folder / PARQUET_FILE)
    # Compact: a table of 100 000 rows is read by programs; `driftline show` is for people.
    # Row by row: all of them at once would take ten times the memory of the table.
    encode = json.JSONEncoder(allow_nan=False).encode
    with (folder / TABLE_FILE).open("w", encoding="utf-8", buffering=1 << 20) as stream:
        head = table.head_as_json()
        # For judging again; people and programs that read JSON from a pipe have no use for it.
        if structure := table.structure.as_json():
            head["structure"] = structure
        if table.evidence:
            head["evidence"] = dict(table.evidence)
        stream.write(encode(head)[:-1] + ROWS)
        write_rows(table.rows, stream)
        stream.write("]}\n")


def _url_of(path: StrPath) -> str | None:
    """The address that a path is, if it is one."""
    if ":/" not in os.fspath(path):
        return None
    from driftline.runs.stores.addresses import url_of

    return url_of(path)


def open_table(folder: StrPath) -> Table:
    """Read a table back from its folder, or from its `table.json` directly.

    Raises:
        BadFile: There is no table, or its schema is unknown to this version.
    """
    if (url := _url_of(folder)) is not None:
        from driftline.runs.stores.api import read_file

        url = url.removesuffix(f"/{TABLE_FILE}")
        content = read_file(url, TABLE_FILE, _LARGEST)
        if len(content) > _LONG:
            stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
            if (table := _row_by_row(stream, f"{folder}")) is not None:
                return table
        return _parsed(content, f"{folder}")
    path = Path(folder)
    if path.is_dir():
        path = path / TABLE_FILE
    if not path.is_file():
        raise BadFile(
            f"{folder} holds no {TABLE_FILE}", hint="`driftline compare REF CAND -o DIR` writes one"
        )
    try:
        if path.stat().st_size > _LONG:
            with path.open(encoding="utf-8") as stream:
                if (table := _row_by_row(stream, str(path))) is not None:
                    return table
        content = path.read_bytes()
    except OSError as trouble:
        raise _no_table(str(path), trouble) from trouble
    return _parsed(content, str(path))


def _parsed(content: bytes, source: str) -> Table:
    try:
        shown = json.loads(content)
    except (ValueError, RecursionError) as trouble:
        raise _no_table(source, trouble) from trouble
    return Table.from_json(shown, source=source)


def _row_by_row(stream: TextIO, source: str) -> Table | None:
    """A long table that is as `write_table` writes it; None for any other."""
    from driftline.comparison.table.row_spool import keep

    try:
        text = RowText(stream)
        head = json.loads(text.head + "}")
        table = Table.from_json({**head, "rows": []}, source=source, rows=False)
        rows = keep(map(Row.from_json, text.rows()))
        first = head.get("first_row")
        if text.tail().rstrip() != "]}":
            return None
        return table.changed(rows=rows, first=None if first is None else rows[first])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, BadFile):
        return None


def _no_table(source: str, trouble: Exception) -> BadFile:
    return BadFile(
        f"{source} is no comparison: it cannot be read as JSON ({trouble})",
        hint="`driftline compare REF CAND -o DIR` writes one",
    )


def is_table(path: StrPath) -> bool:
    """Whether a path looks like a table, without reading it."""
    if (url := _url_of(path)) is not None:
        from driftline.runs.stores.api import exists

        return exists(url, TABLE_FILE)
    return (Path(path) / TABLE_FILE).is_file()


def metric_names(table: Table) -> list[str]:
    """The metric columns of a flat table: the declared ones, in their order, that any row has."""
    rows = table.rows
    present = (
        rows.metric_names if is_spooled(rows) else {name for row in rows for name in row.metrics}
    )
    declared = [column.name for column in table.columns if column.name in present]
    return declared + sorted(present.difference(declared))


def write_csv(table: Table, stream: TextIO) -> None:
    """One line per row, header first; an absent number is an empty cell, nan and inf are words."""
    names = metric_names(table)
    text = _CellText()
    stream.write(",".join(map(text.__getitem__, (*ROW_FIELDS, *names))) + "\n")
    between = "," if names else "\n"
    for rows in _pieces(table.rows):
        ends = _ends(rows, names)
        for row in rows:
            cells = _cells(row)
            for place in _NUMBER_PLACES:  # 1.0 is 1 to a dictionary, and another text
                if cells[place] is not None:
                    cells[place] = str(cells[place])
            words = ",".join(map(text.__getitem__, cells))
            stream.write(words + between + ends[id(row.metrics)])


class _CellText(dict[JSON, str]):
    """Cells as text, in quotes where CSV wants them; most of them are the same in many rows.

    `csv.writer` takes as long, and leaves a line end inside a cell without quotes where lines are
    made to end with a comma, as the numbers that follow need it.
    """

    def __missing__(self, cell: JSON) -> str:
        text = csv_cell(cell)
        if "," in text or '"' in text or "\n" in text:
            text = '"' + text.replace('"', '""') + '"'
        if len(self) < _MOST_CELLS:
            self[cell] = text
        return text


def _ends(rows: Sequence[Row], names: Sequence[str]) -> dict[int, str]:
    """The ends of lines, which are numbers only and need no quotes, by the metrics they are of.

    Digits are most of the work, and rows of one and the same bytes share their metrics.
    """
    distinct = {id(row.metrics): row.metrics for row in rows}
    end = "\n" if names else ""
    return {
        place: ",".join([_number_text(metrics.get(name)) for name in names]) + end
        for place, metrics in distinct.items()
    }


def _number_text(number: Number | None) -> str:
    return "" if number is None else str(number)


def save_csv(table: Table, path: StrPath) -> None:
    """`write_csv`, into a file."""
    with Path(path).open("w", _CSV_BUFFER, encoding="utf-8", newline="") as stream:
        write_csv(table, stream)


def arrow_table(table: Table) -> Any:
    """Every row as a `pyarrow.Table`."""
    pa = require("pyarrow", install="pyarrow")
    names = metric_names(table)
    pieces = [pa.table(_columns(piece, names, pa)) for piece in _pieces(table.rows)]
    return pa.concat_tables(pieces).combine_chunks()


def data_frame(table: Table) -> Any:
    """Every row as a `pandas.DataFrame`; an absent number is NaN, an absent text None."""
    pandas = require("pandas")
    names = metric_names(table)
    columns: dict[str, list[JSON]] = {name: [] for name in (*ROW_FIELDS, *names)}
    for row in table.rows:
        for name, cell in zip(ROW_FIELDS, _cells(row), strict=True):
            columns[name].append(cell)
        for name in names:
            columns[name].append(_double(row.metrics.get(name)))
    return pandas.DataFrame(columns)


def write_parquet(table: Table, path: StrPath) -> None:
    """The same columns typed: numbers are doubles, null when absent; the rest is text."""
    pa = require("pyarrow", install="pyarrow")
    pq = require("pyarrow.parquet", install="pyarrow")
    names = metric_names(table)
    kinds = [pa.int64() if name in _INTEGER_FIELDS else pa.string() for name in ROW_FIELDS]
    for name in _NUMBER_FIELDS:
        kinds[ROW_FIELDS.index(name)] = pa.float64()
    fields = [*zip(ROW_FIELDS, kinds, strict=True), *((name, pa.float64()) for name in names)]
    with pq.ParquetWriter(str(path), pa.schema(fields)) as writer:
        rows = iter(table.rows)
        for _ in range(0, len(table.rows) or 1, _ROW_GROUP):
            group = itertools.islice(rows, _ROW_GROUP)
            some = [_columns(piece, names, pa) for piece in _pieces(group)]
            writer.write_table(pa.concat_tables(map(pa.table, some)).combine_chunks())


def _pieces(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """A few rows at a time, as columns they take a tenth; one piece at least."""
    more = iter(rows)
    piece = list(itertools.islice(more, _PIECE))
    while True:
        yield piece
        if not (piece := list(itertools.islice(more, _PIECE))):
            return


def _columns(rows: Sequence[Row], names: Sequence[str], pa: Any) -> dict[str, JSON]:
    """Some rows as typed columns."""
    shown = [_cells(row) for row in rows]
    arrays: dict[str, JSON] = {}
    for place, name in enumerate(ROW_FIELDS):
        values = [cells[place] for cells in shown]
        if name in _INTEGER_FIELDS:
            arrays[name] = pa.array(values, pa.int64())
        elif name in _NUMBER_FIELDS:
            arrays[name] = pa.array(values, pa.float64(), from_pandas=False)
        else:
            # As in CSV, but that an absent value is null; most texts of a column are the same.
            texts = {text: None if text is None else csv_cell(text) for text in set(values)}
            arrays[name] = pa.array(map(texts.__getitem__, values), pa.string(), size=len(values))
    numbers = [row.metrics for row in rows]
    for name in names:
        column = [_double(metrics.get(name)) for metrics in numbers]
        arrays[name] = pa.array(column, pa.float64(), from_pandas=False)
    return arrays


def _cells(row: Row) -> list[JSON]:
    """The row under `ROW_FIELDS`; by way of `as_json` the table would take half as long again."""
    # All at once: a field that is asked for by its name takes three times as long.
    # fmt: off
    (
        key, status, reason, order, other_site, other_port, other_slot, other_step, other_visit,
        other_rank, by, confidence, our_recipe, their_recipe, class_name, other_class, our_dtype,
        their_dtype, our_shape, their_shape, line, fused, culprit, basis, estimated, _, decided_by,
        limit, limit_from, severity,
    ) = row
    site, port, slot, step, visit, rank, process, phase, moment = key
    return [
        site, port, slot, step, rank, visit, process, phase, moment, order, status, reason,
        other_site, other_port, other_slot, other_step, other_visit, other_rank, by, confidence,
        our_recipe, their_recipe, class_name, other_class, our_dtype, their_dtype,
        _dims(our_shape), _dims(their_shape), line, fused, culprit, basis, " ".join(estimated),
        decided_by, limit, limit_from, severity,
    ]
    # fmt: on


def _dims(shape: tuple[int, ...] | None) -> str | None:
    """A shape as `2x3`; a 0-d tensor is `scalar`, absence no text."""
    return None if shape is None else "x".join(map(str, shape)) or "scalar"


def _double(value: Number | None) -> float | None:
    return None if value is None else float(value)
