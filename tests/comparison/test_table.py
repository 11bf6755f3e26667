"""The table: what it says of itself, and that it comes back from disk as it was."""

import csv
import json
import math

import pytest

from driftline.comparison.table.files import is_table, open_table
from driftline.comparison.table.row import ROW_FIELDS, Column, Row, number_from_json, number_to_json
from driftline.comparison.table.table import SCHEMA, Coverage, Side, Table
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.runs.records import TensorKey


def make_table():
    rows = (
        Row(
            TensorKey.of("model", "input", "x"),
            "pass",
            order=0,
            reference_dtype="float32",
            candidate_dtype="bfloat16",
            reference_shape=(2, 3),
            candidate_shape=(2, 3),
            basis="values",
            metrics={"relative_l2": 0.001, "different": 6, "max_rel_error": math.inf},
            decided_by="relative_l2",
            limit=0.05,
            limit_from="bfloat16",
            severity=0.02,
        ),
        Row(
            TensorKey.of("model.mlp", "output", "0", step=2, rank=1, visit=3),
            "fail",
            "NaN or Inf on one side only",
            order=1,
            class_name="MLP",
            reference_shape=(),
            candidate_shape=(),
            metrics={"relative_l2": math.nan, "projection": -math.inf, "different": 2**60 + 1},
            severity=math.inf,
        ),
        Row(TensorKey("model", "output", "0", process=1, phase="recompute"), "missing", "gone"),
        Row(TensorKey.of("model", "output", "1"), "extra", 'a "quoted", reason\nin two lines'),
    )
    return Table(
        rows,
        (
            Column("relative_l2", "lower", "||c - r|| / ||r||"),
            Column("different", "lower", unit="elements"),
            Column("max_rel_error", "lower"),
            Column("projection", "zero"),
        ),
        verdict="fail",
        first=rows[1],
        first_site="model.mlp",
        finding="the drift starts at 'model.mlp'",
        limits={"from": "dtype", "worst": math.inf},
        reference=Side("ref", {"command": ["python", "x.py"]}),
        candidate=Side("cand", losses=("rank0: torn line",)),
    )


def same(a, b):
    """Equality in which NaN equals NaN."""
    return repr(a) == repr(b)


def test_a_table_comes_back_from_disk_as_it_was_nan_and_inf_included(tmp_path):
    table = make_table()
    folder = table.write(tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == [
        "rows.csv",
        "rows.parquet",
        "table.json",
    ]
    back = open_table(folder)
    assert same(back.rows, table.rows)
    assert same(back.first, table.first)
    assert back.columns == table.columns
    assert (back.verdict, back.first_site, back.finding) == ("fail", "model.mlp", table.finding)
    assert back.reference == table.reference
    assert back.candidate == table.candidate
    assert back.coverage == table.coverage
    assert back.rows[1].metrics["different"] == 2**60 + 1


def test_table_json_is_strict_json_of_the_promised_form(tmp_path):
    make_table().write(tmp_path / "out")

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    shown = json.loads((tmp_path / "out/table.json").read_text(), parse_constant=refuse)
    assert shown["schema"] == SCHEMA
    assert shown["verdict"] == "fail"
    assert shown["first_site"] == "model.mlp"
    assert shown["coverage"] == {
        "compared": 2,
        "missing": 1,
        "incomparable": 0,
        "extra": 1,
        "inside_fusion": 0,
    }
    for row in shown["rows"]:
        for name in ("site", "port", "slot", "step", "rank", "visit", "status", "reason"):
            assert name in row
        assert row["status"] in ("pass", "fail", "incomparable", "missing", "extra")
    assert shown["rows"][1]["relative_l2"] == "nan"
    assert shown["rows"][1]["projection"] == "-inf"
    assert shown["rows"][0]["max_rel_error"] == "inf"
    assert shown["metrics"]["relative_l2"]["direction"] == "lower"


def test_csv_and_parquet_hold_the_same_cells(tmp_path):
    import pyarrow.parquet as pq

    table = make_table()
    folder = table.write(tmp_path / "out")
    with (folder / "rows.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    parquet = pq.read_table(folder / "rows.parquet").to_pylist()
    assert len(lines) == len(parquet) == len(table)
    for line, cells, row in zip(lines, parquet, table.rows, strict=True):
        assert line["site"] == cells["site"] == row.site
        assert line["reason"] == cells["reason"] == row.reason
        for name in ("relative_l2", "different", "max_rel_error", "projection"):
            value = row.metrics.get(name)
            if value is None:
                assert line[name] == ""
                assert cells[name] is None
            else:
                assert same(float(line[name]), float(value))
                assert same(cells[name], float(value))
    assert lines[0]["reference_shape"] == "2x3"
    assert list(lines[0])[: len(ROW_FIELDS)] == list(ROW_FIELDS)


def test_nothing_is_overwritten_without_force(tmp_path):
    table = make_table()
    table.write(tmp_path / "out")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(AlreadyThere):
        table.write(tmp_path / "out")
    table.write(tmp_path / "out", force=True)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput):
        table.write(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is no comparison table"),
        ('{"schema": "driftline.table/9"}', "has schema 'driftline.table/9'"),
        ('{"schema": "driftline.table/1"}', "damaged"),
        ('{"schema": "driftline.table/1", "metrics": {}, "rows": [{"site": 1}]}', "damaged"),
    ],
)
def test_what_is_no_table_is_refused_with_a_sentence(tmp_path, text, said):
    (tmp_path / "table.json").write_text(text)
    assert is_table(tmp_path)
    with pytest.raises(BadFile, match=said):
        open_table(tmp_path)


