"""What a capture writes about an ONNX model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import driftline
from driftline.comparison.differences.find import differences_of
from driftline.formats.registry import open_run
from driftline.runs.sidecars.model_facts import read_model_facts


def model(path: Path, epsilon: float, scale: float = 1.0) -> Path:
    values = np.linspace(-1, 1, 8, dtype=np.float32) * np.float32(scale)
    nodes = [
        helper.make_node(
            "LayerNormalization",
            ["x", "norm.weight", "norm.bias"],
            ["y"],
            name="/norm/LayerNorm",
            axis=-1,
            epsilon=epsilon,
        )
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8])],
        [
            numpy_helper.from_array(values, "norm.weight"),
            numpy_helper.from_array(np.zeros(8, np.float32), "norm.bias"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(path))
    return path


def test_nodes_attributes_and_initializers_are_compared(tmp_path: Path) -> None:
    x = {"x": np.arange(16, dtype=np.float32).reshape(2, 8)}
    driftline.capture_onnx(model(tmp_path / "a.onnx", 1e-5), x, tmp_path / "ref")
    driftline.capture_onnx(model(tmp_path / "b.onnx", 1e-3, 2.0), x, tmp_path / "cand")
    runs = open_run(tmp_path / "ref"), open_run(tmp_path / "cand")
    facts = read_model_facts(runs[0])
    assert facts.framework == "onnxruntime"
    weight = facts.weights["norm.weight"].whole()
    assert weight is not None and weight[0] == -1.0
    differences = differences_of(*runs)
    assert differences is not None
    named = {difference.name: difference for difference in differences if difference.counts}
    assert set(named) == {"epsilon", "weight"}
    assert named["weight"].relation == "different" and named["weight"].distance == 1.0
    assert differences_of(runs[0], runs[0]) == ()


def test_facts_can_be_left_out(tmp_path: Path) -> None:
    x = {"x": np.ones((2, 8), np.float32)}
    path = model(tmp_path / "a.onnx", 1e-5)
    driftline.capture_onnx(path, x, tmp_path / "run", model_facts=False)
    assert not read_model_facts(open_run(tmp_path / "run"))
