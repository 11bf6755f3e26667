"""GE against FX, and fused against unfused GE: golden data, and twins of a real torch model."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.alignment.align import AlignOptions, align_runs
from driftline.alignment.plan import Plan
from driftline.alignment.rules.compiler_dumps import _ends, conversions
from driftline.alignment.sites.operators import Operator
from driftline.errors import BadInput
from driftline.formats.ascend.ge.graph_text import GraphNode
from driftline.formats.registry import open_run
from driftline.graphs.sources.compiler_text import (
    Input,
    Node,
    OperatorGraph,
    Vocabulary,
    graphs_in,
)
from driftline.runs.records import Record, TensorKey
from support.ge import GeDump, write_fx
from support.ge_twins import Twins, traced, write_twins

DATA = Path(__file__).parents[1] / "data" / "ascend"


class Block(nn.Module):
    """Square weights everywhere: shapes alone cannot tell x, w and bias' expansion apart."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.up(self.norm(x)))
        return torch.relu(x + self.down(hidden) * 0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.cat([x, -x], dim=-1)


@pytest.fixture(scope="module")
def graph() -> torch.fx.GraphModule:
    torch.manual_seed(3)
    return traced(Model(), torch.randn(8, 8))


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(8, 8)]


def planned(reference: Path, candidate: Path) -> Plan:
    return align_runs(open_run(reference), open_run(candidate), AlignOptions())


def sites(plan: Plan) -> set[tuple[str, str, str, str, str, str]]:
    return {
        (
            *(pair.reference.key.site, pair.reference.key.port, pair.reference.key.slot),
            *(pair.candidate.key.site, pair.candidate.key.port, pair.candidate.key.slot),
        )
        for pair in plan.pairs
    }


def test_every_row_of_the_golden_report_is_a_pair_with_its_figures() -> None:
    reference, candidate = open_run(DATA / "fx_dump"), open_run(DATA / "ge_dump")
    table = driftline.compare(reference, candidate, metrics=["kl"])
    plan = align_runs(reference, candidate, AlignOptions())
    rows = {
        (
            "fx_dump/" + reference.source(pair.reference),
            "ge_dump/" + candidate.source(pair.candidate),
        ): row
        for pair, row in zip(plan.pairs, [r for r in table.rows if r.by == "graph"], strict=True)
    }
    with (DATA / "expect_compare" / "ge_vs_fx.csv").open(newline="") as stream:
        expected = list(csv.DictReader(stream))
    own = {
        ("ge_dump/" + candidate.source(a), "ge_dump/" + candidate.source(b)): (a, b)
        for a, b in conversions(candidate)
    }
    assert len(expected) == len(rows) + len(own) == 8
    for line in expected:
        where = (line["golden_data_path"], line["my_data_path"])
        if where in own:
            first, second = (candidate.get(*one.key[:3]).float64() for one in own[where])
            assert np.array_equal(first, second)
            assert float(line["max_absolute_error"]) == 0
            continue
        metrics = rows[where].metrics
        assert metrics["cosine"] == pytest.approx(float(line["cosine_similarity"]), rel=1e-6)
        assert metrics["max_abs_error"] == float(line["max_absolute_error"]) == 0
        assert metrics["relative_l2"] == float(line["relative_euclidean_distance"]) == 0
        values = candidate.get(*rows_key(plan, candidate, where[1])).float64()
        assert values.max() == pytest.approx(float(line["my_max_value"]), rel=1e-6)
        assert values.mean() == pytest.approx(float(line["my_mean_value"]), rel=1e-6)


def rows_key(plan: Plan, run, source: str) -> tuple[str, str, str]:
    for pair in plan.pairs:
        if source.endswith(run.source(pair.candidate)):
            return pair.candidate.key[:3]
    raise AssertionError(source)


def test_twins_without_a_fault_pass_and_every_fx_node_has_its_operator(graph, inputs, tmp_path):
    twins = write_twins(graph, inputs, tmp_path, steps=2)
    table = driftline.compare(twins.fx, twins.ge)
    assert table.verdict == "pass"
    plan = planned(twins.fx, twins.ge)
    paired = {pair.reference.key.site for pair in plan.pairs if pair.reference.key.port == "output"}
    nodes = {record.key.site for record in open_run(twins.fx).records}
    # `getitem` is no operator; everything else is paired, on both steps.
    assert nodes - paired == {node for node in nodes if node.startswith("getitem")}
    assert {pair.reference.key.step for pair in plan.pairs} == {0, 1}
    for pair in plan.pairs:
        assert twins.names[pair.reference.key.site] == pair.candidate.key.site or (
            pair.candidate.key.site.startswith("Sigmoid")
        )


