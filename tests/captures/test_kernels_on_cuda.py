"""Kernels, times and lists of calls of a program on a GPU; skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import driftline
from driftline.formats.ascend.atb.tables import read_operations, read_profile

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda().eval()
x = torch.linspace(-1, 1, 256, device="cuda").reshape(4, 64)
with torch.no_grad():
    for _ in range(2):
        y = model(x)
torch.save(y.cpu(), "y.pt")
"""
BARE = """
import torch
a = torch.linspace(-1, 1, 4096, device="cuda").reshape(64, 64)
torch.save((a @ a).softmax(-1).cpu(), "y.pt")
"""
FORKS = """
import multiprocessing, torch
def work(n):
    return float((torch.ones(8, 8, device="cuda") * n).sum())
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""


def dumped(
    folder: Path, program: str, *options: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    plain = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    kept = folder / "y.pt"
    before = kept.read_bytes() if kept.exists() else b""
    words = ["dump", "-o", "run", *options, "--", sys.executable, "program.py"]
    done = subprocess.run(
        [sys.executable, "-m", "driftline", *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == plain.stdout
    assert (kept.read_bytes() if kept.exists() else b"") == before, "the program's result changed"
    return done


def test_kernels_of_the_device_have_their_operator_and_module(tmp_path: Path) -> None:
    dumped(tmp_path, MODEL, "--type", "op", "kernel", "cpu_profiling", "-er", "1,1")
    run = driftline.open_run(tmp_path / "run")
    kernels = read_operations(run.sheet("kernel_tensors_1.csv"), 1)
    assert kernels and {k.param["device"] for k in kernels} == {"cuda:0"}
    by_site = {k.param["site"]: k for k in kernels}
    assert {"0", "1", "2"} <= set(by_site)
    assert by_site["0"].param["operator"] == "aten::addmm"
    assert by_site["1"].param["operator"] == "aten::gelu"
    assert all(k.param["time_us"] > 0 for k in kernels)
    table = read_profile(run.sheet("operation_statistic_1.txt"), "t")
    rows = {line[0]: dict(zip(table.headings, line, strict=True)) for line in table.lines}
    assert rows["aten_addmm"]["execute_callCount"] == 2
    assert rows["aten_addmm"]["execute_kernelExecuteTime"] > 0


def test_a_program_without_modules_shows_its_kernels_too(tmp_path: Path) -> None:
    dumped(tmp_path, BARE, "--type", "kernel")
    run = driftline.open_run(tmp_path / "run")
    kernels = read_operations(run.sheet("kernel_tensors_0.csv"), 0)
    assert {"aten::mm", "aten::_softmax"} <= {k.param.get("operator") for k in kernels}


def test_with_tensors_beside_them_the_capture_s_own_copies_are_no_kernels(tmp_path: Path) -> None:
    dumped(tmp_path, MODEL, "--type", "tensor", "kernel", "-er", "1,1")
    run = driftline.open_run(tmp_path / "run")
    kernels = read_operations(run.sheet("kernel_tensors_1.csv"), 1)
    in_modules = [k for k in kernels if k.param["site"] in ("0", "1", "2")]
    assert in_modules and not [k for k in in_modules if "DtoH" in k.name]


def test_a_program_that_uses_the_device_in_forked_children_still_can(tmp_path: Path) -> None:
    done = dumped(tmp_path, FORKS, "--type", "op", "kernel", status=2)
    assert "nothing was captured" in done.stderr


def test_calls_are_listed_without_waiting_for_the_device(tmp_path: Path) -> None:
    dumped(tmp_path, MODEL, "--type", "op", "model", "onnx")
    run = driftline.open_run(tmp_path / "run")
    names = {line.name for line in read_operations(run.sheet("operation_tensors_0.csv"), 0)}
    assert {"aten.addmm.default_0_0", "aten.gelu.default_1_0"} <= names
    assert (tmp_path / "run" / "rank0" / "model.onnx").is_file()


def test_a_program_that_leaves_the_device_alone_is_told_why_nothing_is_listed(
    tmp_path: Path,
) -> None:
    program = "import torch\ntorch.ones(3) @ torch.ones(3)\n"
    done = dumped(tmp_path, program, "--type", "kernel", status=2)
    assert "with CUDA_VISIBLE_DEVICES=" in done.stderr
