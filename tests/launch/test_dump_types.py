"""`dump --type op kernel cpu_profiling onnx model layer`: of any torch program, unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import driftline
from driftline.cli.main import main
from driftline.formats.ascend.atb.dump import open as open_atb
from driftline.formats.ascend.atb.tables import read_operations, read_profile

ALL = ("op", "tensor", "kernel", "cpu_profiling", "model", "onnx")


def checked(path: Path):
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model.graph


def test_all_types_together_in_a_run_and_in_the_seed_s_paths(quick, workshop, capfd) -> None:
    plain = quick(run=["infer.py", "2"])
    done = quick("-o", "all", "--type", *ALL, "-er", "0,1", run=["infer.py", "2"])
    assert done.code == 0 and done.out == plain.out, done.err
    for word in ("operation csv of 2 steps", "kernel csv of 2", "times of operators", "1 ONNX"):
        assert word in done.err
    folder = workshop / "all" / "rank0"
    run = driftline.open_run(workshop / "all")
    held = {str(record.key) for record in run.records}
    for step in (0, 1):
        lines = read_operations((folder / f"operation_tensors_{step}.csv").read_text(), step)
        assert {"Linear_0", "LayerNorm_2", "aten.addmm.default_0_0"} <= {one.name for one in lines}
        files = [path for line in lines for path in line.files]
        assert files and set(files) <= held, "every file that is named is in the run"
        matrix = next(line for line in lines if line.name == "aten.addmm.default_0_0")
        assert matrix.param["beta"] == 1 and matrix.inputs[1].shape == (2, 4)
        assert sum("/param/" in path for path in matrix.files) == 2, "its weight and bias are kept"
    assert len(checked(folder / "model.onnx").node) > 5

    assert main(["convert", "all", "-o", "seed", "--to", "ait"]) == 0
    root = workshop / "seed" / "ait_dump"
    (sheet,) = root.glob("operation_io_tensors/*/operation_tensors_1.csv")
    lines = read_operations(sheet.read_text(), 1)
    files = [path for line in lines for path in line.files]
    assert files and all((workshop / "seed" / path).is_file() for path in files)
    assert len(list(root.glob("kernel_io_tensors/*/kernel_tensors_[01].csv"))) == 2
    (text,) = root.glob("cpu_profiling/*/operation_statistic_0.txt")
    assert {line[0] for line in read_profile(text.read_text(), "t").lines} >= {"aten_linear"}
    table = text.with_suffix(".csv").read_text()
    assert table.startswith("opname,execute_callCount,") and "\naten_linear," in table
    assert read_profile(table, "t").lines == read_profile(text.read_text(), "t").lines
    (model,) = root.glob("model/*/Net.json")
    assert json.loads(model.read_text())["modelName"] == "Net"
    assert len(checked(model.with_suffix(".onnx")).node) == len(checked(folder / "model.onnx").node)
    assert driftline.open_run(root).sites(), "the tensors are still a torch dump"
    capfd.readouterr()
    assert main(["show", "all"]) == 0
    shown = capfd.readouterr().out
    assert "Kernels (step 0)" in shown and "Times of operators" in shown and "Operators" in shown


def test_operators_of_a_program_without_modules_and_no_tensor(quick, workshop, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there is a GPU, its use is waited for
    (workshop / "bare.py").write_text(
        "import torch\na = torch.ones(3, 4)\nprint(float((a @ a.T).sum()))\n"
    )
    done = quick("--type", "op", "kernel", "-tiling", "-o", "bare", run=["bare.py"])
    assert done.code == 0 and done.out == "36.0\n", done.err
    assert "torch on this device has none" in done.err, "tiling is an event, not an error"
    run = driftline.open_run(workshop / "bare")
    assert len(run) == 0
    lines = read_operations(run.sheet("operation_tensors_0.csv"), 0)
    assert [line.kind for line in lines][:2] == ["aten.ones.default", "aten.mm.default"]
    assert main(["convert", "bare", "-o", "seed", "--to", "ait"]) == 0
    atb = open_atb(workshop / "seed" / "ait_dump")
    assert [line.kind for line in atb.operations()] == [line.kind for line in lines]
    assert [line.name for line in atb.kernels()][:2] == ["aten::fill_", "aten::mm"]


def test_layers_are_drawn_one_by_one_in_the_seed_s_layout(quick, workshop) -> None:
    (workshop / "stack.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Stack(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(\n"
        "            nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "        return x\n"
        "Stack()(torch.ones(1, 4))\n"
    )
    done = quick("--type", "layer", "onnx", "--layout", "ait", "-o", "seed", run=["stack.py"])
    assert done.code == 0, done.err
    drawn = sorted((workshop / "seed" / "ait_dump").glob("layer/*/*.onnx"))
    assert [path.stem for path in drawn] == [f"Sequential_0_{n}" for n in range(3)]
    for path in drawn:
        assert [node.op_type for node in checked(path).node] == [
            "addmm",
            "gelu",
        ]
    assert not list((workshop / "seed" / "ait_dump").glob("model"))
    assert not list((workshop / "seed" / "ait_dump").rglob("driftline_calls*"))


def test_a_list_alone_in_the_seed_s_layout_is_read_as_the_dump_it_looks_like(
    quick, workshop
) -> None:
    done = quick("--type", "op", "--layout", "ait", "-o", "seed", run=["infer.py"])
    assert done.code == 0, done.err
    names = [line.name for line in open_atb(workshop / "seed" / "ait_dump").operations()]
    assert "Linear_0" in names and "aten.addmm.default_0_0" in names


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("print(1)", "none imported torch"), ("import torch", "no module was called")],
)
def test_a_program_that_never_calls_torch_is_told_so(dump, workshop, program, sentence) -> None:
    (workshop / "idle.py").write_text(program + "\n")
    done = dump("--type", "op", "kernel", "cpu_profiling", "-o", "none", run=["idle.py"])
    assert done.code == 2 and sentence in done.err
    assert not (workshop / "none").exists()


def test_filters_hold_for_the_list_too(quick, workshop) -> None:
    done = quick("--type", "op", "-ids", "1_0", "-o", "some", run=["infer.py"])
    assert done.code == 0, done.err
    sheet = driftline.open_run(workshop / "some").sheet("operation_tensors_0.csv")
    lines = read_operations(sheet, 0)
    assert {line.name for line in lines} == {"Linear_1_0", "aten.addmm.default_1_0_0"}


def test_a_killed_program_and_a_second_process_leave_their_lists(quick, workshop) -> None:
    (workshop / "killed.py").write_text(
        "import os, signal, torch\n"
        "model = torch.nn.Linear(3, 3)\n"
        "model(torch.ones(1, 3))\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "else:\n"
        "    model(torch.ones(2, 3))\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = quick("--type", "op", "layer", "onnx", "--step", "*", "-o", "killed", run=["killed.py"])
    assert done.code == 128 + 9
    run = driftline.open_run(workshop / "killed")
    for process in (0, 1):
        names = [
            line.kind
            for name in run.sheets(0, process)
            if name.startswith("operation_tensors")
            for line in read_operations(run.sheet(name, 0, process), 0)
        ]
        assert names == ["Linear", "aten.addmm.default"], "each has its own call, not the parent's"
        drawn = workshop / "killed" / ("rank0.p1" if process else "rank0") / "layer_0.onnx"
        assert [node.op_type for node in checked(drawn).node] == ["addmm"]
