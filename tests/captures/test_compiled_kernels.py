"""Kernels of inductor: what they compute is recorded, set against nodes, and not changed by it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from capture_zoo import one_thread
from torch import nn

import driftline
from driftline.alignment.align import align_runs
from driftline.alignment.plan_file import write_plan
from driftline.graphs.sources.graph_files import Graph, read_graphs
from driftline.runs.sidecars.calls import GRAPHS
from driftline.runs.views import only

decomposition: Any = importlib.import_module("torch._inductor.decomposition")
metrics: Any = importlib.import_module("torch._inductor.metrics")
SIGMOID = torch.ops.aten.sigmoid.default


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), Gate(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(self.up(x)))


@contextmanager
def wrong_decomposition() -> Iterator[None]:
    """Inductor takes sigmoid apart into something that it is not."""
    assert SIGMOID not in decomposition.decompositions
    decomposition.decompositions[SIGMOID] = lambda x: torch.tanh(x)
    decomposition.fast_random_decomps.cache_clear()  # holds a copy of the table
    try:
        yield
    finally:
        del decomposition.decompositions[SIGMOID]
        decomposition.fast_random_decomps.cache_clear()


class Desk(NamedTuple):
    """Runs of one model: plain, by nodes, by kernels; and of a compiler that is wrong."""

    path: Path
    plain: torch.Tensor
    seen: torch.Tensor
    kernels_plain: int
    kernels_seen: int


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(1)
    return Net().eval(), torch.randn(3, 5, 8)


def compiled(path: Path, graph: Any, **options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    metrics.reset()
    model, x = made()
    with torch.no_grad(), driftline.capture(model, path, graph=graph, **options):
        return torch.compile(model)(x)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    path = tmp_path_factory.mktemp("desk")
    with one_thread(), torch.no_grad():
        torch._dynamo.reset()
        model, x = made()
        for level in ("modules", "ops"):
            with driftline.capture(model, path / level, levels=level):
                model(x)
        metrics.reset()
        plain = torch.compile(model)(x)
        kernels_plain = metrics.generated_kernel_count
        seen = compiled(path / "inductor", "inductor")
        kernels_seen = metrics.generated_kernel_count
        compiled(path / "fx", "fx")
        with wrong_decomposition():
            compiled(path / "wrong", "inductor")
            compiled(path / "wrong_apart", "inductor", fusion=False)
        torch._dynamo.reset()
    yield Desk(path, plain, seen, kernels_plain, kernels_seen)


def graphs(path: Path) -> list[Graph]:
    return list(read_graphs(driftline.open_run(path).sheet(GRAPHS)))


def starts_at(reference: Path, candidate: Path) -> tuple[str, str]:
    table = driftline.compare(reference, candidate)
    assert table.verdict == "fail"
    return table.first_site, table.finding


def test_recording_changes_neither_kernels_nor_bits(desk: Desk) -> None:
    assert desk.kernels_plain == desk.kernels_seen > 0
    assert torch.equal(desk.plain, desk.seen)
    (graph,) = graphs(desk.path / "inductor")
    assert graph.engine == graph.backend == "inductor" and graph.kind == "inference"
    assert [kernel.name for kernel in graph.kernels] == [
        "extern_kernels.addmm",
        "cpp_fused_mul_sigmoid_view_0",
        "extern_kernels.addmm",
    ]
    (fused,) = graph.kernels[1].kept
    assert fused.node == "mul" and {"sigmoid", "mul"} <= set(fused.nodes)
    run = driftline.open_run(desk.path / "inductor")
    assert {r.key.site: r.class_name for r in run.records if "/" in r.key.site} == {
        "(root)/arg2_1": "placeholder",
        "up/addmm": "extern_kernels.addmm",
        "gate.act/sigmoid": "aten.sigmoid.default inside cpp_fused_mul_sigmoid_view_0",
        "gate/mul": "cpp_fused_mul_sigmoid_view_0",
        "down/addmm_1": "extern_kernels.addmm",
    }


def test_a_fused_kernel_is_set_against_the_last_node_of_the_fusion(desk: Desk) -> None:
    plan = driftline.align(desk.path / "fx", desk.path / "inductor")
    pairs = {p.reference.key.site: p for p in plan.pairs if p.by == "graph"}
    views = {"up/view_1", "down/view_2", "down/view_3"}  # of what those give
    kernels = {"(root)/arg2_1", "up/addmm", "gate/mul", "down/addmm_1"}
    assert pairs.keys() - views == {*kernels, "gate.act/sigmoid"}
    assert all(pair.confidence == 1 for pair in pairs.values())
    assert pairs["gate.act/sigmoid"].fused == (
        "cpp_fused_mul_sigmoid_view_0, whose nodes were computed one by one"
    )
    assert pairs["gate/mul"].fused == "gate.act: sigmoid; gate: mul"
    assert pairs["up/addmm"].fused == ""
    assert pairs["gate/mul"].line.startswith(f"{__file__}:")
    assert any("only those are paired" in note for note in plan.notes)
    assert any("node by node" in note for note in plan.notes)
    for reference in ("fx", "modules", "ops"):
        table = driftline.compare(desk.path / reference, desk.path / "inductor")
        assert table.verdict == "pass", table.finding
    plan = driftline.align(desk.path / "modules", desk.path / "inductor")
    outputs = {p.reference.key.site for p in plan.pairs if p.reference.key.port == "output"}
    assert outputs == {"up", "gate.act", "gate", "down", "(root)"}
    assert any("1 values of nodes inside the candidate's fusions" in note for note in plan.notes)


def test_a_wrong_decomposition_is_named_at_its_node(desk: Desk) -> None:
    path = desk.path
    site, finding = starts_at(path / "fx", path / "wrong_apart")
    assert site == "gate.act/sigmoid" and "aten.sigmoid.default" in finding
    assert f"computed at {__file__}:" in finding and "fusion" not in finding
    assert "wrong for its own inputs: aten.sigmoid.default of 'gate.act'" in finding
    site, _ = starts_at(path / "modules", path / "wrong_apart")
    assert site == "gate.act"
    site, _ = starts_at(path / "ops", path / "wrong_apart")
    assert site == "gate.act/aten.sigmoid"


@pytest.mark.parametrize(
    ("reference", "site"),
    [("fx", "gate.act/sigmoid"), ("modules", "gate.act"), ("ops", "gate.act/aten.sigmoid")],
)
def test_inside_a_fusion_it_is_named_at_its_node_too(desk: Desk, reference: str, site: str) -> None:
    table = driftline.compare(desk.path / reference, desk.path / "wrong")
    assert table.verdict == "fail" and table.first_site == site
    assert "inside cpp_fused_" in table.finding and "computed one by one" in table.finding
    assert "wrong for its own inputs: aten.sigmoid.default of 'gate.act' at" in table.finding
    assert "from torch's own operator for the same inputs" in table.finding
    first = next(row for row in table.rows if row.status == "fail")
    assert first.culprit and not [
        row for row in table.rows if row.culprit and row.order < first.order
    ]
    clean = driftline.compare(desk.path / reference, desk.path / "inductor")
    assert clean.verdict == "pass" and not any(row.culprit for row in clean.rows)


def test_what_was_not_computed_beside_a_kernel_is_counted_as_inside_its_fusion(desk: Desk) -> None:
    run = driftline.open_run(desk.path / "inductor")
    older = only(run, lambda record: " inside " not in record.class_name)
    plan = align_runs(driftline.open_run(desk.path / "fx"), older)
    (alone,) = [r for r in plan.missing if r.key.site == "gate.act/sigmoid"]
    assert plan.reasons["reference", alone.key] == (
        "inside a fusion: cpp_fused_mul_sigmoid_view_0 computes it on the way to mul"
    )
    assert plan.inside["reference", alone.key].site == "gate/mul"
    assert str(plan).endswith("1 of these inside a fusion")


def test_every_row_of_a_node_has_its_line_and_a_saved_plan_keeps_it(desk: Desk) -> None:
    path = desk.path
    table = driftline.compare(path / "fx", path / "wrong")
    lines = {row.site: row.line for row in table.rows if "/" in row.site}
    inputs = {site for site in lines if "/arg" in site}
    assert {site for site, line in lines.items() if not line} == inputs
    assert lines["gate.act/sigmoid"].startswith(f"{__file__}:")  # lone, inside the fusion
    table.write(path / "table")
    again = driftline.open_table(path / "table")
    assert [(row.line, row.fused) for row in again.rows] == [
        (row.line, row.fused) for row in table.rows
    ]
    plan = path / "plan.toml"
    write_plan(driftline.align(path / "fx", path / "wrong"), plan)
    planned = driftline.compare(path / "fx", path / "wrong", plan=plan)
    assert planned.finding == table.finding


def test_without_fusion_every_node_has_a_kernel(desk: Desk) -> None:
    (graph,) = graphs(desk.path / "wrong_apart")
    kept = {one.node for kernel in graph.kernels for one in kernel.kept}
    assert {"addmm", "tanh", "mul", "addmm_1"} <= kept
    (event,) = [
        e for e in driftline.open_run(desk.path / "wrong_apart").events() if e["kind"] == "graphs"
    ]
    assert "not what the program runs otherwise" in event["message"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.cond(
            x.sum() > 0,
            lambda x: torch.sin(self.left(x)) + 1,
            lambda x: torch.cos(self.right(x)) - 1,
            (x,),
        )


@pytest.mark.slow
def test_kernels_inside_of_control_flow_are_set_against_their_nodes(tmp_path: Path) -> None:
    with one_thread(), torch.no_grad():
        torch._dynamo.reset()
        torch.manual_seed(1)
        model, x = Branches(), torch.randn(3, 8)
        plain = [torch.compile(model)(one) for one in (x, -x)]
        for graph in ("fx", "inductor"):
            torch._dynamo.reset()
            with driftline.capture(model, tmp_path / graph, graph=graph, steps="*"):
                call = torch.compile(model)
                seen = [call(one) for one in (x, -x)]
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    plan = driftline.align(tmp_path / "fx", tmp_path / "inductor")
    pairs = {(p.reference.key.step, p.reference.key.site): p for p in plan.pairs}
    branch = {step: "true" if (x if step == 0 else -x).sum() > 0 else "false" for step in (0, 1)}
    for step, side in ((0, branch[0]), (1, branch[1])):
        module, last = ("left", "add") if side == "true" else ("right", "sub")
        assert (step, f"{module}/{side}_graph_0.addmm") in pairs
        assert "(root): " in pairs[step, f"(root)/{side}_graph_0.{last}"].fused
        assert (step, "(root)/cond") in pairs
    assert driftline.compare(tmp_path / "fx", tmp_path / "inductor").verdict == "pass"


class Pile(nn.Module):
    """Its gradients fill several buckets, and one module's own code lies on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x))
        return x


