"""ATB's topology files as graphs: what Netron and Model Explorer are given, and hostile files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import driftline
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError
from driftline.graphs.model import Graph, GraphNode, LevelNode, TensorInfo, at_level
from driftline.graphs.overlay import Finding, finding_of
from driftline.graphs.sources.calls import calls_graph
from driftline.graphs.writers.atb import atb_graph
from driftline.graphs.writers.model_explorer import model_explorer, node_data, status_data
from driftline.graphs.writers.onnx import onnx_bytes
from driftline.runs.sidecars.calls import Call

DATA = Path(__file__).parents[1] / "data" / "ascend" / "mini_atb"


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "atb")
    for path in (tmp_path / "atb").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (root,) = (tmp_path / "atb").glob("msit_dump*")
    return root


@pytest.fixture
def toy(dump: Path) -> Path:
    return dump / "model" / "4242" / "ToyModel.json"


def drawn(path: Path) -> Any:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model.graph


def node(name: str, reads: list[str], writes: list[str], **more: Any) -> dict[str, Any]:
    return {"opName": name, "opType": "Op", "inTensors": reads, "outTensors": writes, **more}


def model(*nodes: dict[str, Any], inputs: list[str], outputs: list[str]) -> str:
    return json.dumps(
        {"modelName": "m", "inTensors": inputs, "outTensors": outputs, "nodes": list(nodes)}
    )


def checked(text: str, level: int | None = None) -> Any:
    loaded = onnx.load_from_string(onnx_bytes(at_level(atb_graph(text, "x.json"), level)))
    onnx.checker.check_model(loaded, full_check=True)
    return loaded.graph


@pytest.mark.parametrize(("level", "nodes"), [(None, 24), (-1, 24), (0, 1), (1, 13), (2, 24)])
def test_a_model_is_drawn_as_deep_as_asked(toy: Path, level: int | None, nodes: int) -> None:
    written = driftline.topology_to_onnx(toy, level)
    assert written == toy.with_suffix(".onnx")
    graph = drawn(written)
    assert len(graph.node) == nodes
    assert [one.name for one in graph.input] == ["ToyModel_input_0", "ToyModel_weight_0"]
    assert [one.name for one in graph.output] == ["ToyModel_output_0"]


def test_nodes_keep_names_types_edges_and_parameters_of_their_own_kind(toy: Path) -> None:
    graph = drawn(driftline.topology_to_onnx(toy))
    nodes = {one.name: one for one in graph.node}
    norm, linear = nodes["RmsNormOperation_1_0"], nodes["LinearOperation_1_1"]
    assert norm.op_type == "RmsNormOperation" and list(norm.output) == list(linear.input)
    kinds = {a.name: (a.type, onnx.helper.get_attribute_value(a)) for a in norm.attribute}
    assert kinds["layerType"] == (onnx.AttributeProto.INT, 1)
    assert kinds["normParam.epsilon"][0] == onnx.AttributeProto.FLOAT
    assert kinds["normParam.epsilon"][1] == pytest.approx(1e-5)
    assert {a.name: a.i for a in linear.attribute}["transposeB"] == 1


def test_shapes_and_types_come_from_the_operation_csv_of_the_same_process(toy: Path) -> None:
    graph = drawn(driftline.topology_to_onnx(toy))
    known = {one.name: one.type.tensor_type for one in graph.value_info}
    tensor = known["ToyModel_internal_0"]  # of RmsNormOperation_1_0, the csv's only line
    assert tensor.elem_type == onnx.TensorProto.FLOAT16
    assert [d.dim_value for d in tensor.shape.dim] == [2, 4]


def test_the_first_name_of_the_function_replaces_its_own_file(toy: Path) -> None:
    from driftline import atb_json_to_onnx

    assert len(drawn(atb_json_to_onnx(toy)).node) == 24
    assert len(drawn(atb_json_to_onnx(toy, 1)).node) == 13
    with pytest.raises(AlreadyThere, match="exists"):
        driftline.topology_to_onnx(toy, 1)


def test_a_whole_dump_is_drawn_with_parameters_and_shapes_of_its_tensors(dump: Path) -> None:
    graph = drawn(driftline.topology_to_onnx(dump, output=dump.parent / "all.onnx"))
    assert len(graph.node) == 24
    shaped = [one for one in graph.value_info if one.type.tensor_type.shape.dim]
    assert len(shaped) > 20, "every operation of the dump has tensors"


def test_a_layer_file_is_a_graph_too(dump: Path) -> None:
    layer = dump / "layer" / "4242" / "Decoder_layer_1.json"
    graph = drawn(driftline.topology_to_onnx(layer))
    assert [one.op_type for one in graph.node] == ["RmsNormOperation", "LinearOperation"]


def test_a_tensor_that_is_written_again_has_a_name_for_each_writing() -> None:
    text = model(
        node("a", ["x"], ["t"]),
        node("in_place", ["t"], ["t"]),
        node("b", ["t"], ["y"]),
        inputs=["x"],
        outputs=["y"],
    )
    a, in_place, b = checked(text).node
    assert list(in_place.input) == list(a.output) and list(b.input) == list(in_place.output)
    assert list(a.output) != list(in_place.output)


def test_nodes_listed_out_of_order_are_put_in_order() -> None:
    text = model(node("b", ["t"], ["y"]), node("a", ["x"], ["t"]), inputs=["x"], outputs=["y"])
    assert [one.name for one in checked(text).node] == ["a", "b"]


def test_nodes_of_one_name_are_told_apart() -> None:
    text = model(node("a", ["x"], ["t"]), node("a", ["t"], ["y"]), inputs=["x"], outputs=["y"])
    names = [one.name for one in checked(text).node]
    assert len(set(names)) == 2


def test_a_closed_node_reads_and_writes_what_its_parts_do() -> None:
    inner = [node("i", ["x", "cache"], ["h"]), node("j", ["h"], ["t"])]
    text = model(
        node("outer", ["x"], ["t"], nodes=inner),
        node("peeks", ["h", "t"], ["y"]),
        inputs=["x", "cache"],
        outputs=["y"],
    )
    outer, peeks = checked(text, 1).node
    assert set(outer.input) == {"x", "cache"} and set(outer.output) == {"t", "h"}
    assert set(peeks.input) == {"h", "t"}


PARAMETERS = {
    "flag": True,
    "whole": 7,
    "real": 0.5,
    "word": "gelu",
    "many": [1, 2],
    "reals": [1, 0.5],
    "words": ["a", "b"],
    "none": None,
    "empty": [],
    "deep": {"a": {"b": 3}},
    "mixed": [1, "a", {"x": 2}],
    "huge": 10**30,
    "beyond": 1e300,
}


def test_every_kind_of_parameter_becomes_an_attribute_of_the_right_type() -> None:
    text = model(node("a", ["x"], ["y"], param=PARAMETERS), inputs=["x"], outputs=["y"])
    (only,) = checked(text).node
    found = {a.name: (a.type, onnx.helper.get_attribute_value(a)) for a in only.attribute}
    kind = onnx.AttributeProto
    assert found["flag"] == (kind.INT, 1) and found["whole"] == (kind.INT, 7)
    assert found["real"] == (kind.FLOAT, 0.5) and found["word"] == (kind.STRING, b"gelu")
    assert found["many"] == (kind.INTS, [1, 2]) and found["reals"] == (kind.FLOATS, [1.0, 0.5])
    assert found["words"] == (kind.STRINGS, [b"a", b"b"]) and found["empty"] == (kind.INTS, [])
    assert found["deep.a.b"] == (kind.INT, 3) and "none" not in found
    assert json.loads(found["mixed"][1]) == [1, "a", {"x": 2}]
    assert found["huge"] == (kind.STRING, str(10**30).encode())
    assert found["beyond"] == (kind.FLOAT, float("inf"))


def nested(depth: int) -> str:
    text = '{"opName":"leaf","opType":"L"}'
    for level in range(depth):
        text = f'{{"opName":"n{level}","opType":"N","nodes":[{text}]}}'
    return text


HOSTILE = [
    ('{"modelName": "m", "nodes": [', "no JSON"),
    ("[1, 2]", "no JSON object"),
    ("null", "no JSON object"),
    ("{}", "no topology of the ATB library"),
    ('{"modelName": "m", "nodes": 3}', "no list of objects"),
    ('{"modelName": "m", "nodes": [1]}', "no list of objects"),
    ('{"modelName": "m", "inTensors": "abc"}', "no list"),
    ('{"modelName": "m", "inTensors": [1]}', "no text"),
    (
        model(node("a", ["u"], ["t"]), node("b", ["t"], ["u"]), inputs=[], outputs=[]),
        "feed each other in a circle",
    ),
    (nested(80), "levels deep"),
    (nested(5000), "levels deep"),
]


@pytest.mark.parametrize(("text", "sentence"), HOSTILE, ids=[s for _, s in HOSTILE])
def test_a_damaged_or_hostile_file_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadFile, match=sentence):
        driftline.topology_to_onnx(path)
    assert not path.with_suffix(".onnx").exists()


def test_a_level_that_is_no_depth_is_refused_and_a_deeper_one_shows_all(toy: Path) -> None:
    with pytest.raises(BadInput, match="from 0 upwards"):
        driftline.topology_to_onnx(toy, -2)
    assert len(drawn(driftline.topology_to_onnx(toy, 99)).node) == 24


def test_a_link_out_of_the_dump_is_not_followed_for_shapes(dump: Path, toy: Path) -> None:
    sheet = dump / "operation_io_tensors" / "4242" / "operation_tensors_0.csv"
    outside = dump.parent / "elsewhere.csv"
    sheet.rename(outside)
    sheet.symlink_to(outside)
    graph = drawn(driftline.topology_to_onnx(toy))
    assert not graph.value_info


names = st.sampled_from(["a", "b", "c", "d", "x", "", "a/b", "é"])
trees = st.recursive(
    st.builds(
        lambda n, i, o: GraphNode(n, n, tuple(i), tuple(o)), names, st.lists(names), st.lists(names)
    ),
    lambda below: st.builds(
        lambda n, i, o, c: GraphNode(n, "K", tuple(i), tuple(o), {}, tuple(c)),
        names,
        st.lists(names),
        st.lists(names),
        st.lists(below, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(trees, max_size=4), st.lists(names), st.lists(names), st.sampled_from([None, 0, 1, 2])
)
def test_whatever_is_named_how_the_file_passes_the_checker(
    nodes: list[GraphNode], inputs: list[str], outputs: list[str], level: int | None
) -> None:
    info = {"a": TensorInfo("float16", (2, 0)), "b": TensorInfo("float8_e4m3fn", ())}
    graph = Graph("g", "G", tuple(nodes), tuple(inputs), tuple(outputs), info)
    try:
        content = onnx_bytes(at_level(graph, level))
    except DriftlineError as refused:
        assert "circle" in str(refused)
        return
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


def test_model_explorer_gets_nodes_edges_and_namespaces(toy: Path) -> None:
    graph = at_level(atb_graph(toy.read_text(), "toy"))
    content = json.loads(model_explorer(graph))
    (shown,) = content["graphs"]
    nodes = {one["id"]: one for one in shown["nodes"]}
    assert len(nodes) == len(shown["nodes"]) == 24 + 2, "operators and the two inputs"
    linear = nodes["LinearOperation_1_1"]
    assert linear["namespace"] == "Decoder_layer_1" and linear["label"] == "LinearOperation"
    (edge,) = linear["incomingEdges"]
    assert edge["sourceNodeId"] == "RmsNormOperation_1_0" and edge["targetNodeInputId"] == "0"
    assert {"key": "transposeB", "value": "true"} in linear["attrs"]
    for one in shown["nodes"]:
        assert all(e["sourceNodeId"] in nodes for e in one["incomingEdges"])


def test_findings_colour_their_nodes_and_stand_in_a_file_of_their_own() -> None:
    graph = at_level(
        Graph(
            "g",
            nodes=(
                GraphNode("a", "A", ("x",), ("t",), site="m.a"),
                GraphNode("b", "B", ("t",), ("y",), site="m.b"),
                GraphNode("c", "C", ("y",), ("z",), site="m.c"),
            ),
        )
    )
    inside = LevelNode("op", "aten.mm", (), (), {}, (), "m.b/aten.mm", 0)
    closed = LevelNode("m", "M", (), (), {}, (), "m", 3)
    findings = {"m.a": Finding("pass", 0.1), "m.b": Finding("fail", 30.0, "cosine 0.9")}
    assert finding_of(inside, findings) == findings["m.b"], "an operator has its module's"
    assert finding_of(closed, findings) == findings["m.b"], "a closed node the worst inside"
    (shown,) = json.loads(model_explorer(graph, findings))["graphs"]
    styles = {one["id"]: one.get("style") for one in shown["nodes"]}
    assert styles["a"] != styles["b"] and styles["b"] is not None and styles["c"] is None
    results = json.loads(node_data(graph, findings))["g"]["results"]
    assert results["b"]["value"] == 30.0 and set(results) == {"a", "b"}


def test_what_is_beyond_all_numbers_is_the_largest_one_and_statuses_are_words() -> None:
    nodes = (GraphNode("a", "A", site="m.a"), GraphNode("b", "B", site="m.b"))
    findings = {
        "m.a": Finding("fail", float("inf"), "NaN on one side", {"relative_l2": float("nan")}),
        "m.b": Finding("missing", float("nan")),
    }
    seen = at_level(Graph("g", nodes=nodes))
    numbers = json.loads(node_data(seen, findings, "cosine"))["g"]
    assert numbers["name"] == "cosine" and set(numbers["results"]) == {"a"}
    assert numbers["results"]["a"]["value"] > 1e308
    words = json.loads(status_data(seen, findings))["g"]
    assert {own: found["value"] for own, found in words["results"].items()} == {
        "a": "fail",
        "b": "missing",
    }
    (shown,) = json.loads(model_explorer(seen, findings))["graphs"]
    attrs = {pair["key"]: pair["value"] for pair in shown["nodes"][0]["attrs"]}
    assert attrs["status"] == "fail" and attrs["relative_l2"] == "nan"
    onnx.checker.check_model(onnx.load_from_string(onnx_bytes(seen, "", findings)))


def test_very_many_nodes_of_one_name_take_no_time() -> None:
    nodes = tuple(GraphNode("same", "K", ("t",), ("t",)) for _ in range(20_000))
    seen = at_level(Graph("g", nodes=nodes))
    assert len({one.name for one in seen.nodes}) == 20_000


def test_calls_nested_deeper_than_a_graph_can_be_are_drawn_flatter() -> None:
    calls = [
        Call(n, "module", f"m{n}", "M", str(n), inside=n - 1 if n else None) for n in range(3000)
    ]
    graph = calls_graph(calls)
    assert graph is not None and graph.depth() <= 64
    onnx.checker.check_model(onnx.load_from_string(onnx_bytes(at_level(graph))), full_check=True)


def test_a_site_of_a_thousand_parts_is_a_node_like_others(tmp_path: Path) -> None:
    from driftline.runs.records import Record, TensorKey
    from driftline.runs.writer import RunWriter

    writer = RunWriter(tmp_path / "run")
    for depth in (1, 50, 5000):
        key = TensorKey.of(".".join(["a"] * depth), "output")
        writer.put(Record(key, 0, "float32", (1,)), np.zeros(4, np.uint8))
    writer.close()
    assert drawn(driftline.topology_to_onnx(tmp_path / "run")).node
