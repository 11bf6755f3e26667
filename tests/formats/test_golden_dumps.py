"""The golden dumps of the seeds' formats: what the command line says of each, and that our writers
still write the same files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

from driftline import open_run
from driftline.cli.main import main
from driftline.decoding.files.outputs import read_out
from driftline.decoding.scoring import score
from support.golden_dumps import FORMATS, GENERATIONS, LAYERS, archive

DATA = Path(__file__).parents[1] / "data" / "seeds"


@pytest.fixture
def unpacked(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with zipfile.ZipFile(DATA / f"{request.param}.zip") as file:
        file.extractall(tmp_path / "dump")
    return tmp_path / "dump"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_writers_still_write_these_files(name: str) -> None:
    written = archive(FORMATS[name])
    with zipfile.ZipFile(DATA / f"{name}.zip") as file:
        assert sorted(file.namelist()) == sorted(written)
        for path in file.namelist():
            # What torch.save writes changes with its version, and sums with the processor.
            if not path.endswith((".pth", ".pt", ".bin", "_output")):
                assert file.read(path) == written[path], path


def verdict(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    main([str(word) for word in words])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("unpacked", ["ait_and_atb"], indirect=True)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_tree_in_the_order_of_registration(
    unpacked: Path, mapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "-gp", unpacked / "torch", "-o", unpacked / "report"]
    words += ["-mf", unpacked] if mapped else []
    assert verdict(capsys, *words, "-mp", unpacked / "atb").startswith("PASS: 60 of ")
    faulty = verdict(capsys, *words, "-mp", unpacked / "faulty")
    assert faulty.startswith("FAIL: the drift starts at 'layers.1.mlp.act_fn'")


@pytest.mark.parametrize("unpacked", ["atb_devices"], indirect=True)
def test_device_folders(unpacked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "-gp", unpacked / "clean", "-o", unpacked / "report", "-mp")
    assert verdict(capsys, *words, unpacked / "clean").startswith("PASS")
    assert "on rank 1" in verdict(capsys, *words, unpacked / "faulty")


@pytest.mark.parametrize("unpacked", ["ait_statistics"], indirect=True)
def test_descriptions_and_figures_of_one_module(unpacked: Path) -> None:
    run = open_run(unpacked)
    assert {record.key.port: record.kept for record in run.records} == {
        "input": "describe",
        "output": "summary",
    }


@pytest.mark.parametrize("unpacked", ["atb_generations"], indirect=True)
def test_the_probe_of_every_generation(unpacked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for generation in GENERATIONS:
        run = open_run(unpacked / generation)
        (result,) = (tensor for tensor in run.tensors() if tensor.key.port == "output")
        assert result.dtype == "float16"
        assert result.numpy().tolist() == [[1, 2, 3], [4, 5, 6]], generation
    words = ("compare", "-gp", unpacked / "G0", "-mp", unpacked / "G4", "-o", unpacked / "report")
    assert verdict(capsys, *words).startswith("PASS: 3 tensors compared, none differs")


@pytest.mark.parametrize("unpacked", ["atb_lists"], indirect=True)
@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_what_lies_beside_the_tensors(
    unpacked: Path,
    spelling: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A narrow terminal, such as xdist gives its workers, drops columns of a table.
    monkeypatch.setenv("COLUMNS", "160")
    shown = verdict(capsys, "show", unpacked)
    assert "model topology, layer topology ×2, operation csv, kernel csv, cpu profiling ×2" in shown
    assert "LinearOperation 7 2 12 4 30" in shown and "LinearOperation 6 11" in shown
    lists = unpacked / "ait_dump" / "operation_io_tensors" / "4242"
    words = ["opcheck", "-i", str(unpacked / "ait_dump" / "tensors" / "0_4242" / "0")]
    words += ["-c", str(lists / "operation_tensors_0.csv"), "-o", str(unpacked)]
    place = Path(sys.executable).parent
    command = [str(place / "ait"), "llm"] if spelling == "theirs" else [str(place / "driftline")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stderr
    (result,) = unpacked.glob("opcheck_result_*.csv")
    with result.open(newline="") as stream:
        passed = {row["op_name"]: row["precision_result(%)"] for row in csv.DictReader(stream)}
    assert {name: float(share) for name, share in passed.items()} == {
        "LinearOperation": 100.0,
        "SoftmaxOperation": 0.0,
    }


@pytest.mark.parametrize("unpacked", ["ait_by_hand"], indirect=True)
def test_tensors_that_a_program_dumped_by_hand(unpacked: Path) -> None:
    run = open_run(unpacked)
    assert {(r.key.site, r.key.step, r.key.rank) for r in run.records} == {
        ("out", 0, 1),
        ("out", 3, 1),
    }
    first, second = (tensor.numpy() for tensor in run.tensors())
    numpy.testing.assert_array_equal(second - first, 3.0)


@pytest.mark.parametrize("unpacked", ["ge_and_fx"], indirect=True)
def test_a_graph_of_ge_against_its_fx_nodes(
    unpacked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("compare", "-gp", unpacked / "fx", "-o", unpacked / "report", "-mp")
    assert verdict(capsys, *words, unpacked / "ge").startswith("PASS")
    faulty = verdict(capsys, *words, unpacked / "faulty")
    assert faulty.startswith("FAIL: the drift starts at 'add_2'")


@pytest.mark.parametrize("unpacked", ["ge_one_stamp"], indirect=True)
def test_operators_of_one_time_stamp(unpacked: Path) -> None:
    sites = list(dict.fromkeys(record.key.site for record in open_run(unpacked).records))
    assert sites == ["First", "Middle", "Last"]


@pytest.mark.parametrize("unpacked", ["paddle_hook"], indirect=True)
def test_gradients_of_a_recurrent_layer(unpacked: Path) -> None:
    run = open_run(unpacked)
    assert {record.key.step for record in run.records} == {0, 1}
    assert sum(record.key.site == "lstm_cell_0" for record in run.records) == 8


def seeds_own(script: str, *words: object) -> str:
    """The script of the documents, as it lies beside the interpreter."""
    command = [sys.executable, str(Path(sys.executable).parent / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
@pytest.mark.parametrize("unpacked", ["layer_metrics"], indirect=True)
@pytest.mark.parametrize("version", ["documented", "newer"])
def test_files_of_layers_and_their_thresholds(
    unpacked: Path, version: str, spelling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both versions hold the same rows, so one average; in the order of execution."""
    words = ["--models", "acme/toy", "--metrics", "abs_diff", "cos_sim", "--layer_io"]
    words += ["--file_base", str(unpacked / version), "--output_path", str(unpacked)]
    said = thresholds(capsys, spelling, *words)
    lines = [line.split() for line in said.splitlines() if line.startswith("Layer ")]
    printed = {(line[3], line[1]): float(line[5]) for line in lines}
    rows = {
        tuple(path.name.removesuffix(".csv").partition("--model")[2].rsplit(".", 1)): path
        for path in (unpacked / "documented").glob("*.csv")
    }
    assert printed == {
        (metric, f"model{layer}"): pytest.approx(numpy.loadtxt(path, skiprows=1).mean(), rel=1e-12)
        for (layer, metric), path in rows.items()
    }
    assert [line[1].removeprefix("model.base_model.") for line in lines[: len(LAYERS)]] == [
        *("embedding", "layers0.ln", "layers0.attn.dense", "layers2.ln", "layers10.ln", "dec_norm")
    ]