@pytest.mark.slow
def test_the_parts_of_a_distributed_model_are_one_piece(tmp_path: Path) -> None:
    distributed = importlib.import_module("torch.distributed")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with one_thread():
            torch.manual_seed(1)
            model, x = Pile(), torch.randn(4, 512)
            with driftline.capture(model, tmp_path / "ops", levels="ops"):
                model(x).sum().backward()
            for graph in ("fx", "inductor"):
                torch._dynamo.reset()
                with driftline.capture(model, tmp_path / graph, graph=graph):
                    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
                    torch.compile(wrapped)(x).sum().backward()
            torch._dynamo.reset()
    finally:
        distributed.destroy_process_group()
    found = graphs(tmp_path / "inductor")
    assert sum(graph.kind == "forward" for graph in found) > 1
    assert {graph.base for graph in found} == {"(root)"}
    assert {graph.backend for graph in graphs(tmp_path / "fx")} == {"inductor"}
    for reference in ("ops", "fx"):
        plan = driftline.align(tmp_path / reference, tmp_path / "inductor")
        pairs = {p.reference.key.site: p.candidate.key.site for p in plan.pairs}
        adds = {"(root)/aten.add"} if reference == "ops" else {f"(root)/add{n}" for n in ("", "_1")}
        assert adds <= pairs.keys(), pairs
        table = driftline.compare(tmp_path / reference, tmp_path / "inductor")
        assert table.verdict == "pass", table.finding
        assert {row.key.phase for row in table.rows if row.compared} == {"forward", "backward"}


