"""`driftline convert`: into a run and out again; what comes back is what went in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline import compare, convert, open_run
from driftline.errors import AlreadyThere, BadInput
from driftline.formats.convert.targets import LIST
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import run_of

DATA = Path(__file__).parents[1] / "data"
TARGETS = ("run", "npy", "pt", "safetensors", "ait")
SOURCES = (
    DATA / "msprobe" / "L0_tensor",
    DATA / "ascend" / "mini_torch",
    DATA / "ascend" / "mini_atb",
    next((DATA / "aiu" / "generate_metrics").glob("*cpu_validation_info.0.out")),
)


def _same(ours: Run, theirs: Run) -> None:
    assert [record.key for record in ours.records] == [record.key for record in theirs.records]
    for here, there in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert here.shape == there.shape
        if here.has_values:
            assert np.array_equal(here.float64(), there.float64(), equal_nan=True)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name[:12])
def test_a_dump_converted_compares_equal(tmp_path: Path, source: Path, to: Any) -> None:
    done = convert(source, tmp_path / "out", to=to)
    assert done.tensors == len(open_run(source))
    assert not done.skipped
    table = compare(source, tmp_path / "out")
    assert {row.status for row in table.rows} == {"pass"}
    assert {row.metrics.get("different") for row in table.rows} == {0}


def test_a_run_of_an_atb_dump_goes_back_into_atb_s_own_tree(tmp_path: Path) -> None:
    source = DATA / "ascend" / "mini_atb"
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "out", to="ait")
    ours, theirs = open_run(source), open_run(tmp_path / "out")
    assert theirs.manifest["format"] == "atb"
    assert {record.key for record in ours.records} == {record.key for record in theirs.records}
    (original,) = source.glob("*/tensors/*/0/1_Decoder_layer/before/intensor0.bin")
    (written,) = (tmp_path / "out").glob("*/tensors/*/0/1_Decoder_layer/before/intensor0.bin")
    assert written.read_bytes() == original.read_bytes()


@pytest.mark.parametrize("to", ["run", "npy", "pt", "safetensors"])
@pytest.mark.parametrize("kind", ["ge_dump", "fx_dump"])
def test_graph_dumps_convert_too(tmp_path: Path, kind: str, to: Any) -> None:
    for at, source in enumerate(sorted((DATA / "ascend" / kind).iterdir())):
        if not source.is_dir():
            continue
        done = convert(source, tmp_path / f"out{at}", to=to)
        assert done.tensors
        statuses = {row.status for row in compare(source, tmp_path / f"out{at}").rows}
        assert statuses <= {"pass", "incomparable", "missing"}
        assert "pass" in statuses


@pytest.fixture
def every_dtype(tmp_path: Path) -> Path:
    """A run with a tensor of every element type, a sample, a summary, two ranks, and remarks."""
    dice = np.random.default_rng(2)
    for rank in (0, 1):
        writer = RunWriter(tmp_path / "run", rank=rank, world_size=2, seal_at_exit=False)
        for name, dtype in DTYPES.items():
            size = dtype.byte_count(6)
            raw = dice.integers(0, 256, size, np.uint8)
            if dtype.kind == "bool":
                raw &= 1
            key = TensorKey.of(f"model.{name}", "output", "x.0", step=rank + 1, visit=1)
            record = Record(key, 0, name, (3, 2), class_name="Toy", device="cpu", alias="0")
            writer.put(record, raw)
        sample = Record(TensorKey.of("a/b:c", "input"), 0, "float32", (5, 2), kept="sample")
        writer.put(sample._replace(sample_stride=3), np.arange(4, dtype=np.float32).view(np.uint8))
        empty = Record(TensorKey.of("empty", "grad_input"), 0, "bfloat16", (0, 4))
        writer.put(empty, np.empty(0, np.uint8))
        scalar = Record(TensorKey.of("scalar", "param"), 0, "float64", ())
        writer.put(scalar, np.array(1.5).reshape(1).view(np.uint8))
        writer.event("warning", "something was odd", where="here")
        tree = {"schema": 1, "roots": [{"site": "model", "class": "M", "ids": ""}], "order": []}
        writer.topology(tree)
        writer.close()
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # random bits: signalling NaNs
@pytest.mark.parametrize("to", ["run", "npy", "pt", "safetensors"])
def test_every_element_type_keeps_every_value(every_dtype: Path, tmp_path: Path, to: Any) -> None:
    done = convert(every_dtype, tmp_path / "out", to=to)
    assert not done.skipped
    ours, theirs = open_run(every_dtype), open_run(tmp_path / "out")
    _same(ours, theirs)
    again = theirs.get("model.bfloat16", "output", "x.0", step=2, rank=1, visit=1).record
    assert (again.class_name, again.alias) == ("Toy", "0")
    assert theirs.topology(1) is not None
    assert any(event["message"] == "something was odd" for event in theirs.events())
    if to in ("run", "safetensors"):
        assert [r.dtype for r in ours.records] == [r.dtype for r in theirs.records]


def test_npy_widens_what_numpy_has_no_type_for(every_dtype: Path, tmp_path: Path) -> None:
    convert(every_dtype, tmp_path / "out", to="npy")
    for name, stored in (("bfloat16", "float32"), ("float8_e4m3fn", "float32"), ("int4", "int8")):
        path = tmp_path / "out" / "rank0" / "step1" / f"model.{name}" / "output_x.0.visit1.npy"
        assert np.load(path).dtype.name == stored
        assert np.load(path).shape == (3, 2)


def test_pt_files_have_torch_s_own_types(every_dtype: Path, tmp_path: Path) -> None:
    convert(every_dtype, tmp_path / "out", to="pt")
    path = tmp_path / "out" / "rank0" / "step1"
    for name in ("bfloat16", "float8_e5m2fnuz", "complex64", "uint16"):
        saved = torch.load(path / f"model.{name}" / "output_x.0.visit1.pt", weights_only=True)
        assert saved.dtype == getattr(torch, name)


def test_safetensors_files_are_read_by_the_safetensors_package(
    every_dtype: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    convert(every_dtype, tmp_path / "out", to="safetensors")
    loaded = load_file(tmp_path / "out" / "rank0" / "step1.safetensors")
    assert loaded["model.bfloat16#1/output/x.0"].dtype == torch.bfloat16


def test_the_ait_tree_says_what_torch_cannot_hold(every_dtype: Path, tmp_path: Path) -> None:
    done = convert(every_dtype, tmp_path / "out", to="ait")
    assert sum(done.skipped.values()) + done.tensors == len(open_run(every_dtype))
    assert all("torch cannot hold" in reason for reason in done.skipped)
    table = compare(every_dtype, tmp_path / "out")
    assert sum(row.status == "pass" for row in table.rows) >= done.tensors - 6


def test_summaries_descriptions_and_losses_go_along_into_a_run(tmp_path: Path) -> None:
    source = tmp_path / "dump"
    import shutil

    shutil.copytree(DATA / "msprobe" / "L0_tensor", source)
    data = source / "step0" / "proc0" / "dump_tensor_data"
    (data / "Module.head.Linear.forward.0.output.0.pt").write_bytes(b"damaged")
    convert(source, tmp_path / "run")
    assert "loaded" in open_run(tmp_path / "run").get("head").lost
    convert(DATA / "msprobe" / "mix_statistics", tmp_path / "statistics")
    ours = open_run(DATA / "msprobe" / "mix_statistics")
    theirs = open_run(tmp_path / "statistics")
    for here, there in zip(ours.records, theirs.records, strict=True):
        assert here.key == there.key
        assert str(here.summary) == str(there.summary)
    with pytest.raises(BadInput, match="only summary was kept"):
        convert(tmp_path / "statistics", tmp_path / "npy", to="npy")
    assert not (tmp_path / "npy").exists()


@pytest.mark.parametrize("to", TARGETS)
def test_nothing_is_replaced_unless_asked(tmp_path: Path, to: Any) -> None:
    source = SOURCES[1]
    convert(source, tmp_path / "out", to=to)
    with pytest.raises(AlreadyThere, match="not empty"):
        convert(source, tmp_path / "out", to=to)
    convert(source, tmp_path / "out", to=to, force=True)
    assert len(open_run(tmp_path / "out")) == 37


@pytest.mark.parametrize("to", ["run", "npy"])
def test_a_folder_of_other_things_is_never_deleted(tmp_path: Path, to: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(AlreadyThere):
        convert(SOURCES[1], tmp_path / "out", to=to, force=True)
    assert (tmp_path / "out" / "thesis.txt").exists()


def test_a_run_is_not_converted_into_itself(tmp_path: Path) -> None:
    convert(SOURCES[1], tmp_path / "run")
    with pytest.raises(BadInput, match="into itself"):
        convert(tmp_path / "run", tmp_path / "run", force=True)
    assert len(open_run(tmp_path / "run")) == 37


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "sideways"),
        ("step", -1),
        ("visit", "x"),
        ("phase", "sometimes"),
        ("shape", [7, 7]),
        ("kept", "digest"),
        ("sample_stride", 0),
    ],
)
def test_a_list_that_lies_is_refused_with_its_line(
    tmp_path: Path, field: str, value: object
) -> None:
    convert(SOURCES[1], tmp_path / "out", to="npy")
    place = tmp_path / "out" / LIST
    lines = place.read_text().splitlines()
    line = json.loads(lines[4])
    line[field] = value
    lines[4] = json.dumps(line)
    place.write_text("\n".join(lines))
    with pytest.raises(Exception, match=re.escape(f"{LIST}, line 5")):
        open_run(tmp_path / "out")


@pytest.mark.parametrize("file", ["../secret.npy", "/etc/passwd", "gone.npy"])
def test_a_list_does_not_lead_out_of_its_folder(tmp_path: Path, file: str) -> None:
    np.save(tmp_path / "secret.npy", np.ones((2, 4), np.float16))
    convert(SOURCES[1], tmp_path / "out", to="npy")
    place = tmp_path / "out" / LIST
    lines = place.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "file": file})
    place.write_text("\n".join(lines))
    assert open_run(tmp_path / "out").losses[0].reason == "the file is not there"


def test_converting_a_large_run_takes_little_memory(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", seal_at_exit=False)
    for at in range(24):
        values = np.full(4 << 20, at, np.float32)
        key = TensorKey.of(f"layer.{at}", "output")
        writer.put(Record(key, 0, "float32", values.shape), values.view(np.uint8))
    writer.close()
    program = (
        "import resource, sys\n"
        "from driftline import convert\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for to in ('run', 'npy', 'safetensors'):\n"
        "    convert(sys.argv[1], sys.argv[2] + to, to=to)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run"), str(tmp_path / "out-")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 330, "MiB more than at the start, of a run of 384"


def test_a_named_slot_with_a_place_inside_is_read_back_with_its_key(tmp_path: Path) -> None:
    ones = np.ones(3, np.float32)
    run = run_of({"layer/input/pair.0": ones, "layer/input/pair.1": ones, "layer": ones})
    convert(run, tmp_path / "tree", to="ait")
    again = open_run(tmp_path / "tree")
    assert {str(record.key) for record in again.records} == {str(r.key) for r in run.records}