def test_permuted_inputs_of_one_shape_are_paired_by_their_producer(graph, inputs, tmp_path):
    """addmm(bias, x, w) is MatMulV2(x, w, bias), and x and w are both 8x8."""
    twins = write_twins(graph, inputs, tmp_path)
    plan = planned(twins.fx, twins.ge)
    found = {
        (pair.reference.key.slot, pair.candidate.key.slot)
        for pair in plan.pairs
        if pair.candidate.class_name == "MatMulV2" and pair.reference.key.port == "input"
    }
    assert found == {("1", "0"), ("2", "1"), ("0", "2")}


def test_a_helper_operator_is_listed_and_its_inner_tensor_pairs_with_nothing(
    graph, inputs, tmp_path
):
    twins = write_twins(graph, inputs, tmp_path)
    plan = planned(twins.fx, twins.ge)
    left = {(r.key.site, r.key.port): plan.reasons["candidate", r.key] for r in plan.extra}
    assert left["Sigmoid_1", "output"] == "no FX tensor corresponds to it"
    assert "on the way to silu" in left["Mul_1", "input"]
    scalars = [r for r in plan.missing if r.key.site == "mul" and r.key.slot == "1"]
    assert scalars, "the 0.5 of the FX call is listed, not dropped"
    assert "GE has no input for" in plan.reasons["reference", scalars[0].key]


@pytest.mark.parametrize("node", ["addmm_2", "native_layer_norm_1", "relu_1", "mul_2", "cat"])
def test_a_planted_error_is_named_at_its_own_operator(node, graph, inputs, tmp_path):
    def wrong(value):
        if isinstance(value, tuple):
            return (value[0] * 1.05, *value[1:])
        return value * 1.05

    twins = write_twins(graph, inputs, tmp_path, plant={node: wrong})
    table = driftline.compare(twins.fx, twins.ge)
    assert table.verdict != "pass"
    assert table.first is not None
    first = table.first
    assert (first.key.site, first.key.port) == (node, "output")
    other = driftline.compare(twins.ge, twins.fx)
    assert other.first is not None
    assert other.first.key.site == twins.names[node]


def test_a_planted_error_inside_a_fusion_is_named_at_the_fused_operator(graph, inputs, tmp_path):
    group = ["mul", "add", "relu"]
    twins = write_twins(
        graph, inputs, tmp_path, fused=[group], plant={"add": lambda value: value + 0.5}
    )
    assert twins.names["add"].startswith("Mul_")
    table = driftline.compare(twins.fx, twins.ge)
    assert table.first is not None
    assert table.first.key.site == "relu"
    plan = planned(twins.fx, twins.ge)
    inside = [r for r in plan.missing if r.key.site == "add" and r.key.port == "output"]
    assert (
        plan.reasons["reference", inside[0].key]
        == f"inside the fused operator {twins.names['add']}"
    )


def test_a_fused_dump_pairs_with_an_unfused_one(graph, inputs, tmp_path):
    groups = [["mul", "add", "relu"], ["mul_1", "add_1", "relu_1"]]
    plain = write_twins(graph, inputs, tmp_path / "plain")
    fused = write_twins(graph, inputs, tmp_path / "fused", fused=groups)
    for reference, candidate in ((plain.ge, fused.ge), (fused.ge, plain.ge)):
        plan = planned(reference, candidate)
        table = driftline.compare(reference, candidate)
        assert table.verdict == "pass"
        by_graph = [pair for pair in plan.pairs if pair.by == "graph"]
        # two fused operators of two inputs and one output each
        assert len(by_graph) == 2 * 3
        assert all(pair.confidence == 1.0 for pair in by_graph)
        alone = [*plan.missing, *plan.extra]
        assert {record.key.site.split("_")[0] for record in alone} == {"Mul", "Add", "Relu"}
        assert all("inside the fused operator" in why for why in plan.reasons.values())
    broken = write_twins(
        graph, inputs, tmp_path / "broken", fused=groups, plant={"add_1": lambda v: v * 1.2}
    )
    table = driftline.compare(plain.ge, broken.ge)
    assert table.first is not None
    assert table.first.key.site == plain.names["relu_1"]


def test_without_a_graph_text_the_sentence_says_where_it_should_be(graph, inputs, tmp_path):
    twins = write_twins(graph, inputs, tmp_path)
    next(twins.ge.glob("dynamo_*.txt")).unlink()
    with pytest.raises(BadInput, match="no graph text") as refused:
        planned(twins.fx, twins.ge)
    assert "dynamo_original_graph" in refused.value.hint