def test_settings_of_inductor_are_put_back(tmp_path: Path) -> None:
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler

    def state() -> tuple[Any, ...]:
        return (
            config.fx_graph_cache,
            config.max_fusion_size,
            functorch.enable_autograd_cache,
            Scheduler.free_buffers,
            Scheduler.enter_context,
            GraphLowering.codegen,
            GraphLowering.run_node,
        )

    before = state()
    inside: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        inside.append(config.fx_graph_cache)
        return graph.forward

    model, x = made()
    torch._dynamo.reset()
    with driftline.capture(model, tmp_path / "run", graph="inductor", fusion=False):
        torch.compile(model, backend=backend)(x)
    assert inside == [False]
    assert state() == before
    torch._dynamo.reset()


@pytest.mark.slow
def test_forward_and_backward_of_training_agree_with_nodes_and_operators(tmp_path: Path) -> None:
    with one_thread():
        model, x = made()
        model.train()
        with driftline.capture(model, tmp_path / "ops", levels="ops"):
            model(x).square().sum().backward()
        for graph in ("fx", "inductor"):
            torch._dynamo.reset()
            model.zero_grad()
            with driftline.capture(model, tmp_path / graph, graph=graph):
                torch.compile(model)(x).square().sum().backward()
        torch._dynamo.reset()
    assert [graph.kind for graph in graphs(tmp_path / "inductor")] == ["forward", "backward"]
    for reference in ("fx", "ops"):
        plan = driftline.align(tmp_path / reference, tmp_path / "inductor")
        backward = [p for p in plan.pairs if p.reference.key.phase == "backward"]
        assert len(backward) >= 4
        assert driftline.compare(tmp_path / reference, tmp_path / "inductor").verdict == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_of_eight_layers_agrees_with_its_kernels(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    ids = torch.randint(0, 256, (2, 16))
    with one_thread(), torch.no_grad():
        with driftline.capture(model, tmp_path / "modules"):
            model(ids)
        torch._dynamo.reset()
        metrics.reset()
        plain = torch.compile(model)(ids).logits
        kernels = metrics.generated_kernel_count
        torch._dynamo.reset()
        metrics.reset()
        with driftline.capture(model, tmp_path / "inductor", graph="inductor"):
            seen = torch.compile(model)(ids).logits
        assert metrics.generated_kernel_count == kernels > 50
        assert torch.equal(plain, seen)
        with driftline.capture(model, tmp_path / "fx", graph="fx"):
            torch.compile(model)(ids)
        torch._dynamo.reset()
    for reference in ("modules", "fx"):
        table = driftline.compare(tmp_path / reference, tmp_path / "inductor")
        assert table.verdict == "pass", table.finding
        assert not [row for row in table.rows if row.status == "fail"]
        assert sum(row.compared for row in table.rows) > 130


@pytest.mark.slow
def test_a_gpt2_in_training_with_dropouts_agrees_forward_and_backward(tmp_path: Path) -> None:
    from torch._inductor import config

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
    ids = torch.randint(0, 64, (2, 8))

    def trained(call: Any) -> None:
        torch.manual_seed(7)
        model.zero_grad()
        call(input_ids=ids, labels=ids).loss.backward()

    with one_thread(), config.patch(fallback_random=True):
        with driftline.capture(model, tmp_path / "ops", levels="ops"):
            trained(model)
        for graph in ("fx", "inductor"):
            torch._dynamo.reset()
            with driftline.capture(model, tmp_path / graph, graph=graph):
                trained(torch.compile(model))
        torch._dynamo.reset()
    for reference, candidate in (("ops", "fx"), ("ops", "inductor"), ("fx", "inductor")):
        plan = driftline.align(tmp_path / reference, tmp_path / candidate)
        assert sum(pair.reference.key.phase == "backward" for pair in plan.pairs) > 30
        table = driftline.compare(tmp_path / reference, tmp_path / candidate)
        assert table.verdict == "pass", table.finding
