"""ONNX Runtime: what cannot be run is refused in a sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_zoo as zoo
import pytest
import torch
from onnx import TensorProto, helper

import driftline
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError, NotInstalled
from driftline.runs.memory import MemorySink


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.gelu_mlp(tmp_path_factory.mktemp("mlp") / "mlp.onnx")


def refused(model: Path, inputs: Any, **how: Any) -> DriftlineError:
    with pytest.raises(DriftlineError) as caught:
        driftline.capture_onnx(model, inputs, MemorySink(), **how)
    return caught.value


@pytest.mark.parametrize(
    ("inputs", "message", "hint"),
    [
        ({"xx": zoo.some_x()}, "the model has no input 'xx'", "did you mean 'x'?"),
        ({}, "'x' is not in the inputs", "the model takes x: float32 [rows, 8]"),
        ({"x": zoo.some_x().astype(np.float64)}, "is float64", ".astype('float32')"),
        ({"x": np.zeros((4, 9), np.float32)}, "has the shape [4, 9]", "x: float32 [rows, 8]"),
        ({"x": np.zeros(8, np.float32)}, "the model takes [rows, 8]", "x: float32"),
        ({"x": np.array(["a"])}, "has no numbers", ""),
        ([], "no inputs were given", "the model takes x"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(
    mlp: Path, inputs: Any, message: str, hint: str
) -> None:
    error = refused(mlp, inputs)
    assert isinstance(error, BadInput)
    assert message in str(error)
    assert hint in error.hint


def test_files_of_inputs_that_are_none_are_refused(mlp: Path, tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    assert "there is no file of inputs" in str(refused(mlp, tmp_path / "none.npz"))
    assert "no file of named arrays" in str(refused(mlp, tmp_path / "text.npz"))
    assert "cannot read the inputs" in str(refused(mlp, tmp_path / "objects.npz"))
    np.save(tmp_path / "x.npy", zoo.some_x())
    sink = MemorySink()
    driftline.capture_onnx(mlp, tmp_path / "x.npy", sink)  # the only input there is
    assert len(sink.run())


def test_an_operator_that_nobody_knows_is_named(tmp_path: Path) -> None:
    given = [helper.make_tensor_value_info("x", zoo.F32, [4, 8])]
    for domain in ("", "my.domain"):
        node = helper.make_node("Frobnicate", ["x"], ["y"], domain=domain)
        domains = (domain,) if domain else ()
        path = zoo.write(tmp_path / "m.onnx", [node], given, ["y"], domains=domains)
        error = refused(path, {"x": zoo.some_x()})
        assert isinstance(error, BadFile)
        assert "Frobnicate" in str(error)
        assert "--custom-ops" in error.hint
        assert "[ONNXRuntimeError]" not in str(error)


def test_inputs_of_other_kinds_are_said(tmp_path: Path) -> None:
    texts = zoo.write(
        tmp_path / "texts.onnx",
        [helper.make_node("Shape", ["words"], ["y"])],
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["n"])],
        ["y"],
    )
    error = refused(texts, {"words": np.ones(3, np.float32)})
    assert "is float32, the model takes texts" in str(error)
    assert "has the shape [1, 1]" in str(refused(texts, {"words": np.array([["a"]])}))
    listed = zoo.write(
        tmp_path / "list.onnx",
        [helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)],
        [helper.make_tensor_sequence_value_info("s", zoo.F32, ["n", 4])],
        ["y"],
    )
    error = refused(listed, {"s": np.ones((2, 4), np.float32)})
    assert "is a seq(tensor(float)), which cannot be given from here" in str(error)


def test_what_onnxruntime_says_is_said_without_its_source_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(str(zoo.gelu_mlp(tmp_path / "m.onnx")))
    model.ir_version = 99
    (tmp_path / "new.onnx").write_bytes(model.SerializeToString())
    error = refused(tmp_path / "new.onnx", {"x": zoo.some_x()})
    assert "'new.onnx': Unsupported model IR version: 99" in str(error)
    assert capfd.readouterr().err == ""


def test_a_newer_opset_than_this_version_knows_is_said(tmp_path: Path) -> None:
    model = onnx.load(str(zoo.gelu_mlp(tmp_path / "m.onnx")))
    model.opset_import[0].version = 9000
    (tmp_path / "new.onnx").write_bytes(model.SerializeToString())
    assert "newer" in refused(tmp_path / "new.onnx", {"x": zoo.some_x()}).hint


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x08", bytes(range(256)) * 40])
def test_files_that_are_no_model_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    error = refused(tmp_path / "m.onnx", {"x": zoo.some_x()})
    assert isinstance(error, BadFile)
    assert "m.onnx" in str(error)


def test_half_a_model_is_refused(mlp: Path, tmp_path: Path) -> None:
    data = mlp.read_bytes()
    for length in range(1, len(data), 97):
        (tmp_path / "m.onnx").write_bytes(data[:length])
        assert isinstance(refused(tmp_path / "m.onnx", {"x": zoo.some_x()}), BadFile)
    assert "cannot read" in str(refused(tmp_path / "absent.onnx", {}))


def test_weights_that_are_missing_or_elsewhere_are_refused(tmp_path: Path) -> None:
    model = onnx.load(str(zoo.gelu_mlp(tmp_path / "whole.onnx")))
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "below" / "w.bin").rename(tmp_path / "w.bin")
    assert "'w.bin', which is not there" in str(refused(path, {"x": zoo.some_x()}))
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../w.bin"
    path.write_bytes(model.SerializeToString())
    assert "not below its own folder" in str(refused(path, {"x": zoo.some_x()}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optimize": "most"}, "no optimisation level 'most'"),
        ({"providers": "Frob"}, "no provider 'Frob'"),
        ({"levels": "gradients"}, "no level 'gradients'"),
        ({"memory": 0}, "memory is a number above nought"),
        ({"threads": -1}, "threads is a number of threads"),
        ({"custom_ops": ["nowhere.so"]}, "no library of operators 'nowhere.so'"),
        ({"sites": "frst"}, "no site of the model matches 'frst'"),
        ({"steps": "4"}, "no step is selected; the steps are 0"),
        ({"keep": "half"}, "no reduction 'half'"),
        ({"ports": "param"}, "port 'param' is not seen"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    mlp: Path, how: dict[str, Any], message: str
) -> None:
    assert message in str(refused(mlp, {"x": zoo.some_x()}, **how))


def test_a_library_that_is_none_is_said(mlp: Path, tmp_path: Path) -> None:
    (tmp_path / "ops.so").write_bytes(b"no library")
    assert "ops.so' cannot be loaded" in str(
        refused(mlp, {"x": zoo.some_x()}, custom_ops=[str(tmp_path / "ops.so")])
    )


def test_nothing_is_written_where_something_is(mlp: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(AlreadyThere):
        driftline.capture_onnx(mlp, {"x": zoo.some_x()}, tmp_path / "run")
    for how in ({"sites": "none"}, {"steps": "3"}, {"levels": "none"}):
        with pytest.raises(BadInput):
            driftline.capture_onnx(mlp, {"x": zoo.some_x()}, tmp_path / "other", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_fails_while_it_runs_says_what_failed(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["x", "to"], ["y"])
    given = [
        helper.make_tensor_value_info("x", zoo.F32, [4, 8]),
        helper.make_tensor_value_info("to", TensorProto.INT64, [2]),
    ]
    path = zoo.write(tmp_path / "m.onnx", [node], given, ["y"])
    error = refused(path, {"x": zoo.some_x(), "to": np.array([5, 5])})
    assert "'m.onnx' failed" in str(error)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["onnxruntime", "onnx"])
def test_an_engine_that_is_not_installed_is_said_with_the_line_that_installs_it(
    mlp: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = refused(mlp, {"x": zoo.some_x()})
    assert isinstance(error, NotInstalled)
    assert package in str(error)
    assert error.hint == "pip install onnxruntime onnx"


def test_importing_the_package_loads_no_engine() -> None:
    code = (
        "import sys, driftline; driftline.capture_onnx; "
        "print([m for m in ('onnx', 'onnxruntime', 'torch') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


class Twice(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def test_inputs_come_from_a_torch_run_by_name_by_place_and_by_look(tmp_path: Path) -> None:
    left, right = torch.randn(2, 3), torch.randn(2, 3)
    model = Twice()
    sink = MemorySink()
    with driftline.capture(model, sink):
        model(left, right)
    for names in (("left", "right"), ("right", "left"), ("a", "b")):
        node = helper.make_node("Sub", list(names), ["y"])
        given = [helper.make_tensor_value_info(name, zoo.F32, [2, 3]) for name in names]
        path = zoo.write(tmp_path / "m.onnx", [node], given, ["y"])
        taken = MemorySink()
        driftline.capture_onnx(path, sink.run(), taken)
        sign = -1 if names[0] == "right" else 1
        assert np.allclose(taken.run().get("(root)").numpy(), sign * (left - right).numpy())
    given = [helper.make_tensor_value_info("third", TensorProto.INT64, [2, 3])]
    path = zoo.write(tmp_path / "m.onnx", [helper.make_node("Neg", ["third"], ["y"])], given, ["y"])
    error = refused(path, sink.run())
    assert "no input for 'third'" in str(error)
    assert "it has left, right" in error.hint


def test_a_run_without_whole_inputs_is_refused(mlp: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    for how, message in (
        ({"keep": "summary"}, "keeps only a summary"),
        ({"sites": "0"}, "has no inputs of the whole model"),
    ):
        sink = MemorySink()
        with driftline.capture(model, sink, **how):  # type: ignore[arg-type]
            model(torch.randn(4, 8))
        assert message in str(refused(mlp, sink.run()))
