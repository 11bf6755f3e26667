"""ONNX Runtime: what is captured is what the optimised model computes, and nothing changes it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_zoo as zoo
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import driftline
from driftline.captures.onnxruntime import sessions
from driftline.captures.onnxruntime.graph import Graph
from driftline.captures.onnxruntime.model_file import load_graph
from driftline.captures.onnxruntime.recorder import Observation, portions
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run

LEVELS = ("none", "basic", "extended", "all")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.gelu_mlp(tmp_path_factory.mktemp("mlp") / "mlp.onnx", told=True)


def captured(model: Path, inputs: Any, **how: Any) -> tuple[Run, Any]:
    sink = MemorySink()
    result = driftline.capture_onnx(model, inputs, sink, **how)
    return sink.run(), result


def kernels(path: Path, level: str, x: Any, folder: Path) -> tuple[list[Any], Counter[str]]:
    """What a plain session gives, and the operators that its profile says it executed."""
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.enable_profiling = True
    options.log_severity_level = 3
    options.profile_file_prefix = str(folder / "profile")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"x": x})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = Counter(
        e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e["args"]
    )
    return outputs, ran


@pytest.mark.parametrize("level", LEVELS)
def test_the_captured_graph_is_the_optimised_one(mlp: Path, level: Any, tmp_path: Path) -> None:
    x = zoo.some_x()
    plain, ran = kernels(mlp, sessions._LEVELS[level], x, tmp_path)
    made = sessions.optimise(mlp, sessions.plan_of(level, ()), tmp_path)
    graph = Graph(load_graph(made.path))
    shown = sessions.with_outputs(made.path, list(graph.maker), 0)
    outputs, seen = kernels(shown, "ORT_DISABLE_ALL", x, tmp_path)
    assert seen == ran  # the same kernels, though every value is an output now
    assert outputs[0].tobytes() == plain[0].tobytes()
    run, result = captured(mlp, {"x": x}, optimize=level)
    assert result.faithful
    assert result.nodes == sum(ran.values())
    assert run.get("(root)").numpy().tobytes() == plain[0].tobytes()


def test_marking_values_before_optimising_would_have_measured_another_program(mlp: Path) -> None:
    run, result = captured(mlp, {"x": zoo.some_x()})
    assert result.nodes < result.exported_nodes == 9
    assert any(record.class_name == "Gelu" for record in run.records)


def test_every_tensor_is_what_a_plain_session_with_all_outputs_gives(mlp: Path) -> None:
    model = onnx.load(str(mlp))
    values = [value for node in model.graph.node for value in node.output]
    for value in values[:-1]:
        model.graph.output.add().name = value
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    x = zoo.some_x()
    expected = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"x": x}), strict=True)
    )
    run, _ = captured(mlp, {"x": x}, optimize="none")
    nodes = {
        r.key.site.rpartition("/")[2]: r
        for r in run.records
        if r.key.port == "output" and "/" in r.key.site
    }
    assert set(nodes) == set(values)
    for name, record in nodes.items():
        assert run.raw(record).tobytes() == expected[name].tobytes()


def test_modules_take_and_give_what_crosses_their_border(mlp: Path) -> None:
    run, _ = captured(mlp, {"x": zoo.some_x()}, optimize="none", levels="modules")
    seen = [(r.key.site, r.key.port, r.key.slot, r.class_name) for r in run.records]
    assert seen == [
        ("(root)", "input", "x", "Model"),
        ("first", "input", "x", "First"),
        ("first", "output", "0", "First"),
        ("act", "input", "two", "Act"),
        ("act", "output", "0", "Act"),
        ("second", "input", "seven", "Second"),
        ("second", "output", "0", "Second"),
        ("(root)", "output", "0", "Model"),
    ]
    tree = run.topology()
    assert tree is not None
    assert [child["name"] for child in tree["roots"][0]["children"]] == ["first", "act", "second"]  # type: ignore[index,call-overload]


@pytest.mark.parametrize("how", [{"values_at_once": 3}, {"memory": 600}, {"values_at_once": 1}])
def test_executed_in_portions_the_run_is_the_same(mlp: Path, how: dict[str, int]) -> None:
    whole, _ = captured(mlp, {"x": zoo.some_x()}, optimize="none")
    parts, result = captured(mlp, {"x": zoo.some_x()}, optimize="none", **how)
    assert result.executions > 2
    assert [(r.key, r.digest) for r in parts.records] == [(r.key, r.digest) for r in whole.records]


def test_a_portion_never_holds_more_than_it_may() -> None:
    found = [Observation("s", "output", "0", f"v{n}", "") for n in range(10)]
    sizes = {f"v{n}": 100 * (n + 1) for n in range(10)}
    for memory, most in ((1000, 0), (1, 0), (10**9, 4)):
        parts = portions(found, sizes, memory, most)
        assert [sight for part in parts for sight in part] == found
        for part in parts:
            held = sum(sizes[sight.value] for sight in part)
            assert held <= memory or len(part) == 1
            assert not most or len(part) <= most


def test_weights_beside_the_model_are_found_and_never_read_into_the_graph(tmp_path: Path) -> None:
    inside = zoo.gelu_mlp(tmp_path / "whole.onnx")
    model = onnx.load(str(inside))
    onnx.save(
        model,
        str(tmp_path / "m.onnx"),
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
    )
    assert (tmp_path / "m.data").stat().st_size > 500
    one, _ = captured(inside, {"x": zoo.some_x()}, levels=("ops", "params"))
    two, _ = captured(tmp_path / "m.onnx", {"x": zoo.some_x()}, levels=("ops", "params"))
    assert [r.digest for r in one.records] == [r.digest for r in two.records]
    assert any(r.key.port == "param" and r.shape == (8, 16) for r in one.records)


def test_a_graph_is_read_without_the_values_of_its_weights(tmp_path: Path) -> None:
    big = numpy_helper.from_array(np.ones((1024, 1024), np.float32), "w")
    path = zoo.write(
        tmp_path / "big.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", zoo.F32, [1, 1024])],
        ["y"],
        [big],
    )
    assert path.stat().st_size > 4 << 20
    model = load_graph(path)
    assert model.ByteSize() < 4096
    assert list(model.graph.initializer[0].dims) == [1024, 1024]


def test_several_sets_of_inputs_are_steps(mlp: Path, tmp_path: Path) -> None:
    sets = [{"x": zoo.some_x(4, seed)} for seed in range(3)]
    np.savez(tmp_path / "third.npz", **sets[2])
    run, result = captured(mlp, [*sets[:2], tmp_path / "third.npz"])
    assert result.steps == (0, 1, 2)
    for step, given in enumerate(sets):
        assert (run.get("(root)", "input", "x", step=step).numpy() == given["x"]).all()
    orders = [(r.key.step, r.order) for r in run.records]
    assert orders == sorted(orders)  # step by step, also where each takes several executions
    many, _ = captured(mlp, sets[:2], values_at_once=2)
    assert [r.key.step for r in many.records] == sorted(r.key.step for r in many.records)
    few, _ = captured(mlp, sets, steps="1-")
    assert {record.key.step for record in few.records} == {1, 2}


def test_a_run_says_what_made_it(mlp: Path, tmp_path: Path) -> None:
    driftline.capture_onnx(mlp, {"x": zoo.some_x()}, tmp_path / "run", optimize="basic", threads=1)
    (facts,) = driftline.open_run(tmp_path / "run").processes()
    engine = facts["engine"]
    assert facts["framework"] == "onnxruntime"
    assert facts["versions"]["onnxruntime"] == engine["version"] == ort.__version__
    assert engine["optimize"] == "basic"
    assert engine["providers"] == ["CPUExecutionProvider"]
    assert engine["model"] == "mlp.onnx"
    assert engine["model_digest"].startswith(("xxh3-128:", "blake2b-128:"))
    assert [path.name for path in tmp_path.iterdir()] == [
        "run"
    ]  # nothing of ours is left beside it


def test_the_digest_of_a_model_is_that_of_its_weights_too(tmp_path: Path) -> None:
    model = onnx.load(str(zoo.gelu_mlp(tmp_path / "whole.onnx")))
    onnx.save(
        model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="w", size_threshold=0
    )
    digests = set()
    for change in (False, True):
        if change:
            with (tmp_path / "w").open("r+b") as file:
                file.write(b"\1")
        out = tmp_path / f"run{change}"
        driftline.capture_onnx(tmp_path / "m.onnx", {"x": zoo.some_x()}, out)
        digests.add(driftline.open_run(out).processes()[0]["engine"]["model_digest"])
    assert len(digests) == 2


def test_how_far_it_is_and_how_much_is_kept_can_be_asked_for(mlp: Path) -> None:
    told: list[tuple[int, int]] = []
    run, _ = captured(
        mlp,
        {"x": zoo.some_x()},
        values_at_once=2,
        keep="summary",
        sites=["first*", "second*"],
        ports="output",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == len(run)
    assert {record.kept for record in run.records} == {"summary"}
    assert {record.key.port for record in run.records} == {"output"}
    assert all(record.key.site.startswith(("first", "second")) for record in run.records)


def test_element_types_are_kept_as_they_are(tmp_path: Path) -> None:
    make = helper.make_node
    kinds = {
        "bfloat16": TensorProto.BFLOAT16,
        "float16": TensorProto.FLOAT16,
        "float64": TensorProto.DOUBLE,
        "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
        "int8": TensorProto.INT8,
        "bool": TensorProto.BOOL,
        "uint32": TensorProto.UINT32,
    }
    nodes = [make("Cast", ["x"], [name], to=kind) for name, kind in kinds.items()]
    nodes.append(make("Identity", ["x"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "types",
        [helper.make_tensor_value_info("x", zoo.F32, [4, 8])],
        [onnx.ValueInfoProto(name="y"), *(onnx.ValueInfoProto(name=name) for name in kinds)],
    )
    path = tmp_path / "types.onnx"
    path.write_bytes(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9
        ).SerializeToString()
    )
    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 4
    run, _ = captured(path, {"x": x}, optimize="none")
    for name in kinds:
        handle = run.get(name)
        assert handle.dtype == name
        assert handle.shape == (4, 8)
    assert (run.get("bfloat16").float64() == x.astype(np.float64)).all()  # all are exact in it


def test_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    make = helper.make_node
    branch = helper.make_graph(
        [make("Neg", ["x"], ["inner"])], "then", [], [onnx.ValueInfoProto(name="inner")]
    )
    other = helper.make_graph(
        [make("Identity", ["x"], ["same"])], "else", [], [onnx.ValueInfoProto(name="same")]
    )
    nodes = [
        make("ReduceSum", ["x"], ["sum"], keepdims=0),
        make("Greater", ["sum", "zero"], ["more"]),
        make("If", ["more"], ["either"], "fork", then_branch=branch, else_branch=other),
        make("SequenceConstruct", ["either", "x"], ["list"]),
        make("SequenceAt", ["list", "at"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.int64(0), "at"),
    ]
    given = [helper.make_tensor_value_info("x", zoo.F32, [4, 8])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["y"], constants)
    run, result = captured(path, {"x": zoo.some_x()}, optimize="none")
    said = [str(event["message"]) for event in run.events()]
    assert any("inside the If 'fork' is not seen" in message for message in said)
    assert any("a sequence, map or optional value is no tensor" in message for message in said)
    assert run.get("either").shape == (4, 8)
    assert result.faithful
    assert result.notes == (
        "the inside of 1 If is not seen, only what goes in and comes out",
        "1 value not recorded, because only tensors of numbers are: list",
    )


def test_texts_are_handed_on_and_what_becomes_of_them_is_recorded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["words"], ["same"]),
        helper.make_node("Shape", ["same"], ["sizes"]),
        helper.make_node("Cast", ["sizes"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["count", "factor"], ["y"]),
    ]
    given = [
        helper.make_tensor_value_info("words", TensorProto.STRING, ["n"]),
        helper.make_tensor_value_info("factor", zoo.F32, [1]),
    ]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["same", "y"])
    np.savez(tmp_path / "x.npz", words=np.array(["one", "two"]), factor=np.float32([3]))
    run, result = captured(path, tmp_path / "x.npz", optimize="none")
    assert run.get("y").numpy().tolist() == [6.0]
    assert result.faithful
    assert result.notes == (
        "2 values not recorded, because only tensors of numbers are: same, words",
    )


def test_a_model_without_inputs_needs_none_and_constant_outputs_are_recorded(
    tmp_path: Path,
) -> None:
    constants = [numpy_helper.from_array(np.float32([1, -2]), "c")]
    path = zoo.write(
        tmp_path / "m.onnx", [helper.make_node("Neg", ["c"], ["y"])], [], ["y"], constants
    )
    for level in ("none", "all"):  # at the higher one nothing is left to compute
        run, result = captured(path, [], optimize=level)
        assert run.get("(root)").numpy().tolist() == [-1.0, 2.0]
        assert result.faithful


def test_products_that_lie_as_matrices_are_recorded_with_all_their_axes(tmp_path: Path) -> None:
    """A product and its bias become a Gemm, whose reshape is merged with that of the heads."""
    rng = np.random.default_rng(0)
    make = helper.make_node
    nodes = [
        make("Tanh", ["x"], ["t"], "/norm/Tanh"),
        make("MatMul", ["t", "w"], ["p"], "/q_proj/MatMul"),
        make("Add", ["b", "p"], ["/q_proj/Add_output_0"], "/q_proj/Add"),
        make("Reshape", ["/q_proj/Add_output_0", "heads"], ["h"], "/Reshape"),
        make("Softmax", ["h"], ["y"], "/Softmax"),
    ]
    constants = [
        zoo.weights(rng, "w", 8, 8),
        zoo.weights(rng, "b", 8),
        numpy_helper.from_array(np.int64([2, 3, 2, 4]), "heads"),
    ]
    given = [helper.make_tensor_value_info("x", zoo.F32, [2, 3, 8])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["y"], constants)
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    plain, _ = captured(path, {"x": x}, optimize="none")
    fused, _ = captured(path, {"x": x}, optimize="all")
    if not any(record.class_name == "Gemm" for record in fused.records):
        pytest.skip("this ONNX Runtime makes no Gemm of it")
    for how in ({}, {"values_at_once": 1}):
        fused, _ = captured(path, {"x": x}, optimize="all", **how)
        assert fused.get("q_proj").shape == (2, 3, 8)
        assert np.allclose(fused.get("q_proj").numpy(), plain.get("q_proj").numpy(), atol=1e-6)


def test_a_model_that_draws_numbers_is_said_to_differ(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    given = [helper.make_tensor_value_info("x", zoo.F32, [4, 8])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["y"])
    # A session draws on from step to step; one that is made anew for a portion begins again.
    run, result = captured(path, [{"x": zoo.some_x()}] * 2, values_at_once=1)
    assert not result.faithful
    assert "not bit for bit" in result.notes[0]
    assert any(event["kind"] == "differs" for event in run.events())


def test_every_output_of_a_node_has_a_site_of_its_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["left", "right"], axis=1),
        helper.make_node("Add", ["left", "right"], ["y"]),
    ]
    given = [helper.make_tensor_value_info("x", zoo.F32, [4, 8])]
    path = zoo.write(tmp_path / "m.onnx", nodes, given, ["y"])
    x = zoo.some_x()
    run, _ = captured(path, {"x": x}, optimize="none")
    assert (run.get("left").numpy() == x[:, :4]).all()
    assert (run.get("right").numpy() == x[:, 4:]).all()
    edges = (run.topology() or {})["edges"]
    assert ["right", "0", "y", "right"] in edges  # type: ignore[operator]
