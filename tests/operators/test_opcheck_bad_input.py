"""`driftline opcheck` on what is missing, damaged or foreign: a row or a sentence, always."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.cli.main import main
from driftline.operators import golden
from support.atb import AtbDump, Operation, Value

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(size).astype(np.float16) for size in ((4, 8), (6, 8)))
NO_BIAS = {"hasBias": False}


def linear() -> Operation:
    (y,) = golden("LinearOperation", NO_BIAS, [X, W])
    return Operation(
        "LinearOperation", [Value("x", X), Value("w", W)], [Value("y", y)], dict(NO_BIAS)
    )


def softmax() -> Operation:
    (y,) = golden("SoftmaxOperation", {"axes": [-1]}, [X])
    return Operation("SoftmaxOperation", [Value("x", X)], [Value("y", y)], {"axes": [-1]})


@pytest.fixture
def dump(tmp_path: Path) -> AtbDump:
    made = AtbDump(tmp_path / "dump", "G3")
    made.execute([linear(), softmax()])
    made.operation_csv([linear(), softmax()])
    return made


class Checker:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def rows(self, *words: object, code: int) -> list[dict[str, Any]]:
        found = main(["opcheck", *map(str, words), "--format", "json"])
        said = self._capsys.readouterr()
        assert found == code, said.out + said.err
        return json.loads(said.out)["rows"]

    def refused(self, *words: object) -> str:
        assert main(["opcheck", *map(str, words)]) == 2
        said = self._capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err
        return said.err


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Checker:
    return Checker(capsys)


def csv_of(dump: AtbDump) -> Path:
    return next(dump.root.rglob("operation_tensors_0.csv"))


def test_the_csv_of_another_dump_is_named_as_one(
    dump: AtbDump, check: Checker, tmp_path: Path
) -> None:
    other = AtbDump(tmp_path / "other", "G3")
    norm = {"layerType": 1, "normParam": {}}
    (y,) = golden("RmsNormOperation", norm, [X, W[0]])
    foreign = Operation(
        "RmsNormOperation", [Value("x", X), Value("g", W[0])], [Value("y", y)], norm
    )
    path = other.operation_csv([foreign, foreign, foreign])
    said = check.refused("-i", dump.execution(0), "-c", path)
    assert "none of the 3 operators" in said and "csv of another dump" in said


def test_lines_that_contradict_the_dump_are_rows_with_the_reason(
    dump: AtbDump, check: Checker
) -> None:
    table = csv_of(dump)
    lines = table.read_text().splitlines()
    lines[2] = lines[2].replace("4,8", "4,9")
    lines.append(lines[1].replace("LinearOperation_0", "LinearOperation_7"))
    table.write_text("\n".join(lines) + "\n")
    rows = check.rows("-i", dump.execution(0), "-c", table, code=0)
    assert [row["status"] for row in rows] == ["pass", "not checked", "not checked"]
    assert (
        "the csv says input 0 is float16 [4, 9], in the dump it is float16 [4, 8]"
        in (rows[1]["reason"])
    )
    assert rows[2]["reason"] == "the csv lists it, the dump does not have it"


def test_a_file_that_is_no_operation_csv_is_refused(
    dump: AtbDump, check: Checker, tmp_path: Path
) -> None:
    nonsense = tmp_path / "notes.csv"
    nonsense.write_text("a,b,c\n1,2,3\n")
    assert "is no operation csv" in check.refused("-i", dump.root, "-c", nonsense)
    assert "cannot be read" in check.refused("-i", dump.root, "-c", tmp_path / "nothing.csv")
    kernels = tmp_path / "kernel_tensors_0.csv"
    kernels.write_text(csv_of(dump).read_text().replace("Operation_0", "Op").replace("n_1", "n"))
    assert "lists kernels" in check.refused("-i", dump.root, "-c", kernels)


@pytest.mark.parametrize("with_csv", [False, True])
def test_missing_and_cut_tensors_are_rows_with_the_reason(
    with_csv: bool, dump: AtbDump, check: Checker
) -> None:
    place = dump.execution(0)
    (place / "0_LinearOperation" / "before" / "intensor0.bin").unlink()
    cut = place / "1_SoftmaxOperation" / "after" / "outtensor0.bin"
    cut.write_bytes(cut.read_bytes()[:-3])
    words = ["-c", csv_of(dump)] if with_csv else []
    rows = check.rows("-i", dump.root, *words, code=2)
    assert rows[0]["reason"] == "input 0 is not in the dump"
    assert "output 0 cannot be read: the file is cut short" in rows[1]["reason"]


def test_outputs_that_are_not_there_are_said(dump: AtbDump, check: Checker) -> None:
    shutil.rmtree(dump.execution(0) / "0_LinearOperation" / "after")
    rows = check.rows("-i", dump.root, code=0)
    assert rows[0]["reason"] == "its outputs are not in the dump"


@pytest.mark.parametrize(
    ("keep", "said"),
    [("statistics", "statistics were"), ("description", "the description was")],
)
def test_a_dump_without_values_is_said_to_be_one(
    keep: Any, said: str, tmp_path: Path, check: Checker
) -> None:
    made = AtbDump(tmp_path, "G3", keep=keep)
    made.execute([linear()])
    rows = check.rows("-i", tmp_path, code=2)
    assert rows[0]["reason"] == f"of input 0 only {said} dumped"


def test_an_unknown_operator_is_a_row(dump: AtbDump, check: Checker) -> None:
    folder = dump.execution(0)
    (folder / "0_LinearOperation").rename(folder / "0_WarpDriveOperation")
    rows = check.rows("-i", dump.root, code=0)
    assert rows[0]["reason"] == "there is no golden implementation of WarpDriveOperation"
    assert (rows[0]["status"], rows[1]["status"]) == ("not checked", "pass")


@pytest.mark.parametrize("damage", ["{", "[1, 2]", '"x"', "\x00\xff", "{" * 5000])
def test_damaged_parameters_are_said_unless_the_csv_has_them(
    damage: str, dump: AtbDump, check: Checker
) -> None:
    (dump.execution(0) / "0_LinearOperation" / "op_param.json").write_text(damage)
    rows = check.rows("-i", dump.root, code=0)
    assert "its parameters are damaged" in rows[0]["reason"]
    assert "0_LinearOperation/op_param.json" in rows[0]["reason"]
    assert len(check.rows("-i", dump.root, "-c", csv_of(dump), code=0)) == 2


def test_parameters_damaged_in_the_csv_are_said(dump: AtbDump, check: Checker) -> None:
    (dump.execution(0) / "0_LinearOperation" / "op_param.json").unlink()
    table = csv_of(dump)
    table.write_text(table.read_text().replace('{"hasBias":false}', '{"hasBias":fal'))
    rows = check.rows("-i", dump.root, "-c", table, code=0)
    assert rows[0]["reason"] == "its parameters in the csv are damaged"


def test_shapes_that_do_not_fit_the_operator_are_a_row(tmp_path: Path, check: Checker) -> None:
    made = linear()
    odd = Operation(made.kind, [made.inputs[0], Value("w", W[:, :5])], made.outputs, made.param)
    AtbDump(tmp_path, "G3").execute([odd])
    rows = check.rows("-i", tmp_path, code=2)
    assert rows[0]["reason"] == "[4, 8] times [5, 6]: 8 columns, but 5 rows"


def test_an_output_of_another_shape_fails(tmp_path: Path, check: Checker) -> None:
    made = softmax()
    odd = Operation(made.kind, made.inputs, [Value("y", made.outputs[0].values.T)], made.param)
    AtbDump(tmp_path, "G3").execute([odd])
    rows = check.rows("-i", tmp_path, code=1)
    assert rows[0]["reason"] == "shape [8, 4], but it should be [4, 8]"


def test_more_and_fewer_outputs_than_defined_are_rows(tmp_path: Path, check: Checker) -> None:
    made = softmax()
    more = Operation(made.kind, made.inputs, [*made.outputs, Value("z", X)], made.param)
    split = Operation(
        "SplitOperation", [Value("x", X)], [Value("a", X[:, :4])], {"splitDim": 1, "splitNum": 2}
    )
    AtbDump(tmp_path, "G3").execute([more, split])
    rows = check.rows("-i", tmp_path, code=2)
    assert [(row["output"], row["status"]) for row in rows] == [
        ("0", "pass"),
        ("1", "not checked"),
        ("0", "pass"),
        ("1", "not checked"),
    ]
    assert rows[1]["reason"] == "the definition has no output 1"
    assert rows[3]["reason"] == "output 1 is not in the dump"


def test_words_that_mean_nothing_are_refused(dump: AtbDump, check: Checker, tmp_path: Path) -> None:
    root = dump.root
    assert "needs -i" in check.refused()
    assert "there is no" in check.refused("-i", tmp_path / "nowhere")
    assert "did you mean 'cos_sim'" in check.refused("-i", root, "-metric", "cos")
    assert "'x' is none" in check.refused("-i", root, "-ids", "x")
    assert "AIT_OPCHECK_LIB_PATH does not say" in check.refused("-i", root, "-rerun")
    assert "is a file" in check.refused("-i", root, "-o", csv_of(dump))
    assert "is a file" in check.refused("-i", root, "--repro", csv_of(dump))
    assert "leave none of 2 operators" in check.refused("-i", root, "-opname", "conv")


def test_an_index_outside_of_a_table_is_said_and_reads_nothing(
    tmp_path: Path, check: Checker
) -> None:
    indices = Value("i", np.array([0, 10**9]))
    made = Operation("GatherOperation", [Value("x", X), indices], [Value("y", X)], {"axis": 0})
    AtbDump(tmp_path, "G3").execute([made])
    rows = check.rows("-i", tmp_path, code=2)
    assert rows[0]["reason"] == "an index lies outside of 0 to 3"


def test_a_csv_speaks_for_its_own_process_only(tmp_path: Path, check: Checker) -> None:
    for device in (0, 1):
        made = AtbDump(tmp_path, "G3", device=device, pid=100 + device)
        made.execute([linear() if device == 0 else softmax()])
        made.operation_csv([linear() if device == 0 else softmax()])
    for pid, kind in ((100, "LinearOperation"), (101, "SoftmaxOperation")):
        (table,) = tmp_path.rglob(f"{pid}/operation_tensors_0.csv")
        rows = check.rows("-i", tmp_path, "-c", table, code=0)
        assert [(row["op_type"], row["status"]) for row in rows] == [(kind, "pass")]
