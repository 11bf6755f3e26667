"""ONNX Runtime: what a capture holds at a time, and models of more than two gigabytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_zoo as zoo
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import driftline


@pytest.mark.slow
def test_a_model_of_more_than_two_gigabytes_is_captured(tmp_path: Path) -> None:
    size, layers = 8192, 9  # 9 * 256 MB
    rng = np.random.default_rng(0)
    tensors, nodes, before = [], [], "x"
    with (tmp_path / "m.data").open("wb") as file:
        for layer in range(layers):
            tensor = onnx.TensorProto(name=f"w{layer}", data_type=zoo.F32, dims=[size, size])
            tensor.data_location = TensorProto.EXTERNAL
            where = {
                "location": "m.data",
                "offset": str(file.tell()),
                "length": str(4 * size * size),
            }
            for key, value in where.items():
                tensor.external_data.add(key=key, value=value)
            row = (rng.standard_normal(size) / size**0.5).astype(np.float32)
            for at in range(size):
                file.write(np.roll(row, at).tobytes())
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [before, f"w{layer}"], [f"y{layer}"]))
            before = f"y{layer}"
    given = [helper.make_tensor_value_info("x", zoo.F32, [1, size])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, [before], tensors)
    assert (tmp_path / "m.data").stat().st_size > 1 << 31
    x = rng.standard_normal((1, size)).astype(np.float32)
    result = driftline.capture_onnx(path, {"x": x}, tmp_path / "run", values_at_once=4)
    assert result.faithful
    assert result.executions > 1
    run = driftline.open_run(tmp_path / "run")
    expected = ort.InferenceSession(str(path)).run(None, {"x": x})[0]
    assert run.get("(root)").numpy().tobytes() == expected.tobytes()
    (tmp_path / "m.data").unlink()  # pytest keeps the folders of three runs


PEAK = """
import re, sys
import numpy as np
import driftline
from driftline.runs.memory import MemorySink
x = np.ones((1 << 22,), np.float32)
driftline.capture_onnx(sys.argv[1], {"x": x}, MemorySink(), optimize="none", keep="digest",
                       memory=int(sys.argv[2]))
# Not ru_maxrss: that of a child is at least what its parent had when it was started.
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10)
"""


def test_memory_stays_within_what_was_said(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Neg", ["x" if n == 0 else f"v{n - 1}"], [f"v{n}"]) for n in range(24)
    ]
    given = [helper.make_tensor_value_info("x", zoo.F32, [1 << 22])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["v23"])
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(path), str(memory)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for memory in (1 << 30, 64 << 20)  # 24 values of 16 MB, or four at a time
    ]
    assert peaks[0] - peaks[1] > 150
