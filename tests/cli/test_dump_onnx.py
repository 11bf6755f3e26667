"""`driftline dump --engine onnxruntime`: words in, a run and a few lines out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import driftline
from driftline.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model and something to run it with."""
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    Path("m.onnx").write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    )
    np.savez("x.npz", x=np.ones((3, 8), np.float32))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["dump", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_model_is_dumped_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--engine", "onnxruntime", "--model", "m.onnx", "--inputs", "x.npz")
    status, out, err = told(capsys, *words, "-o", "a")
    assert (status, out) == (0, "")
    assert "2 nodes, 1 step in a" in err
    assert "outputs are bit for bit those of the session without capture" in err
    assert "next: driftline compare REFERENCE a" in err
    status, _, err = told(capsys, *words, "-o", "b", "--optimize", "none", "--at-once", "1")
    assert "each step was executed 2 times, so that no more than 1 inner tensors" in err
    assert main(["compare", "a", "b"]) == 0
    assert main(["show", "a"]) == 0
    assert "onnxruntime" in capsys.readouterr().out


def test_a_model_without_an_engine_is_meant_for_onnxruntime(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _, err = told(
        capsys, "--model", "m.onnx", "--inputs", "x.npz", "x.npz", "-o", "a", "--threads", "1",
        "--session-config", "session.intra_op.allow_spinning=0", "--level", "ops,params",
        "--providers", "CPU", "--memory", "2MB",
    )  # fmt: skip
    assert status == 0
    assert "2 steps in a" in err
    run = driftline.open_run("a")
    assert {record.key.port for record in run.records} == {"input", "output", "param"}
    assert {record.key.step for record in run.records} == {0, 1}
    assert run.processes()[0]["engine"]["threads"] == 1


def test_what_would_be_done_is_printed_and_nothing_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", "m.onnx", "--inputs", "x.npz", "-o", "a", "--site", "y")
    status, out, _ = told(capsys, *words, "--dry-run")
    assert status == 0
    assert "model: m.onnx" in out
    assert "only sites: y" in out
    status, out, _ = told(capsys, *words, "--python")
    assert status == 0
    assert "driftline.capture_onnx(" in out
    assert not Path("a").exists()
    Path("printed.py").write_text(out)
    runpy.run_path("printed.py")
    assert driftline.open_run("a").sites() == ["y"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "onnxruntime"], "there is no model to run"),
        (["--model", "m.onnx"], "the model takes x: float32 [n, 8]"),
        (["--model", "m.onnx", "--inputs", "x.npz", "--", "python"], "--exec does not apply"),
        (["--model", "m.onnx", "--inputs", "x.npz", "-time", "1"], "-time does not apply"),
        (["--model", "m.onnx", "--inputs", "x.npz", "--layout", "ait"], "--layout does not apply"),
        (["--engine", "torch", "--model", "m.onnx", "--", "x"], "--model is for ONNX Runtime"),
        (["--inputs", "x.npz", "--", "python"], "--inputs is for ONNX Runtime"),
        (["--model", "m.onnx", "--inputs", "y.npz"], "there is no file of inputs 'y.npz'"),
        (["--model", "n.onnx", "--inputs", "x.npz"], "cannot read 'n.onnx'"),
        (["--model", "m.onnx", "--inputs", "x.npz", "--optimize", "x"], "optimize"),
        (["--model", "m.onnx", "--inputs", "x.npz", "--session-config", "a"], "takes NAME=VALUE"),
        (["--model", "m.onnx", "--inputs", "x.npz", "--memory", "x"], "x"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = told(capsys, *words)
    assert status == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_without_the_engine_its_install_line_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    status, _, err = told(capsys, "--model", "m.onnx", "--inputs", "x.npz")
    assert status == 2
    assert "needs the package onnxruntime, which is not installed here" in err
    assert "pip install onnxruntime onnx" in err
