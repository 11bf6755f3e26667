"""`driftline topology`: runs, dumps and topology files for graph viewers, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import driftline
from driftline.cli.main import main
from support.ge_twins import traced, write_twins


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def captured(path: Path, scale: float = 1.0, **more: str) -> Path:
    model = Net().eval()
    with torch.no_grad():
        model.layers[1].linear.weight.mul_(scale)  # type: ignore[union-attr, operator]
        with driftline.capture(model, path, **more):
            model(torch.linspace(-1, 1, 32).reshape(4, 8))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return captured(tmp_path / "run")


def drawn(path: Path | str):
    model = onnx.load(str(path))
    onnx.checker.check_model(model, full_check=True)
    return model.graph


def feeds(graph) -> set[tuple[str, str]]:
    makers = {name: node.name for node in graph.node for name in node.output}
    return {(makers[n], node.name) for node in graph.node for n in node.input if n in makers}


def test_a_run_of_modules_is_drawn_by_equal_bytes(run: Path, capsys) -> None:
    assert main(["topology", "run"]) == 0
    graph = drawn("run.onnx")
    assert [node.name for node in graph.node] == [
        f"layers.{n}.{part}" for n in (0, 1) for part in ("norm", "linear", "drop")
    ]
    assert feeds(graph) == {
        ("layers.0.norm", "layers.0.linear"),
        ("layers.0.linear", "layers.0.drop"),
        ("layers.0.drop", "layers.1.norm"),
        ("layers.1.norm", "layers.1.linear"),
        ("layers.1.linear", "layers.1.drop"),
    }
    shapes = {one.name: one.type.tensor_type for one in graph.value_info}
    assert [d.dim_value for d in shapes["layers.0.norm_output_0"].shape.dim] == [4, 8]
    assert "6 nodes" in capsys.readouterr().err
    assert main(["topology", "run", "--level", "1", "-o", "flat.onnx"]) == 0
    assert feeds(drawn("flat.onnx")) == {("layers.0", "layers.1")}
    assert main(["topology", "run", "--level", "0", "-o", "one.onnx"]) == 0
    assert [node.op_type for node in drawn("one.onnx").node] == ["Net"]


def test_a_run_of_digests_is_enough_and_descriptions_have_nodes_without_edges(run: Path) -> None:
    captured(run.parent / "digests", keep="digest")
    assert feeds(drawn(driftline.topology_to_onnx("digests"))) == feeds(
        drawn(driftline.topology_to_onnx("run"))
    )
    captured(run.parent / "described", keep="describe")
    assert len(drawn(driftline.topology_to_onnx("described")).node) == 6


def test_graph_dumps_are_drawn_by_their_own_edges(tmp_path: Path) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) @ y.T

    inputs = [torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 12).reshape(3, 4)]
    twins = write_twins(traced(model, *inputs), inputs, tmp_path)
    graph = drawn(driftline.topology_to_onnx(twins.ge, output=tmp_path / "ge.onnx"))
    kinds = {node.name: node.op_type for node in graph.node}
    fed = {(kinds[a], kinds[b]) for a, b in feeds(graph)}
    assert ("Add", "Relu") in fed and any(a == "Relu" for a, _ in fed), fed
    assert drawn(driftline.topology_to_onnx(twins.fx, output=tmp_path / "fx.onnx")).node


def test_a_comparison_colours_the_graph_and_the_fault_is_red(run: Path, capsys) -> None:
    captured(run.parent / "faulty", scale=1.5)
    assert main(["compare", "run", "faulty", "-o", "cmp"]) == 1
    capsys.readouterr()
    assert main(["topology", "run", "--to", "model-explorer", "--table", "cmp"]) == 0
    assert "run.graph.node_data.json" in capsys.readouterr().err
    (shown,) = json.loads(Path("run.graph.json").read_text())["graphs"]
    colours = {node["id"]: node.get("style", {}).get("backgroundColor") for node in shown["nodes"]}
    assert colours["layers.1.linear"] != colours["layers.0.linear"]
    assert colours["layers.0.linear"] == colours["layers.0.norm"] is not None
    (results,) = json.loads(Path("run.graph.node_data.json").read_text()).values()
    worst = results["results"]["layers.1.linear"]["value"]
    assert worst > 1 > results["results"]["layers.0.linear"]["value"]
    words = ["topology", "run", "--to", "model-explorer", "--table", "cmp", "--force"]
    assert main([*words, "--metric", "cosine"]) == 0
    assert main([*words, "--metric", "cosin"]) == 2
    assert "did you mean 'cosine'" in capsys.readouterr().err


def test_an_onnx_file_carries_status_and_numbers_of_a_comparison_on_its_nodes(run: Path) -> None:
    captured(run.parent / "faulty", scale=1.5)
    assert main(["compare", "run", "faulty", "-o", "cmp", "-q"]) == 1
    table = driftline.open_table("cmp")
    assert main(["topology", "run", "--table", "cmp", "--metric", "cosine"]) == 0
    model = onnx.load("run.onnx")
    onnx.checker.check_model(model, full_check=True)
    said = {
        node.name: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in model.graph.node
    }
    assert said["layers.0.linear"]["driftline_status"] == b"pass"
    assert said["layers.1.linear"]["driftline_status"] == b"fail"
    (row,) = [r for r in table.rows if (r.site, r.port) == ("layers.1.linear", "output")]
    assert said["layers.1.linear"]["driftline_cosine"] == pytest.approx(row.metrics["cosine"])
    severity = said["layers.1.linear"]["driftline_value_over_limit"]
    assert severity == pytest.approx(row.severity, rel=1e-6) and severity > 1
    assert all("driftline_status" in one for one in said.values())
    about = {each.key: each.value for each in model.metadata_props}
    assert about["driftline.verdict"] == "fail" and "layers.1.linear" in about["driftline.finding"]
    # Without a metric of its own, each node has the one that decided.
    assert main(["topology", "run", "--table", "cmp", "--force"]) == 0
    (node,) = [n for n in onnx.load("run.onnx").graph.node if n.name == "layers.1.linear"]
    assert {a.name for a in node.attribute} >= {"driftline_relative_l2", "driftline_limit"}
    assert node.doc_string.startswith("fail: ")


BAD = [
    (["topology", "nothing"], "there is no 'nothing'", ""),
    (["topology", "run", "--level", "-1"], "from 0 upwards", "0 is the whole model"),
    (["topology", "run", "--level", "two"], "whole number", ""),
    (["topology", "run", "--to", "onx"], "--to takes", "onnx"),
    (["topology", "run", "--step", "7"], "nothing of step 7", "step 0"),
    (["topology", "run", "--rank", "3"], "nothing of rank 3", "rank 0"),
    (["topology", "run", "--table", "cmp"], "cmp holds no table.json", "driftline compare"),
    (["topology", "run", "--metric", "cosine"], "--metric", "--table"),
    (["topology", "run", "--to", "model-explorer", "--metric", "cosine"], "--metric", "--table"),
    (["topology", "run", "--to", "model-explorer", "--table", "no"], "no", ""),
    (["topology", "run/rank0/topology.json"], "part of a run", "give the run's folder: run"),
    (["topology", "taken.txt"], "no topology", "*.json"),
    (["topology", "run", "-o", "taken.txt"], "exists", "--force"),
    (["topology", "run", "-o", "."], "is a folder", "name of a file"),
    (["topology", "broken.json"], "is no JSON", ""),
    (["topology"], "needs", ""),
]


@pytest.mark.parametrize(("words", "sentence", "hint"), BAD, ids=lambda v: " ".join(v)[:50])
def test_what_cannot_be_drawn_is_said_in_a_sentence(
    run: Path, capsys, words: list[str], sentence: str, hint: str
) -> None:
    Path("taken.txt").write_text("mine")
    Path("broken.json").write_text('{"modelName": ')
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert sentence in said and hint in said and "Traceback" not in said
    assert sorted(Path().rglob("*")) == before and Path("taken.txt").read_text() == "mine"


def test_a_level_deeper_than_the_model_shows_all_and_says_so(run: Path, capsys) -> None:
    assert main(["topology", "run", "--level", "9"]) == 0
    assert "2 levels deep; all are shown" in capsys.readouterr().err


def test_each_call_of_an_operator_has_the_colour_of_its_own_rows(
    tmp_path: Path, monkeypatch
) -> None:
    class Twice(torch.nn.Linear):
        off = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum() + ((super().forward(x) + self.off) * 3).sum()

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Twice(4, 4)
    for name, off in (("one", 0.0), ("two", 1.0)):
        model.off = off
        with driftline.capture(model, name, levels=("ops",)), torch.no_grad():
            model(torch.ones(2, 4))
    assert main(["compare", "one", "two", "-o", "cmp", "-q"]) == 1
    assert main(["topology", "two", "--to", "model-explorer", "--table", "cmp"]) == 0
    (results,) = json.loads(Path("two.graph.node_data.json").read_text()).values()
    products = [v["value"] for k, v in results["results"].items() if k.startswith("aten.mul")]
    assert products[0] == 0 and products[1] > 1


def test_the_colours_are_those_of_the_step_that_is_drawn(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for name, off in (("one", 0.0), ("two", 1.0)):
        with driftline.capture(model, name, steps="*"), torch.no_grad():
            model(torch.ones(2, 4))
            model(torch.ones(2, 4) + off)
    assert main(["compare", "one", "two", "-o", "cmp", "-q"]) == 1
    words = ["topology", "two", "--to", "model-explorer", "--table", "cmp", "--force"]
    found = []
    for step in ("0", "1"):
        assert main([*words, "--step", step]) == 0
        (results,) = json.loads(Path("two.graph.node_data.json").read_text()).values()
        found.append(results["results"]["0"]["value"])
    assert found[0] == 0 and found[1] > 1