def thresholds(capsys: pytest.CaptureFixture[str], spelling: str, *words: str) -> str:
    if spelling == "theirs":
        return seeds_own("get_thresholds.py", *words)
    assert main(["thresholds", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("unpacked", ["layer_metrics"], indirect=True)
@pytest.mark.parametrize("version", ["documented", "newer"])
def test_layers_are_judged_by_thresholds_of_either_version(
    unpacked: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = unpacked / version / "acme--toy-thresholds.json"
    # Their abs_diff is a norm whatever they call it, and is judged as one: what they were made
    # from passes by a hair, and a tenth more of one layer does not.
    words = ("check", unpacked / "documented", "--thresholds", limits, "--slack", 1.001)
    assert verdict(capsys, *words).startswith("PASS")
    (path,) = (unpacked / "documented").glob("*layers10.ln.abs_diff.csv")
    values = numpy.loadtxt(path, skiprows=1) * 1.1
    path.write_text("abs_diff\n" + "".join(f"{value}\n" for value in values))
    faulty = verdict(capsys, *words)
    assert faulty.startswith("FAIL: the drift starts at 'model.base_model.layers10.ln'")


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
@pytest.mark.parametrize("unpacked", ["decoder_metrics"], indirect=True)
@pytest.mark.parametrize("version", ["oldest", "documented"])
def test_metrics_of_tokens_and_their_thresholds(
    unpacked: Path, version: str, spelling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads((unpacked / "documented" / "acme--toy-thresholds.json").read_text())
    words = ["--models", "acme/toy", "--metrics", "diff_mean", "ce", "--file_base"]
    words += [str(unpacked / version), "--output_path", str(unpacked)]
    said = thresholds(capsys, spelling, *words)
    lines = [line.split() for line in said.splitlines() if not line.startswith("driftline")]
    assert [line[:2] for line in lines[::2]] == [["found", "1"]] * 2
    assert [line[:2] for line in lines[1::2]] == [["acme--toy", "diff_mean"], ["acme--toy", "ce"]]
    for line in lines[1::2]:
        assert float(line[-1]) == pytest.approx(kept[line[1]], rel=1e-12)


@pytest.mark.parametrize("unpacked", ["decoder_metrics"], indirect=True)
@pytest.mark.parametrize("version", ["oldest", "documented", "newest"])
def test_saved_outputs_give_the_metrics_beside_them(
    unpacked: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (reference,) = (unpacked / version).glob("*.cpu_validation_info.0.out")
    (candidate,) = (unpacked / version).glob("*.cuda_validation_info.0.out")
    sides = read_out(reference), read_out(candidate)
    prompts = zip(sides[0].logits, sides[1].logits, sides[0].tokens, strict=True)
    scores = [score(trusted, other, tokens[-3:]) for trusted, other, tokens in prompts]
    for path in sorted((unpacked / "documented").glob("*.csv")):
        metric, *lines = path.read_text().split()
        figures = [value for prompt in scores for value in getattr(prompt, metric).tolist()]
        assert figures == pytest.approx([float(line) for line in lines], rel=1e-9), metric
    words = ("compare", reference, candidate, "--max", "relative_l2=0.02", "-o", unpacked / "t")
    assert verdict(capsys, *words).startswith("PASS: 8 tensors")


@pytest.mark.parametrize("unpacked", ["labels"], indirect=True)
def test_labels_of_two_processes(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(unpacked)
    assert main(["labels", "--from", "cmp_dump_data"]) == 1
    capsys.readouterr()
    with Path("71_1_cmp_result.csv").open(newline="") as stream:
        rows = {row["data_id"]: row for row in csv.DictReader(stream)}
    assert [rows[name]["cmp_flag"] for name in ("high", "low", "wrong", "alone")] == [
        *("True", "True", "True", "False")
    ]
    assert (rows["high"]["pta_dtype"], rows["high"]["acl_dtype"]) == ("float32", "float16")
    assert rows["low"]["acl_data_path"].endswith(
        "72_1/0_Encoder/3_SelfAttentionRunner/after/outTensor0.bin"
    )
    assert float(rows["low"]["relative_euclidean_distance"]) == 0.0
    assert float(rows["wrong"]["relative_euclidean_distance"]) == 1.0
    assert rows["alone"]["cmp_fail_reason"]
