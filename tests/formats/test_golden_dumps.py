"""The golden dumps of the seeds' formats: what the command line says of each, and that our writers
still write the same files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from driftline import open_run
from driftline.cli.main import main
from support.golden_dumps import FORMATS, GENERATIONS, archive

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
            if not path.endswith((".pth", ".bin")):
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
