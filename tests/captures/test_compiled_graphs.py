"""Graphs of torch.compile, executed node by node: which nodes, whose, what a program notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from capture_zoo import one_thread
from torch import nn

import driftline
from driftline.captures.torch.compile import call_origins
from driftline.captures.torch.compile import tap as compiling
from driftline.errors import BadInput
from driftline.graphs.sources.graph_files import Graph, read_graphs
from driftline.runs.sidecars.calls import GRAPHS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = x + self.blocks[1](x)
        return self.norm(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.gelu(self.inner(x)))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with one_thread():
        yield
    torch._dynamo.reset()


def made(kind: type[nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return kind(**options)


def given(rows: int = 5) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(rows, 8)


def graphs(path: Path) -> list[Graph]:
    return list(read_graphs(driftline.open_run(path).sheet(GRAPHS)))


def values(path: Path) -> dict[tuple[str, str, str, int], torch.Tensor]:
    return {
        (t.key.site, t.key.phase, t.key.slot, t.key.visit): torch.from_numpy(t.numpy().copy())
        for t in driftline.open_run(path).tensors()
    }


def never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("the program's backend was called")


def test_every_node_is_recorded_with_its_module_its_line_and_its_value(tmp_path: Path) -> None:
    model, x = made(), given()
    with driftline.capture(model, tmp_path / "fx", graph="fx"):
        torch.compile(model, backend=never)(x).square().sum().backward()
    forward, backward = graphs(tmp_path / "fx")
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert (forward.engine, forward.backend, forward.compile_id) == ("fx", "never", "0/0")
    kept = values(tmp_path / "fx")
    for graph in (forward, backward):
        for node in graph.nodes:
            where = (node.site, node.phase, "0")
            if node.of is not None:  # a part of what another node gives
                (whole,) = [one for one in graph.nodes if one.name == node.of[0]]
                where = (whole.site, whole.phase, str(node.of[1]))
            assert (*where, 0) in kept, node
    by_name = {node.name: node for node in forward.nodes}
    parameters = {(n.module, n.parameter): n for n in forward.nodes if n.parameter}
    assert parameters.keys() == {tuple(n.rsplit(".", 1)) for n, _ in model.named_parameters()}
    weight = parameters["blocks.0.up", "weight"]
    assert weight.target == "placeholder" and weight.site == f"blocks.0.up/{weight.name}"
    assert torch.equal(kept[weight.site, "forward", "0", 0], model.blocks[0].up.weight)
    transposed = kept["blocks.0.up/t", "forward", "0", 0]
    assert torch.equal(transposed, model.blocks[0].up.weight.t())
    assert by_name["silu_1"].site == "blocks.1/silu_1"
    assert by_name["addmm_3"].calls == ("blocks.1", "blocks.1.down")
    assert by_name["add"].module == "(root)"
    assert by_name["silu_1"].line.startswith(f"{__file__}:")
    assert by_name["silu_1"].line.endswith(" in forward")
    lines = {node.name: node for node in backward.nodes}
    assert lines["silu_backward"].site == "blocks.1/silu_backward"
    assert lines["silu_backward"].phase == "backward"
    # Values are those of the plain model.
    first, second = model.blocks
    inner = F.silu(first.up(x))
    assert torch.equal(kept["blocks.0/silu", "forward", "0", 0], inner)
    inner = F.silu(second.up(x + first.down(inner)))
    assert torch.equal(kept["blocks.1/silu_1", "forward", "0", 0], inner)
    gradient = model.blocks[0].up.weight.grad
    assert any(torch.equal(value, gradient) for key, value in kept.items() if key[1] == "backward")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "own"])
def test_any_backend_is_left_out_and_named(tmp_path: Path, backend: str) -> None:
    model, x = made(), given()
    said = never if backend == "own" else backend
    with torch.no_grad():
        plain = model(x)
        with driftline.capture(model, tmp_path / "fx", graph="fx"):
            seen = torch.compile(model, backend=said)(x)
    assert torch.equal(plain, seen)
    (graph,) = graphs(tmp_path / "fx")
    assert graph.kind == "inference"
    assert graph.backend == ("never" if backend == "own" else backend)
    (event,) = [e for e in driftline.open_run(tmp_path / "fx").events() if e["kind"] == "graphs"]
    assert "executed node by node by torch's own operators" in event["message"]
    assert f"({graph.backend}) compiled none" in event["message"]


def test_graphs_around_a_break_are_pieces_and_keep_their_nodes_apart(tmp_path: Path) -> None:
    model = made(breaks=True)
    with driftline.capture(model, tmp_path / "fx", graph="fx"), torch.no_grad():
        torch.compile(model, backend="eager")(given())
    found = graphs(tmp_path / "fx")
    assert [graph.compile_id for graph in found] == ["0/0", "1/0"]
    sites = [node.site for graph in found for node in graph.nodes if node.target != "placeholder"]
    assert len(sites) == len(set(sites))
    assert {"blocks.0/silu", "blocks.1/silu", "(root)/add", "(root)/add@1"} <= set(sites)
    kept = values(tmp_path / "fx")
    assert ("(root)/add@1", "forward", "0", 0) in kept


def test_a_recompilation_for_other_shapes_is_the_same_piece(tmp_path: Path) -> None:
    model = made()
    with driftline.capture(model, tmp_path / "fx", graph="fx"), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        for rows in (5, 6, 7):
            compiled(given(rows))
    assert [graph.compile_id for graph in graphs(tmp_path / "fx")] == ["0/0", "0/1"]
    shapes = {
        (t.key.step, t.key.visit): t.shape
        for t in driftline.open_run(tmp_path / "fx").tensors()
        if t.key.site == "blocks.1/silu_1"
    }
    assert shapes == {(0, 0): (5, 16), (1, 0): (6, 16), (2, 0): (7, 16)}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_that_share_a_compiled_graph_keep_their_own_names(tmp_path: Path) -> None:
    model, x = made(Stack), given()
    with driftline.capture(model, tmp_path / "modules"):
        model(x).square().sum().backward()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with driftline.capture(model, tmp_path / "fx", graph="fx"):
        model(x).square().sum().backward()
    found = graphs(tmp_path / "fx")
    assert {graph.compile_id for graph in found} == {"0/0"}  # compiled once
    kept = values(tmp_path / "fx")
    for number, block in enumerate(model.blocks):
        assert (f"blocks.{number}/silu", "forward", "0", 0) in kept
        gradients = [
            value
            for key, value in kept.items()
            if key[0].startswith(f"blocks.{number}.up/") and key[1] == "backward"
        ]
        assert any(torch.equal(2 * value, block.up.weight.grad) for value in gradients)
    plan = driftline.align(tmp_path / "modules", tmp_path / "fx")
    assert not plan.missing
    assert driftline.compare(tmp_path / "modules", tmp_path / "fx").verdict == "pass"


@pytest.mark.parametrize("fallback", [False, True])
def test_dropouts_draw_what_they_draw_without_us(tmp_path: Path, fallback: bool) -> None:
    from torch._inductor import config

    def trained(graph: Any) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
        if graph is None:
            model(given()).square().sum().backward()
        else:
            with driftline.capture(model, tmp_path / "fx", graph=graph):
                torch.compile(model)(given()).square().sum().backward()
        return torch.get_rng_state(), model[0].weight.grad

    with config.patch(fallback_random=fallback):  # torch then keeps idle random nodes in graphs
        plain, seen = trained(None), trained("fx")
    assert torch.equal(plain[0], seen[0]) and torch.equal(plain[1], seen[1])


@pytest.mark.parametrize("kind", [Net, Twice])
def test_nodes_are_set_against_modules_and_operators_of_a_plain_run(
    tmp_path: Path, kind: type[nn.Module]
) -> None:
    model, x = made(kind), given()
    for name, level in (("modules", "modules"), ("ops", "ops")):
        with driftline.capture(model, tmp_path / name, levels=level):
            model(x).square().sum().backward()
    with driftline.capture(model, tmp_path / "fx", graph="fx"):
        torch.compile(model, backend="eager")(x).square().sum().backward()
    plan = driftline.align(tmp_path / "modules", tmp_path / "fx")
    assert not [record for record in plan.missing if record.key.port == "output"]
    table = driftline.compare(tmp_path / "modules", tmp_path / "fx")
    assert table.verdict == "pass" and all(
        row.metrics["max_abs_error"] == 0 for row in table.rows if row.compared
    )
    plan = driftline.align(tmp_path / "ops", tmp_path / "fx")
    # Sums of gradients have no module of their own; the loss is not compiled.
    alone = [r.key for r in plan.missing if r.key.port == "output" and "aten.add" not in r.key.site]
    assert all(key.site.startswith(("(backward)", "(program)")) for key in alone), alone
    phases = {pair.reference.key.phase for pair in plan.pairs}
    assert phases == {"forward", "backward"}
    assert driftline.compare(tmp_path / "ops", tmp_path / "fx").verdict == "pass"


def test_operators_of_modules_that_were_not_compiled_are_not_covered(tmp_path: Path) -> None:
    model, x = made(Net), given()
    with driftline.capture(model, tmp_path / "ops", levels="ops"):
        model(x).square().sum().backward()
    model.blocks[0].compile(backend="eager")
    with driftline.capture(model, tmp_path / "fx", graph="fx"):
        model(x).square().sum().backward()
    table = driftline.compare(tmp_path / "ops", tmp_path / "fx")
    # The loss is around the model, the other block is a part of it.
    assert table.verdict == "incomplete", table.finding
    assert "calls of leaf modules of the reference are covered" in table.finding


def test_parameters_are_set_against_those_of_a_plain_run(tmp_path: Path) -> None:
    model, x = made(), given()
    with driftline.capture(model, tmp_path / "plain", levels="modules,params"), torch.no_grad():
        model(x)
    with torch.no_grad():
        model.blocks[1].up.bias[3] += 1
    with driftline.capture(model, tmp_path / "fx", graph="fx"), torch.no_grad():
        torch.compile(model, backend="eager")(x)
    table = driftline.compare(tmp_path / "plain", tmp_path / "fx")
    rows = [row for row in table.rows if row.port == "param"]
    assert len(rows) == 10 and all(row.compared for row in rows)
    assert [(row.site, row.slot) for row in rows if row.status == "fail"] == [
        ("blocks.1.up", "bias")
    ]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(
            x.sum() > 0,
            lambda x: torch.sin(self.left(x)) + 1,
            lambda x: torch.cos(self.right(x)) - 1,
            (x,),
        )

        def going(n: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return n < 3

        def body(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n + 1, torch.tanh(x) * 2

        _, x = torch._higher_order_ops.while_loop(going, body, (torch.tensor(0), x))
        return x * 2


def test_bodies_of_control_flow_are_recorded_as_often_as_they_run(tmp_path: Path) -> None:
    model, x = made(Branches), torch.ones(3, 8)
    for name in ("one", "other"):
        torch._dynamo.reset()
        with driftline.capture(model, tmp_path / name, graph="fx"), torch.no_grad():
            assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    kept = values(tmp_path / "one")
    inner = torch.sin(model.left(x))
    assert torch.equal(kept["left/true_graph_0.addmm", "forward", "0", 0], model.left(x))
    assert torch.equal(kept["(root)/true_graph_0.sin", "forward", "0", 0], inner)
    assert torch.equal(kept["(root)/cond", "forward", "0", 0], inner + 1)
    assert not [key for key in kept if "false_graph_0." in key[0]]  # it did not run
    turns = [key[3] for key in kept if key[0] == "(root)/while_loop_body_graph_0.tanh"]
    assert turns == [0, 1, 2]
    plan = driftline.align(tmp_path / "one", tmp_path / "other")
    assert not plan.missing and not plan.extra
    assert driftline.compare(tmp_path / "one", tmp_path / "other").verdict == "pass"


def test_a_model_that_fails_to_compile_gives_its_own_error_and_no_graph(tmp_path: Path) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such tile")

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    errors: list[BaseException] = []
    for graph in (None, "inductor"):
        torch._dynamo.reset()
        with (
            pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught,
            driftline.capture(model, tmp_path / str(graph), graph=graph),
        ):
            torch.compile(model, backend=broken)(torch.ones(2, 4))
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1]) and type(errors[0]) is type(errors[1])
    run = driftline.open_run(tmp_path / "inductor")
    (event,) = [e for e in run.events() if e["kind"] == "compile-failed"]
    assert "broken could not compile a graph, which is not recorded" in event["message"]
    assert "no such tile" in event["message"]
    assert GRAPHS not in run.sheets()


def test_a_graph_that_we_cannot_execute_is_left_to_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from driftline.captures.torch.compile import tap

    def refused(*args: Any) -> Any:
        raise RuntimeError("a thing we do not know")

    monkeypatch.setattr(tap, "compile_by_nodes", refused)
    model, x = made(), given()
    with driftline.capture(model, tmp_path / "fx", graph="fx"), torch.no_grad():
        seen = torch.compile(model, backend="eager")(x)
        assert torch.equal(seen, model(x))
    (event,) = [
        e for e in driftline.open_run(tmp_path / "fx").events() if e["kind"] == "graph-unseen"
    ]
    assert "a thing we do not know" in event["message"]
    assert "own backend compiled it" in event["message"]


def test_nothing_is_left_behind_when_a_capture_is_over(tmp_path: Path) -> None:
    from torch._dynamo.output_graph import OutputGraph
    from torch.fx.experimental import proxy_tensor

    calls: list[int] = []

    def own(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    before = OutputGraph.call_user_compiler, proxy_tensor.proxy_call
    model, x = made(), given()
    compiled = torch.compile(model, backend=own)
    with torch.no_grad():
        compiled(x)
        with driftline.capture(model, tmp_path / "fx", graph="fx"):
            compiled(x)
        assert calls == [1]
        compiled(x)
    assert calls == [1, 1]  # compiled anew, by the program's backend
    assert (OutputGraph.call_user_compiler, proxy_tensor.proxy_call) == before
    assert len(graphs(tmp_path / "fx")) == 1
    assert not compiling._listeners and not call_origins._users


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "fxx"}, "there is no graph 'fxx'"),
        ({"graph": "fx", "levels": "ops"}, "'ops'"),
        ({"graph": "fx", "fusion": False}, "only inductor fuses"),
        ({"fusion": False}, "only inductor fuses"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run_is_begun(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        driftline.capture(made(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_program_that_compiles_nothing_is_told_so(tmp_path: Path) -> None:
    model = made()
    with driftline.capture(model, tmp_path / "run", graph="inductor"), torch.no_grad():
        model(given())
    (event,) = [e for e in driftline.open_run(tmp_path / "run").events() if e["kind"] == "no-graph"]
    assert event["message"] == "--graph inductor: the program compiled no graph"


def test_damaged_lists_of_graphs_are_read_as_far_as_they_go() -> None:
    whole = Graph(0, "0/0", "forward", "fx").to_line()
    text = whole + "{\n" + '{"graph": 1}\n' + "[]\n" + "null\n" + whole
    assert [graph.number for graph in read_graphs(text)] == [0, 0]
