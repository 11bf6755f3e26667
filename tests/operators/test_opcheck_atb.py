"""`driftline opcheck` on ATB dumps: planted faults are named, clean dumps pass."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from driftline.cli.main import main
from driftline.operators import golden
from support.atb import NZ, AtbDump, Operation, Value

MINI = Path(__file__).parents[1] / "data" / "ascend" / "mini_atb"
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def operation(kind: str, param: dict[str, Any], inputs: Sequence[Any]) -> Operation:
    """An operation with the outputs it should have."""
    outputs = golden(kind, param, inputs)
    return Operation(
        kind,
        [Value(f"in{at}", each) for at, each in enumerate(inputs)],
        [Value(f"out{at}", each) for at, each in enumerate(outputs)],
        param=param,
    )


def spoilt(whole: Operation, change: Any, output: int = 0) -> Operation:
    """The same with one output changed."""
    outputs = list(whole.outputs)
    values = np.array(outputs[output].values)
    outputs[output] = Value(f"out{output}", change(values).astype(values.dtype))
    return Operation(whole.kind, whole.inputs, outputs, whole.param)


def layer(dtype: str = "float16") -> dict[str, Operation]:
    """A norm, linear layers, a rotary embedding, a softmax and a quantisation."""
    rng = np.random.default_rng(0)
    kind = TYPES[dtype]

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(kind)

    angles = rng.uniform(0, 6, (6, 8))
    cos, sin = np.cos(angles).astype(kind), np.sin(angles).astype(kind)
    norm = {"layerType": 1, "normParam": {"epsilon": 1e-5}}
    quant = {"elewiseType": 6, "quantParam": {"inputScale": 0.05}}
    length = np.array([6], np.int32)
    return {
        "norm": operation("RmsNormOperation", norm, [draw(6, 16), draw(16)]),
        "linear": operation("LinearOperation", {"hasBias": False}, [draw(6, 16), draw(24, 16)]),
        "rope": operation(
            "RopeOperation", {"rotaryCoeff": 2}, [draw(6, 16), draw(6, 16), cos, sin, length]
        ),
        "softmax": operation("SoftmaxOperation", {"axes": [-1]}, [draw(6, 16)]),
        "quant": operation("ElewiseOperation", quant, [draw(6, 16)]),
        "int8": operation(
            "LinearOperation",
            {"outDataType": {"float16": 1, "bfloat16": 27, "float32": 0}[dtype]},
            [
                rng.integers(-128, 128, (6, 32)).astype(np.int8),
                rng.integers(-128, 128, (8, 32)).astype(np.int8),
                rng.integers(-99, 99, 8).astype(np.int32),
                rng.uniform(1e-4, 1e-3, 8).astype(np.float32).view(np.uint32).astype(np.int64),
            ],
        ),
    }


FAULTS = {
    "norm": lambda y: y * 1.02,
    "linear": lambda y: np.where(np.arange(y.shape[1]) == 5, 0, y),
    "rope": lambda y: np.roll(y, 1, -1),
    "softmax": lambda y: y * 1.01,
    "quant": lambda y: y + 3,
    "int8": lambda y: y * 1.1,
}


def dump_of(folder: Path, operations: Sequence[Operation], **options: Any) -> AtbDump:
    dump = AtbDump(folder, options.pop("generation", "G3"), **options)
    whole = Operation("Decoder_layer", operations[0].inputs, operations[-1].outputs)
    whole.children = list(operations)
    dump.execute([whole], first_id=1)
    dump.operation_csv([whole], first_id=1)
    dump.topology("Toy", [whole], first_id=1)
    return dump


def check(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> Any:
    """Run the command and give back its JSON."""
    found = main(["opcheck", *map(str, words), "--format", "json"])
    said = capsys.readouterr()
    assert found == code, said.out + said.err
    return json.loads(said.out)


@pytest.mark.parametrize("with_csv", [False, True])
@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_a_clean_dump_passes(
    dtype: str, with_csv: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = dump_of(tmp_path, list(layer(dtype).values()))
    words: list[object] = ["-i", dump.execution(0)]
    if with_csv:
        words += ["-c", next(dump.root.rglob("operation_tensors_0.csv"))]
    found = check(capsys, *words, code=0)
    assert found["coverage"]["operators"] == found["coverage"]["passed"] == 6
    assert {row["dtype"] for row in found["rows"]} == {dtype, "int8"}


@pytest.mark.parametrize("with_csv", [False, True])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_named_and_nothing_else(
    fault: str, with_csv: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations = layer()
    operations[fault] = spoilt(operations[fault], FAULTS[fault])
    dump = dump_of(tmp_path, list(operations.values()))
    words: list[object] = ["-i", tmp_path]
    if with_csv:
        words += ["-c", next(dump.root.rglob("operation_tensors_0.csv"))]
    found = check(capsys, *words, code=1)
    at = list(operations).index(fault)
    failing = [row for row in found["rows"] if row["status"] == "fail"]
    assert [(row["ids"], row["output"]) for row in failing] == [(f"1_{at}", "0")]
    assert failing[0]["site"] == f"1_Decoder_layer.{at}_{operations[fault].kind}"
    assert failing[0]["site"] in found["verdict"]
    assert found["coverage"]["passed"] == 5


@pytest.mark.parametrize("generation", ["G0", "G1", "G2", "G2t", "G3", "G4"])
def test_dumps_of_every_generation_are_checked(
    generation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations = layer()
    operations["norm"] = spoilt(operations["norm"], FAULTS["norm"])
    dump_of(tmp_path, list(operations.values()), generation=generation)
    found = check(capsys, "-i", tmp_path, code=1)
    assert [row["ids"] for row in found["rows"] if row["status"] == "fail"] == ["1_0"]
    assert found["coverage"]["passed"] == 5


@pytest.mark.parametrize("time", [1, 2, 3])
def test_inputs_are_found_whenever_they_were_dumped(
    time: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump_of(tmp_path, list(layer().values()), time=time)
    assert check(capsys, "-i", tmp_path, code=0)["coverage"]["passed"] == 6


def test_outputs_of_before_the_execution_are_not_taken_for_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump_of(tmp_path, list(layer().values()), time=0)
    found = check(capsys, "-i", tmp_path, code=2)
    assert "only what their memory held before the execution" in found["rows"][0]["reason"]


def test_a_folder_whose_name_is_a_program_does_not_become_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = spoilt(layer()["softmax"], FAULTS["softmax"])
    dump = AtbDump(tmp_path / "dump", "G3")
    dump.execute([wrong])
    folder = dump.execution(0)
    name = '0_"""; print("OWNED"); """_SoftmaxOperation'
    (folder / "0_SoftmaxOperation").rename(folder / name)
    check(capsys, "-i", tmp_path / "dump", "--repro", tmp_path / "failing", code=1)
    (place,) = (tmp_path / "failing").iterdir()
    done = in_a_clean_interpreter(place / "repro.py")
    assert done.returncode == 1 and "OWNED" not in done.stdout


def test_a_linear_layer_of_8192_in_float16_that_sums_in_float16_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8192)).astype(np.float16)
    w = rng.standard_normal((16, 8192)).astype(np.float16)
    y = np.zeros((4, 16), np.float16)
    for at in range(0, 8192, 32):
        part = x[:, at : at + 32].astype(np.float32) @ w[:, at : at + 32].astype(np.float32).T
        y = y + part.astype(np.float16)
    made = Operation(
        "LinearOperation", [Value("x", x), Value("w", w)], [Value("y", y)], {"hasBias": False}
    )
    dump_of(tmp_path, [made])
    found = check(capsys, "-i", tmp_path, code=0)
    assert [row["bound_name"] for row in found["rows"]] == ["float16, K=8192"]


def test_ids_and_names_must_both_match_and_are_read_as_the_seed_prints_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump_of(tmp_path, list(layer().values()))
    kinds = lambda found: [row["op_type"] for row in found["rows"]]  # noqa: E731
    both = check(capsys, "-i", tmp_path, "-ids", "1_0,", "1_1", "-opname", "LINEAR", code=0)
    assert kinds(both) == ["LinearOperation"]
    assert both["coverage"]["filtered"] == 5
    found = check(capsys, "-i", tmp_path, "-opname", "max，norm", code=0)
    assert kinds(found) == ["RmsNormOperation", "SoftmaxOperation"]
    assert len(kinds(check(capsys, "-i", tmp_path, "-ids", "1", code=0))) == 7, "rope has two"
    assert main(["opcheck", "-i", str(tmp_path), "-ids", "1_0", "-opname", "linear"]) == 2
    assert "leave none of 6 operators" in capsys.readouterr().err


def test_the_csv_has_the_originals_columns_and_the_metrics_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations = layer()
    operations["softmax"] = spoilt(operations["softmax"], FAULTS["softmax"])
    dump_of(tmp_path / "dump", list(operations.values()))
    words = ["-i", str(tmp_path / "dump"), "-o", str(tmp_path / "out"), "-metric", "kl", "abs"]
    assert main(["opcheck", *words, "cos_sim"]) == 1
    said = capsys.readouterr().out
    assert "1 of 6 checked operators is not right; first 1_Decoder_layer.3_SoftmaxOperation" in said
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("opcheck_result_") and path.suffix == ".csv"
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    names = list(rows[0])
    assert names[:9] == [
        *("op_id", "op_name", "op_param", "tensor_path", "out_tensor_id", "precision_standard"),
        *("excuted_information", "precision_result(%)", "max_rel_error"),
    ]
    assert names[9:13] == [
        *("abs_precision_result(%)", "max_abs_error", "cosine_similarity", "kl_divergence"),
    ]
    wrong = next(row for row in rows if row["status"] == "fail")
    assert wrong["op_id"] == "1_3"
    assert wrong["op_name"] == "SoftmaxOperation"
    assert json.loads(wrong["op_param"]) == {"axes": [-1]}
    assert wrong["tensor_path"].endswith("1_Decoder_layer/3_SoftmaxOperation/after/outtensor0.bin")
    assert wrong["precision_standard"] == "99.9%(error<=0.001)"
    assert wrong["excuted_information"] == "execution successful"
    assert 0.0 <= float(wrong["precision_result(%)"]) < 99.9
    assert float(wrong["max_rel_error"]) == pytest.approx(0.01, rel=0.2)


def test_operators_in_place_are_checked_by_the_input_they_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    new = rng.standard_normal((3, 8)).astype(np.float16)
    before = np.zeros((2, 2, 4, 8), np.float16)
    numbers = [np.array([1], np.int32), np.array([2, 1], np.int32), np.array([2, 1], np.int32)]
    (after,) = golden("KvCacheOperation", {}, [new, numbers[0], before, *numbers[1:]])
    assert (
        after[1, 0, :2].tolist() == new[:2].tolist() and after[1, 1, 0].tolist() == new[2].tolist()
    )
    dump = AtbDump(tmp_path, "G3", time=2)
    inputs = [new, numbers[0], before, *numbers[1:]]
    dump.execute([Operation("KvCacheOperation", [Value("x", each) for each in inputs], [], {})])
    place = dump.execution(0) / "0_KvCacheOperation" / "after"
    from support.atb import write_bin

    (place / "intensor2.bin").unlink()
    write_bin(place / "intensor2.bin", after)
    assert check(capsys, "-i", tmp_path, code=0)["coverage"]["passed"] == 1
    (place / "intensor2.bin").unlink()
    write_bin(place / "intensor2.bin", before)
    assert check(capsys, "-i", tmp_path, code=1)["coverage"]["failed"] == 1


def test_an_input_that_was_overwritten_in_place_is_not_blamed_on_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.linspace(1, 2, 8).astype(np.float16)
    value = Value("y", y)
    made = Operation("ElewiseOperation", [value, value], [value], {"elewiseType": 8})
    AtbDump(tmp_path, "G3", time=1).execute([made])
    found = check(capsys, "-i", tmp_path, code=2)
    assert "worked in place" in found["rows"][0]["reason"]


def test_operators_that_join_ranks_take_the_inputs_of_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((2, 4)).astype(np.float16) for _ in range(2)]
    (total,) = golden("AllReduceOperation", {"rankSize": 2}, parts)
    for rank, part in enumerate(parts):
        made = Operation(
            "AllReduceOperation",
            [Value("x", part)],
            [Value("y", total if rank == 0 else total + np.float16(1))],
            {"rank": rank, "rankSize": 2, "allReduceType": "sum"},
        )
        AtbDump(tmp_path, "G3", device=rank, pid=100 + rank).execute([made])
    found = check(capsys, "-i", tmp_path, code=1)
    assert [(row["rank"], row["status"]) for row in found["rows"]] == [(0, "pass"), (1, "fail")]
    alone = next((tmp_path / "msit_dump_20240701_120000" / "tensors").iterdir())
    found = check(capsys, "-i", alone, code=2)
    assert "joins 2 ranks, and 1 of them" in found["rows"][0]["reason"]


def test_weights_in_tiles_are_multiplied_as_matrices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 32)).astype(np.float16)
    w = rng.standard_normal((16, 32)).astype(np.float16)
    (y,) = golden("LinearOperation", {"hasBias": False}, [x, w])
    (tiles,) = golden("TransdataOperation", {"transdataType": 2}, [w])
    made = [
        Operation(
            "LinearOperation",
            [Value("x", x), Value("w", tiles, NZ)],
            [Value("y", y)],
            {"hasBias": False},
        ),
        Operation(
            "TransdataOperation",
            [Value("w", w)],
            [Value("t", tiles, NZ)],
            {"transdataType": 2},
        ),
    ]
    AtbDump(tmp_path, "G3").execute(made)
    assert check(capsys, "-i", tmp_path, code=0)["coverage"]["passed"] == 2
    wrong = [Operation(m.kind, m.inputs, [Value("y", m.outputs[0].values)], m.param) for m in made]
    spoilt_tiles = tiles.copy()
    spoilt_tiles[0, 0, 0, 0] += 1
    wrong[0].outputs = [Value("y", y + np.float16(1))]
    wrong[1].outputs = [Value("t", spoilt_tiles, NZ)]
    AtbDump(tmp_path / "wrong", "G3").execute(wrong)
    check(capsys, "-i", tmp_path / "wrong", "--repro", tmp_path / "failing", code=1)
    for script in sorted((tmp_path / "failing").rglob("repro.py")):
        done = in_a_clean_interpreter(script)
        assert done.returncode == 1, done.stderr
        if "Transdata" in script.parent.name:
            assert done.stdout.count("largest error 1\n") == 1
            assert "99.8 % of the elements" in done.stdout, "511 of 512 are right"


def test_attention_that_sees_what_comes_later_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2, 8)).astype(np.float16) for _ in range(3))
    inputs = [q, k, v, np.triu(np.full((6, 6), -1e4, np.float16), 1), np.array([6], np.int32)]
    param = {"calcType": 3, "headNum": 2, "qkScale": 0.35, "maskType": 1}
    (seeing,) = golden("SelfAttentionOperation", {**param, "maskType": 0}, [q, k, v, inputs[4]])
    right = operation("SelfAttentionOperation", param, inputs)
    AtbDump(tmp_path, "G3").execute([right, spoilt(right, lambda y: seeing)])
    found = check(capsys, "-i", tmp_path, code=1)
    assert [row["status"] for row in found["rows"]] == ["pass", "fail"]


def test_a_rotary_embedding_of_the_wrong_kind_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = layer()["rope"]
    inputs = [value.values for value in right.inputs]
    interleaved = golden("RopeOperation", {"rotaryCoeff": 64}, inputs)[1]
    AtbDump(tmp_path, "G3").execute([spoilt(right, lambda y: interleaved, output=1)])
    found = check(capsys, "-i", tmp_path, code=1)
    assert [(row["output"], row["status"]) for row in found["rows"]] == [
        ("0", "pass"),
        ("1", "fail"),
    ]


def test_kernels_and_graphs_are_counted_not_checked_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations = layer()
    made = operations["softmax"]
    with_kernel = Operation(
        made.kind, made.inputs, made.outputs, made.param, kernels=["SoftmaxF16Kernel"]
    )
    dump_of(tmp_path, [with_kernel, operations["norm"]])
    found = check(capsys, "-i", tmp_path, code=0)
    assert found["coverage"]["operators"] == 2
    said = " ".join(found["remarks"])
    assert "1 graph is checked by the operators inside (Decoder_layer)" in said
    assert "1 kernel is checked as part of the operator around" in said


def test_a_norm_whose_gamma_is_missing_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump_of(tmp_path, [layer()["norm"]])
    for gamma in list(tmp_path.rglob("intensor1.bin")):
        gamma.unlink()
    found = check(capsys, "-i", tmp_path, code=2)
    assert found["rows"][0]["reason"] == "gamma is not there; 1 was taken"


def test_the_planted_error_of_the_golden_dump_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = check(capsys, "-i", MINI, code=1)
    failing = [row["site"] for row in found["rows"] if row["status"] == "fail"]
    assert failing == ["6_Decoder_layer.1_LinearOperation"]
    assert found["coverage"]["passed"] == 22, "12 norms without gamma, 10 linear layers"
    reasons = {each["reason"] for each in found["coverage"]["reasons"]}
    assert "there is no golden implementation of WordEmbedding" in reasons


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_reproducer_shows_the_error_where_driftline_is_not_installed(
    fault: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations = layer(dtype)
    clean = operations[fault]
    operations[fault] = spoilt(clean, FAULTS[fault])
    dump_of(tmp_path / "dump", list(operations.values()))
    words = ["-i", tmp_path / "dump", "--repro", tmp_path / "failing"]
    check(capsys, *words, code=1)
    (folder,) = (tmp_path / "failing").iterdir()
    assert {path.name for path in folder.iterdir()} == {"repro.py", "tensors.npz"}
    done = in_a_clean_interpreter(folder / "repro.py")
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout and "should be" in done.stdout
    pairs = re.findall(r"gave (\S+), should be (\S+)", done.stdout)
    assert pairs and all(gave != golden for gave, golden in pairs), "what is right is not shown"
    with np.load(folder / "tensors.npz") as held:
        tensors = dict(held)
    right = np.asarray(clean.outputs[0].values)
    tensors["output0"] = (
        right.view(np.uint16) if dtype == "bfloat16" and fault != "quant" else right
    )
    np.savez(folder / "tensors.npz", **tensors)
    assert in_a_clean_interpreter(folder / "repro.py").returncode == 0, "the right output is right"


def test_reproducers_are_written_for_the_first_twenty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = spoilt(layer()["softmax"], FAULTS["softmax"])
    AtbDump(tmp_path / "dump", "G3").execute([wrong] * 23)
    words = ["-i", str(tmp_path / "dump"), "--repro", str(tmp_path / "failing")]
    assert main(["opcheck", *words, "-o", str(tmp_path / "out")]) == 1
    assert "no reproducer: 3 more operators" in capsys.readouterr().out
    assert len(list((tmp_path / "failing").iterdir())) == 20


def in_a_clean_interpreter(script: Path) -> subprocess.CompletedProcess[str]:
    """Python with numpy and nothing else of ours."""
    guard = (
        "import runpy, sys\n"
        "sys.modules['driftline'] = sys.modules['ml_dtypes'] = sys.modules['torch'] = None\n"
        f"sys.argv = [{str(script)!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", guard],
        env=environment,
        cwd=script.parent,
        capture_output=True,
        text=True,
    )