def test_a_folder_without_a_table_is_refused(tmp_path):
    assert not is_table(tmp_path)
    with pytest.raises(BadFile, match="holds no table"):
        open_table(tmp_path)


def test_worst_rows_come_first_by_status_then_by_distance_from_the_limit():
    def row(status, severity):
        return Row(TensorKey.of("a", "output"), status, severity=severity)

    rows = (row("pass", 0.5), row("fail", 2.0), row("missing", 0.0), row("fail", math.nan))
    worst = Table(rows).worst(3)
    assert [each.status for each in worst] == ["fail", "fail", "missing"]
    assert math.isnan(worst[0].severity)


def test_nan_never_keeps_a_limit_in_any_direction():
    for direction in ("lower", "higher", "zero", "none"):
        assert not Column("m", direction).holds(math.nan, 1.0)
        assert not Column("m", direction).holds(0.5, math.nan)
    assert Column("m", "zero").holds(-0.5, 1.0)
    assert not Column("m", "zero").holds(-2.0, 1.0)


def test_numbers_survive_json_and_other_things_are_no_numbers():
    for value in (0.1, 5, math.inf, -math.inf):
        assert number_from_json(number_to_json(value)) == value
    assert math.isnan(number_from_json(number_to_json(math.nan)))
    for wrong in (True, None, [1], {}):
        with pytest.raises(ValueError, match="is no number"):
            number_from_json(wrong)


def test_coverage_counts_every_status_once():
    coverage = make_table().coverage
    assert coverage == Coverage(compared=2, missing=1, extra=1, incomparable=0)
    assert coverage.share == 0.5
    assert str(coverage) == "2 of 4 tensors compared, 1 missing, 1 extra"


@pytest.mark.parametrize(
    ("direction", "inside", "outside"),
    [
        ("lower", [0.5, 0.4, -7.0], [0.6, math.inf, math.nan]),
        ("higher", [0.5, 0.6, math.inf], [0.4, -7.0, math.nan]),
        ("zero", [0.5, -0.5, 0.0], [0.6, -0.6, -math.inf, math.nan]),
        ("none", [], [0.5, 0.0]),
    ],
)
def test_a_limit_itself_is_kept_and_nan_keeps_none(direction, inside, outside):
    column = Column("metric", direction)
    assert all(column.holds(value, 0.5) for value in inside)
    assert not any(column.holds(value, 0.5) for value in outside)
    assert not any(column.holds(value, math.nan) for value in inside)