def test_a_fused_dump_without_graph_texts_pairs_by_names_shape_and_order(tmp_path):
    x, y = np.ones((2, 3), np.float32), np.full((2, 3), 2.0, np.float32)
    plain, fused = GeDump(tmp_path / "plain"), GeDump(tmp_path / "fused")
    plain.operator("Add", "Add_2", [x, y], [x + y])
    plain.operator("Relu", "Relu_1", [x + y], [x + y])
    fused.operator("AutomaticBufferFusionOp", "Add_2Relu_1", [x, y], [x + y])
    plan = planned(plain.folder, fused.folder)
    assert sites(plan) == {
        ("Add_2", "input", "0", "Add_2Relu_1", "input", "0"),
        ("Add_2", "input", "1", "Add_2Relu_1", "input", "1"),
        ("Relu_1", "output", "0", "Add_2Relu_1", "output", "0"),
    }
    assert {pair.confidence for pair in plan.pairs} == {0.7}


def test_steps_that_only_one_side_has_are_said(tmp_path):
    x = np.ones(3, np.float32)
    dump = GeDump(tmp_path / "ge")
    for step in (0, 1):
        dump.operator("Neg", "Neg_1", [x], [-x], step=step)
    dump.graph_text([GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",))])
    for step in (1, 4):
        place = tmp_path / "fx" / "gm_20240130064200000001_dump" / str(step)
        write_fx(place, "neg", "aten.neg", [x], [-x])
    plan = planned(tmp_path / "fx", tmp_path / "ge")
    assert len(plan.pairs) == 2
    assert plan.notes == ("only the reference has step 3", "only the candidate has step 1")


def test_a_tensor_that_two_members_read_and_the_fused_operator_once_is_one_input(tmp_path):
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    nodes = [
        GraphNode("Add_2", "Add", (("x", 0), ("x", 0)), ("add-aten.add.OUTPUT.0",)),
        GraphNode("Mul_1", "Mul", (("Add_2", 0), ("x", 0)), ("mul-aten.mul.OUTPUT.0",)),
    ]
    plain, fused = GeDump(tmp_path / "plain"), GeDump(tmp_path / "fused")
    plain.operator("Add", "Add_2", [x, x], [x + x])
    plain.operator("Mul", "Mul_1", [x + x, x], [(x + x) * x])
    fused.operator("AutomaticBufferFusionOp", "Add_2Mul_1", [x], [(x + x) * x])
    fx = tmp_path / "fx" / "gm_20240130064200000001_dump" / "1"
    write_fx(fx, "add", "aten.add", [x, x], [x + x])
    write_fx(fx, "mul", "aten.mul", [x + x, x], [(x + x) * x])
    for dump in (plain, fused):
        dump.graph_text(nodes)
    plan = planned(plain.folder, fused.folder)
    assert sites(plan) == {
        ("Add_2", "input", "0", "Add_2Mul_1", "input", "0"),
        ("Mul_1", "output", "0", "Add_2Mul_1", "output", "0"),
    }
    assert {pair.confidence for pair in plan.pairs} == {1.0}
    assert len(planned(tmp_path / "fx", fused.folder).pairs) == 2


def test_what_the_user_says_goes_before_the_graph(graph, inputs, tmp_path):
    twins = write_twins(graph, inputs, tmp_path)
    runs = open_run(twins.fx), open_run(twins.ge)
    wrong = twins.names["relu_2"]
    plan = align_runs(*runs, AlignOptions(maps=(f"relu={wrong}",)))
    said = [pair for pair in plan.pairs if pair.by == "map"]
    assert {(p.reference.key.site, p.candidate.key.site) for p in said} == {("relu", wrong)}
    assert sum(pair.by == "graph" for pair in plan.pairs) > 50
    mapped = align_runs(*runs, AlignOptions(step_map=("0=0",)))
    assert {pair.by for pair in mapped.pairs} == {"graph"}


def test_a_text_that_names_the_fused_operator_itself_does_not_hide_its_members() -> None:
    nodes = [
        Node("Add_2", "Add", (("x", 0),), (("add", "0"),)),
        Node("Relu_1", "Relu", (("Add_2", 0),), (("relu", "0"),)),
        Node("Add_2Relu_1", "Fused", (("x", 0),), (None,)),
        Node("Cast_1", "Cast", (("x", 0),), (None,)),
    ]
    graph = OperatorGraph("ge", "g", "", nodes)
    assert graph.members("Add_2Relu_1") == ["Add_2", "Relu_1"]
    assert graph.members("Cast_1") == ["Cast_1"]
    assert graph.members("Relu_1") == ["Relu_1"]


def test_names_that_begin_alike_are_taken_apart_as_the_graph_has_them() -> None:
    nodes = [
        Node("Add_1", "Add", (("x", 0), ("y", 0))),
        Node("2Relu", "Relu", (("Add_1", 0),)),
        Node("Add_12", "Add", (("x", 0), ("y", 0))),
        Node("Relu", "Relu", (("Mul", 0),)),
        Node("Mul", "Mul", (("x", 0),)),
    ]
    graph = OperatorGraph("ge", "g", "", nodes)
    # The longest name first would give Add_12 and Relu, which have nothing to do with each other.
    assert graph.members("Add_12Relu") == ["Add_1", "2Relu"]
    assert graph.members("Add_12Mul") == ["Add_12", "Mul"]
    assert graph.members("Add_12") == ["Add_12"]
    assert graph.members("Sub") == []
    # A dead end of the longest name is left again.
    assert list(Vocabulary({"abab", "ab", "abc"}).ways("ababc")) == [["ab", "abc"]]


def test_a_name_with_very_many_readings_is_taken_apart_in_no_time() -> None:
    words = Vocabulary({"a" * n for n in range(1, 40)})
    assert len(list(words.ways("a" * 5000))) == 64
    assert list(words.ways("a" * 5000 + "b")) == []


def test_several_outputs_each_pair_with_their_own_fx_tensor(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    dump = GeDump(tmp_path / "ge")
    dump.operator("Split", "Split_1", [x], [x[:, :1], x[:, 1:]])
    names = tuple(f"split-aten.split.Tensor.OUTPUT.{i}" for i in range(2))
    dump.graph_text([GraphNode("x", "Data"), GraphNode("Split_1", "Split", (("x", 0),), names)])
    place = tmp_path / "fx" / "gm_20240130064200000001_dump" / "1"
    write_fx(place, "split", "aten.split.Tensor", [x, [1, 2], 1, "name"], [x[:, :1], x[:, 1:]])
    plan = planned(tmp_path / "fx", tmp_path / "ge")
    assert sites(plan) == {
        ("split", "input", "0", "Split_1", "input", "0"),
        ("split", "output", "0", "Split_1", "output", "0"),
        ("split", "output", "1", "Split_1", "output", "1"),
    }


def test_ranks_graphs_and_steps_are_kept_apart(tmp_path):
    for rank in (0, 1):
        for number in (1, 2):
            dump = GeDump(
                tmp_path / "ge", world=(2, rank), graph=f"graph_{number}_0", graph_id=number
            )
            for step in (0, 1):
                value = np.full((2,), 100 * rank + 10 * number + step, np.float32)
                dump.operator("Neg", "Neg_1", [value], [-value], step=step)
                place = (
                    tmp_path
                    / "fx"
                    / f"worldsize2_global_rank{rank}"
                    / f"graph_{number}"
                    / str(step)
                )
                write_fx(place, "neg", "aten.neg.default", [value], [-value])
            dump.graph_text(
                [
                    GraphNode("x", "Data"),
                    GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.default.OUTPUT.0",)),
                ],
                graph_id=number,
            )
    for text in (tmp_path / "ge").glob("*.txt"):
        text.rename(text.with_name(text.name.replace("_rank_0_pid_1_ts", "")))
    plan = planned(tmp_path / "fx", tmp_path / "ge")
    assert len(plan.pairs) == 2 * 2 * 2 * 2
    table = driftline.compare(tmp_path / "fx", tmp_path / "ge")
    assert table.verdict == "pass"
    assert {record.key.site for record in open_run(tmp_path / "ge").records} == {
        "graph_1_0.Neg_1",
        "graph_2_0.Neg_1",
    }


def test_a_lone_device_three_is_the_lone_rank_nought(tmp_path):
    x = np.ones(3, np.float32)
    dump = GeDump(tmp_path / "ge", device=3)
    dump.operator("Neg", "Neg_1", [x], [-x])
    dump.graph_text([GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",))])
    write_fx(tmp_path / "fx" / "gm_20240130064200000001_dump" / "1", "neg", "aten.neg", [x], [-x])
    plan = planned(tmp_path / "fx", tmp_path / "ge")
    assert len(plan.pairs) == 2
    assert plan.notes == ("rank 0 of the reference is rank 3 of the candidate",)


def test_axes_of_one_element_do_not_keep_tensors_apart(tmp_path):
    x = np.arange(3, dtype=np.float32)
    dump = GeDump(tmp_path / "ge")
    dump.operator("Neg", "Neg_1", [x], [-x[None]])
    dump.graph_text([GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",))])
    write_fx(tmp_path / "fx" / "gm_20240130064200000001_dump" / "1", "neg", "aten.neg", [x], [-x])
    assert driftline.compare(tmp_path / "fx", tmp_path / "ge").verdict == "pass"


def test_a_site_is_chosen_by_the_name_of_either_side(graph, inputs, tmp_path):
    twins: Twins = write_twins(graph, inputs, tmp_path)
    runs = open_run(twins.fx), open_run(twins.ge)
    for glob in ("relu_1", twins.names["relu_1"]):
        plan = align_runs(*runs, AlignOptions(sites=(glob,)))
        assert {pair.reference.key.site for pair in plan.pairs} == {"relu_1"}
    with pytest.raises(BadInput, match="no site matches 'nothing'"):
        align_runs(*runs, AlignOptions(sites=("nothing",)))


def test_converted_dumps_pair_as_the_dumps_do(graph, inputs, tmp_path):
    from driftline.cli.main import main

    twins = write_twins(graph, inputs, tmp_path, fused=[["mul", "add", "relu"]])
    for name, dump in (("fx_run", twins.fx), ("ge_run", twins.ge)):
        assert main(["convert", str(dump), "-o", str(tmp_path / name)]) == 0
    whole = sites(planned(twins.fx, twins.ge))
    assert sites(planned(tmp_path / "fx_run", tmp_path / "ge_run")) == whole
    assert sites(planned(twins.fx, tmp_path / "ge_run")) == whole


def test_large_inputs_of_one_shape_are_told_apart_too(tmp_path):
    dice = np.random.default_rng(1)
    x, y = (dice.standard_normal((600, 600)).astype(np.float32) for _ in range(2))
    dump = GeDump(tmp_path / "ge")
    dump.operator("Neg", "Neg_1", [x], [-x])
    dump.operator("Abs", "Abs_1", [y], [abs(y)])
    dump.operator("Sub", "RSub_1", [abs(y), -x], [-x - abs(y)])  # its inputs the other way round
    dump.graph_text(
        [
            GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",)),
            GraphNode("Abs_1", "Abs", (("y", 0),), ("abs_1-aten.abs.OUTPUT.0",)),
            GraphNode("RSub_1", "Sub", (("Abs_1", 0), ("Neg_1", 0)), ("sub-aten.sub.OUTPUT.0",)),
        ]
    )
    place = tmp_path / "fx" / "gm_20240130064200000001_dump" / "1"
    write_fx(place, "neg", "aten.neg", [x], [-x])
    write_fx(place, "abs_1", "aten.abs", [y], [abs(y)])
    write_fx(place, "sub", "aten.sub", [-x, abs(y)], [-x - abs(y)])
    found = sites(planned(tmp_path / "fx", tmp_path / "ge"))
    assert ("sub", "input", "0", "RSub_1", "input", "1") in found
    assert ("sub", "input", "1", "RSub_1", "input", "0") in found


@pytest.mark.parametrize(
    "graphs",
    [
        "text",
        [1],
        [{}],
        [{"kind": "ge", "name": "g", "prefix": "", "nodes": 3}],
        [{"kind": "ge", "name": "g", "prefix": "", "nodes": [{"name": 1, "class": 2}]}],
        [
            {
                "kind": "ge",
                "name": "g",
                "prefix": "",
                "nodes": [{"name": "a", "class": "b", "inputs": [["a", float("inf")]], "fx": []}],
            }
        ],
    ],
)
def test_a_damaged_topology_has_no_graphs(graphs) -> None:
    assert graphs_in({"graphs": graphs}) == []


def test_a_member_of_a_fusion_that_was_not_dumped_has_an_end_without_tensor() -> None:
    record = Record(TensorKey.of("b", "output", "0"), 0, "float32", (2,))
    dumped = Operator("b", "Relu", [], [record])

    class Edges:
        """A member `a`, which the dump lacks, makes one output of the fusion, `b` the other."""

        def inputs_of(self, members: list[str], shown: int) -> list[Input]:
            source = ("x", 0)
            return [Input("a", 0, source), Input("b", 0, source)]

        def outputs_of(self, members: list[str]) -> list[tuple[str, int]]:
            return [("a", 0), ("b", 0)]

    graph: Any = Edges()
    assert _ends(["a", "b"], ["b"], {"b": dumped}, graph, 2) == ([None, None], [None, record])
