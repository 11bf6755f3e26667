"""rows.csv says in every column what table.json says under the same name."""

from __future__ import annotations

import csv
import io
import math

import pytest

from driftline.comparison.table.files import write_csv
from driftline.comparison.table.row import ROW_FIELDS, Column, Row
from driftline.comparison.table.table import Table
from driftline.runs.records import TensorKey

KEY = TensorKey("a,b", "input", "x", 1, 2, 3, 4, "recompute", "before")
PAIR = Row(
    *(KEY, "fail", 'said "so"', 5, "z.c", "output", "y", 7, 8, 9, "structure", 0.75),
    *(
        "trim(axis 0, 0:2) of 3x3",
        "transpose(1,0) of 3x2",
        "Linear",
        "Conv",
        "float32",
        "bfloat16",
        (2, 3),
        (),
        "net.py:3 in forward",
        "mlp: silu, mul",
        "'mlp/silu' (aten.silu.default): off",
    ),
    *("values", ("cosine", "rmse"), {"rmse": 0.1, "different": 7, "cosine": math.nan}),
    *("rmse", math.inf, "user", 2.5),
)
LONE = Row(TensorKey("b", "output", "0"), "missing", reference_dtype="int64", reference_shape=(1,))


def shown(value: object, name: str) -> str:
    if isinstance(value, list):
        joined = ("x" if name.endswith("_shape") else " ").join(map(str, value))
        return joined or ("scalar" if name.endswith("_shape") else "")
    return "" if value is None else str(value)


def test_every_cell_is_what_the_json_of_the_row_says() -> None:
    columns = tuple(Column(name, "lower") for name in ("cosine", "rmse", "different"))
    # The second shares the metrics of the first, as a tensor met under two names does.
    rows = (PAIR, PAIR._replace(order=6), LONE)
    stream = io.StringIO()
    write_csv(Table(rows, columns), stream)
    header, *lines = csv.reader(io.StringIO(stream.getvalue()))
    assert header == [*ROW_FIELDS, "cosine", "rmse", "different"]
    for row, line in zip(rows, lines, strict=True):
        said = row.as_json()
        assert line == [shown(said.get(name), name) for name in header]


def test_no_name_and_no_number_breaks_a_line() -> None:
    names = ["a\nb", 'a"b', "a,b", "a b", " a", "'a'", "\u00e9\u4e2d", "", "1"]
    rows = [
        Row(TensorKey(name, "output", name), "pass", reason=name, order=1, limit=1.0, severity=-0.0)
        for name in names
    ]
    rows += [row._replace(metrics={"rmse": 0.5}) for row in rows]
    for some in (rows[: len(names)], rows):  # without numbers behind the words, and with
        stream = io.StringIO()
        write_csv(Table(tuple(some), (Column("rmse", "lower"),)), stream)
        header, *lines = csv.reader(io.StringIO(stream.getvalue(), newline=""))
        for row, line in zip(some, lines, strict=True):
            cells = dict(zip(header, line, strict=True))
            assert [cells[name] for name in ("site", "slot", "reason")] == [row.site] * 3
            assert [cells[name] for name in ("order", "confidence", "limit", "severity")] == [
                *("1", "1.0", "1.0", "-0.0")
            ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.1, "0.1"),
        (-0.0, "-0.0"),
        (1e16, "1e+16"),
        (9999999999999998.0, "9999999999999998.0"),
        (9.9e-5, "9.9e-05"),
        (5e-324, "5e-324"),
        (2**53 + 1, "9007199254740993"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_a_number_is_written_with_the_digits_that_read_back_as_it(number: float, text: str) -> None:
    stream = io.StringIO()
    columns = (Column("rmse", "lower"), Column("different", "lower"))
    row = PAIR._replace(metrics={"rmse": number, "different": 3})
    write_csv(Table((row,), columns), stream)
    assert stream.getvalue().endswith(f",{text},3\n")


def test_a_table_without_measurements_has_the_fixed_columns_only() -> None:
    stream = io.StringIO()
    write_csv(Table((LONE,)), stream)
    header, line = csv.reader(io.StringIO(stream.getvalue()))
    assert tuple(header) == ROW_FIELDS
    assert len(line) == len(header)
