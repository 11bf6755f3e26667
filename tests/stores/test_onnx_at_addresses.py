"""Runs of ONNX Runtime that go to an address while they are captured."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import driftline as api
from driftline.errors import BadInput
from driftline.runs import layout
from driftline.runs.stores import upload
from driftline.runs.stores.store import Store

SIZE = 64


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layout, "SENT_SHARD_BYTES", 1 << 18)
    weight = np.eye(SIZE, dtype=np.float32) * np.float32(1.5)
    nodes = [
        helper.make_node("MatMul", ["x" if n == 0 else f"v{n - 1}", "w"], [f"v{n}"])
        for n in range(8)
    ]
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIZE])],
        [helper.make_tensor_value_info("v7", TensorProto.FLOAT, ["n", SIZE])],
        [numpy_helper.from_array(weight, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    Path("m.onnx").write_bytes(made.SerializeToString())
    np.savez("x.npz", x=np.random.default_rng(0).standard_normal((512, SIZE)).astype(np.float32))


WORDS = ("dump", "--engine", "onnxruntime", "--model", "m.onnx", "--optimize", "none")


def test_a_run_goes_to_s3_while_it_is_captured(s3, driftline, monkeypatch):
    seen: list[str] = []
    send = Store.send

    def watched(self, source, name):
        seen.append(name)
        return send(self, source, name)

    monkeypatch.setattr(Store, "send", watched)
    url = f"{s3.url}/run"
    said = driftline(*WORDS, "--inputs", "x.npz", "-o", url)
    assert said.code == 0, said.err
    assert f"in {url}" in said.err and f"compare REFERENCE {url}" in said.err
    assert not Path("run.sending").exists()
    shards = [name for name in seen if name.endswith(".safetensors")]
    assert len(shards) > 1  # portions that can be sent, and deleted here, while it goes on
    assert driftline(*WORDS, "--inputs", "x.npz", "-o", "here").code == 0
    table = api.compare("here", url)
    assert table.verdict == "pass" and len(table.rows) == len(api.open_run("here").records)
    assert all(row.metrics["different"] == 0 for row in table.rows)
    again = driftline(*WORDS, "--inputs", "x.npz", "-o", url)
    assert again.code == 2 and "exists and is not empty" in again.err
    assert driftline(*WORDS, "--inputs", "x.npz", "-o", url, "--force").code == 0
    from_there = driftline(*WORDS, "--inputs", url, "-o", "again")
    assert from_there.code == 0, from_there.err


def test_a_model_that_cannot_run_leaves_nothing_there_and_nothing_here(memory, driftline):
    np.savez("wrong.npz", y=np.ones((1, SIZE), np.float32))
    said = driftline(*WORDS, "--inputs", "wrong.npz", "-o", f"{memory}/run")
    assert said.code == 2 and "the model has no input 'y'" in said.err
    assert not Store(f"{memory}/run").sizes()
    assert not Path("run.sending").exists()


def test_what_could_not_be_sent_waits_and_push_goes_on(memory, driftline, monkeypatch):
    monkeypatch.setattr(upload.Sending.finish, "__defaults__", (0.1,))
    send = Store.send

    def cut_off(self, source, name):
        if name.endswith("tensors-00001.safetensors"):
            raise OSError("cut off")
        return send(self, source, name)

    url = f"{memory}/run"
    with monkeypatch.context() as patched:
        patched.setattr(Store, "send", cut_off)
        said = driftline(*WORDS, "--inputs", "x.npz", "-o", url, "--stage", "stage")
    assert said.code == 2
    assert "not all of it is at" in said.err and "driftline push stage" in said.err
    assert driftline("push", "stage", url).code == 0
    run = api.open_run(url)
    assert run.sealed and not run.losses


def test_written_down_it_is_captured_and_pushed(memory, driftline):
    url = f"{memory}/run"
    said = driftline(*WORDS, "--inputs", "x.npz", "-o", url, "--python")
    assert "driftline.push(" in said.out
    Path("printed.py").write_text(said.out)
    runpy.run_path("printed.py")
    assert api.open_run(url).sealed


def test_the_function_refuses_an_address_before_any_work():
    with pytest.raises(BadInput, match="a folder of this machine first"):
        api.capture_onnx("m.onnx", "x.npz", "s3://bucket/run")
    assert not Path("s3:").exists()
