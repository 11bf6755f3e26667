"""torch models against what ONNX Runtime makes of their exports: aligned, clean, faults named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_zoo as zoo
import pytest
import torch
from onnx_runs import Exported, aligned_leaves, clean, first_of, run_of

import driftline
from driftline.alignment.plan_file import write_plan
from driftline.captures.onnxruntime.graph import Graph
from driftline.captures.onnxruntime.scopes import Scope
from driftline.captures.onnxruntime.torch_calls import Call, count, weighted_nodes
from driftline.graphs.sources.exported import exported_graph
from driftline.runs.memory import MemorySink

LEVELS = ("none", "basic", "extended", "all")


@pytest.mark.parametrize("level", LEVELS)
def test_a_llama_aligns_with_its_export_and_nothing_is_wrong(llama: Exported, level: Any) -> None:
    candidate = run_of(llama.path, llama.run, optimize=level)
    plan = driftline.align(llama.run, candidate)
    assert aligned_leaves(llama.model, plan) >= 0.9
    clean(driftline.compare(llama.run, candidate, plan=plan))
    outputs = {
        pair.reference.key.site for pair in plan.pairs if pair.reference.key.port == "output"
    }
    for layer in ("0", "1"):
        for part in (
            "self_attn.q_proj",
            "self_attn.o_proj",
            "mlp",
            "mlp.act_fn",
            "input_layernorm",
        ):
            assert f"model.layers.{layer}.{part}" in outputs
    assert {"(root)", "lm_head", "model.norm"} <= outputs
    # The other way round: the same pairs.
    back = driftline.align(candidate, llama.run)
    assert {(p.candidate.key, p.reference.key) for p in back.pairs} == {
        (p.reference.key, p.candidate.key) for p in plan.pairs
    }


@pytest.mark.slow
def test_pads_of_a_masked_llama_are_no_fault_and_a_flipped_weight_is_one(tmp_path: Path) -> None:
    model, _ = zoo.small_llama()
    given = torch.randint(0, 128, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    given[1][1, :3] = 0
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink):
        model(*given)
    path = tmp_path / "m.onnx"
    torch.onnx.export(model, given, str(path), dynamo=True, external_data=False, verbose=False)
    candidate = run_of(path, sink.run())
    table = driftline.compare(sink.run(), candidate)
    clean(table)
    assert any("only at positions that the captured attention_mask" in note for note in table.notes)
    assert driftline.compare(sink.run(), candidate, masks=["none"]).verdict == "fail"
    changed = zoo.reweighted(path, tmp_path / "c.onnx", "linear_12", lambda w: -w)
    table = driftline.compare(sink.run(), run_of(changed, sink.run()))
    assert table.first_site == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("level", LEVELS)
def test_a_cnn_aligns_with_its_export_and_nothing_is_wrong(cnn: Exported, level: Any) -> None:
    candidate = run_of(cnn.path, cnn.run, optimize=level)
    plan = driftline.align(cnn.run, candidate)
    table = driftline.compare(cnn.run, candidate, plan=plan)
    clean(table)
    assert aligned_leaves(cnn.model, plan) == 1.0
    lone = {record.key for record in plan.missing}
    assert lone == {key for _, key in plan.inside}  # all that is missing lies inside a fusion
    cover = table.coverage
    assert cover.inside_fusion == cover.missing == len(lone) > 0
    assert "inside a fusion that is compared" in str(cover)
    assert f"{len(lone)} more inside a fusion" in table.finding
    assert any(note.startswith("19 leaf modules are compared: ") for note in table.notes)
    outputs = {
        (p.reference.key.site, p.reference.key.visit)
        for p in plan.pairs
        if p.reference.key.port == "output"
    }
    assert {
        ("relu", 0),
        ("stages.0.relu", 0),
        ("stages.0.relu", 1),
        ("stages.1.relu", 1),
        ("fc", 0),
    } <= outputs


def test_values_in_blocks_of_channels_are_recorded_in_the_usual_order(cnn: Exported) -> None:
    plain = run_of(cnn.path, cnn.run, optimize="extended")
    blocked = run_of(cnn.path, cnn.run, optimize="all")
    classes = {record.class_name for record in blocked.records}
    if "ReorderOutput" not in classes:
        pytest.skip("this ONNX Runtime has no blocked layout on this machine")
    for site, shape in (("stages.0.relu", (2, 32, 8, 8)), ("stages.1.relu", (2, 40, 4, 4))):
        one, two = plain.get(site), blocked.get(site)
        assert one.shape == two.shape == shape
        assert np.allclose(one.numpy(), two.numpy(), atol=1e-5)


@pytest.mark.parametrize("level", ["none", "all"])
def test_the_older_exporter_s_names_align_too(cnn: Exported, level: Any, tmp_path: Path) -> None:
    path = zoo.export(cnn.model, cnn.given, tmp_path / "ts.onnx", dynamo=False)
    candidate = run_of(path, cnn.run, optimize=level)
    plan = driftline.align(cnn.run, candidate)
    clean(driftline.compare(cnn.run, candidate, plan=plan))
    outputs = {
        (p.reference.key.site, p.reference.key.visit)
        for p in plan.pairs
        if p.reference.key.port == "output"
    }
    assert {("stages.0.relu", 0), ("stages.0.relu", 1), ("stages.0", 0), ("fc", 0)} <= outputs
    assert aligned_leaves(cnn.model, plan) == 1.0


@pytest.mark.parametrize("level", ["none", "all"])
def test_exports_without_any_names_align_by_structure(
    llama: Exported, cnn: Exported, level: Any, tmp_path: Path
) -> None:
    for made, least in ((llama, 0.85), (cnn, 0.85 if level == "none" else 0.65)):
        path = zoo.anonymous(made.path, tmp_path / "anonymous.onnx")
        candidate = run_of(path, made.run, optimize=level)
        plan = driftline.align(made.run, candidate)
        assert any(pair.by == "structure" for pair in plan.pairs)
        share = aligned_leaves(made.model, plan)
        assert share >= least
        table = driftline.compare(made.run, candidate, plan=plan)
        if share >= 0.85:
            clean(table)
        else:
            # Norms that are folded away in a file without names: too much was not looked at.
            assert not [row for row in table.rows if row.status in ("fail", "incomparable")]
            assert table.verdict == "incomplete"
            assert "of the 21 calls of leaf modules of the reference" in table.finding


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize(
    ("site", "value", "change"),
    [
        ("model.layers.1.mlp.up_proj", "linear_12", lambda w: -w),
        ("model.layers.0.self_attn.k_proj", "linear_1", lambda w: w.T),
        ("model.layers.0.self_attn.v_proj", "linear_2", lambda w: w[:, ::-1]),
        (
            "model.layers.1.input_layernorm",
            "model.layers.1.input_layernorm.weight",
            lambda w: w * 1.01,
        ),
        ("model.embed_tokens", "model.embed_tokens.weight", lambda w: w[::-1]),
    ],
)
def test_a_weight_changed_in_the_file_is_named(
    llama: Exported, site: str, value: str, change: Any, level: Any, tmp_path: Path
) -> None:
    path = zoo.reweighted(llama.path, tmp_path / "changed.onnx", value, change)
    table = driftline.compare(llama.run, run_of(path, llama.run, optimize=level))
    assert table.verdict == "fail"
    assert first_of(table).site == site


@pytest.mark.parametrize(("level", "site"), [("none", "bn2"), ("all", "relu")])
def test_a_convolution_s_changed_weight_is_named_with_what_it_was_folded_into(
    cnn: Exported, level: Any, site: str, tmp_path: Path
) -> None:
    path = zoo.reweighted(cnn.path, tmp_path / "c.onnx", "stages.0.conv2.weight", lambda w: -w)
    candidate = run_of(path, cnn.run, optimize=level)
    table = driftline.compare(cnn.run, candidate)
    assert first_of(table).site == f"stages.0.{site}"
    assert table.first is not None
    both = "stages.0.conv2: Conv2d; stages.0.bn2: BatchNorm2d"
    assert table.first.fused.startswith(both)
    assert f"inside the fusion of {both}" in table.finding
    write_plan(driftline.align(cnn.run, candidate), tmp_path / "plan.toml")
    again = driftline.compare(cnn.run, candidate, plan=tmp_path / "plan.toml")
    assert again.finding == table.finding  # a saved plan knows as much
    assert (again.coverage, again.notes) == (table.coverage, table.notes)
    said = driftline.diagnose(cnn.run, candidate).sentences[0]
    assert f"inside the fusion of {both}" in said
    folded = [row for row in table.rows if row.key.site == "stages.0.conv2" and row.inside_fusion]
    assert [(row.status, row.by, row.candidate_site) for row in folded] == [
        ("missing", "fusion", f"stages.0.{site}")
    ]


class Cells(torch.nn.Module):
    """What mobile networks are made of: depthwise, squeeze and excite, norms after and before."""

    def __init__(self) -> None:
        super().__init__()
        n = torch.nn
        self.expand = n.Sequential(n.Conv2d(3, 32, 1, bias=False), n.BatchNorm2d(32), n.Hardswish())
        self.depth = n.Sequential(
            n.Conv2d(32, 32, 3, 2, 1, groups=32), n.BatchNorm2d(32), n.ReLU6()
        )
        self.squeeze = n.Sequential(
            n.AdaptiveAvgPool2d(1), n.Conv2d(32, 8, 1), n.ReLU(), n.Conv2d(8, 32, 1), n.Sigmoid()
        )
        self.before = n.BatchNorm2d(64)
        self.act = n.ReLU()
        self.project = n.Conv2d(64, 16, 1)
        self.last = n.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.expand(x))
        y = torch.cat([y * self.squeeze(y), y], 1)
        return self.last(self.project(self.act(self.before(y)))).mean((2, 3))


@pytest.mark.parametrize("dynamo", [True, False])
def test_every_leaf_of_a_mobile_network_is_compared_by_itself_or_inside_a_fusion(
    dynamo: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Cells().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.weight.data.uniform_(0.5, 1.5)
    given = torch.randn(2, 3, 8, 8)
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    path = zoo.export(model, given, tmp_path / "m.onnx", dynamo=dynamo)
    for level in ("extended", "all"):
        candidate = run_of(path, sink.run(), optimize=level)
        plan = driftline.align(sink.run(), candidate)
        clean(driftline.compare(sink.run(), candidate, plan=plan))
        assert aligned_leaves(model, plan) == 1.0
        # The other way round the same tensors lie inside.
        back = driftline.align(candidate, sink.run())
        assert {key for side, key in back.inside if side == "candidate"} == {
            key for side, key in plan.inside if side == "reference"
        }


def test_q_in_the_place_of_k_fails_and_does_not_align(llama: Exported, tmp_path: Path) -> None:
    from onnx import numpy_helper

    model = onnx.load(str(llama.path))
    nodes = {node.output[0]: node for node in model.graph.node}
    q, k = nodes["linear"], nodes["linear_1"]
    q.input[1], k.input[1] = k.input[1], q.input[1]
    assert numpy_helper is not None
    (tmp_path / "swapped.onnx").write_bytes(model.SerializeToString())
    for path in (
        tmp_path / "swapped.onnx",
        zoo.anonymous(tmp_path / "swapped.onnx", tmp_path / "a.onnx"),
    ):
        table = driftline.compare(llama.run, run_of(path, llama.run, optimize="none"))
        failing = {row.key.site for row in table.rows if row.status == "fail"}
        assert {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"} <= failing


def test_fused_nodes_pair_with_what_they_replaced(cnn: Exported, llama: Exported) -> None:
    for made in (cnn, llama):
        plain = run_of(made.path, made.run, optimize="none")
        fused = run_of(made.path, made.run, optimize="all")
        plan = driftline.align(plain, fused)
        table = driftline.compare(plain, fused, plan=plan)
        clean(table)
        nodes = {r.key for r in fused.records if "/" in r.key.site and r.key.port == "output"}
        paired = {pair.candidate.key for pair in plan.pairs}
        assert len(nodes & paired) / len(nodes) >= 0.9
        why = [text for (side, _), text in plan.reasons.items() if side == "reference"]
        assert any("inside a fusion: " in text for text in why)
        assert plan.inside
        outputs = {r.key for r in plan.missing if "/" in r.key.site and r.key.port == "output"}
        assert outputs <= {key for side, key in plan.inside if side == "reference"}
    # A convolution with sum and activation in it stands against the activation, and takes what
    # the convolution took.
    plain = run_of(cnn.path, cnn.run, optimize="none")
    fused = run_of(cnn.path, cnn.run, optimize="extended")
    classes = {
        (pair.reference.class_name, pair.candidate.class_name)
        for pair in driftline.align(plain, fused).pairs
    }
    assert ("Relu", "FusedConv") in classes
    assert ("Conv", "FusedConv") in classes


class Mixed(torch.nn.Module):
    """Operators that exporters keep whole, reorder, turn into others or have several results of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)
        self.norm = torch.nn.LayerNorm(16)
        self.act = torch.nn.GELU()
        self.weight = torch.nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        k = torch.cat([-k[..., 8:], k[..., :8]], -1)
        q = torch.cat([-q[..., 8:], q[..., :8]], -1)
        scores = torch.einsum("btd,bsd->bts", q, k)
        scores = scores.masked_fill(scores > 2, 0.0).softmax(-1)
        top, at = scores.topk(3, -1)
        mixed = torch.zeros_like(scores).scatter(-1, at, top) @ v
        mixed = torch.nn.functional.linear(self.act(mixed), self.weight)
        return mixed + x


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its export and the run of its graph."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixed")
    model, given = Mixed().eval(), torch.randn(2, 6, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), driftline.capture(compiled, folder / "fx", graph="fx"):
        compiled(given)
    path = zoo.export(model, given, folder / "m.onnx")
    return path, driftline.open_run(folder / "fx")


@pytest.mark.parametrize("level", ["none", "all"])
def test_nodes_align_with_those_of_torch_s_own_graph(mixed: tuple[Path, Any], level: Any) -> None:
    path, graph = mixed
    candidate = run_of(path, graph, optimize=level)
    plan = driftline.align(graph, candidate)
    clean(driftline.compare(graph, candidate, plan=plan))
    outputs = [p for p in plan.pairs if p.candidate.key.port == "output"]
    theirs = {pair.candidate.key.site for pair in outputs}
    assert {"norm", "act", "qkv", "norm/layer_norm", "(root)/softmax"} <= theirs
    told = exported_graph(candidate)
    assert told is not None
    calls = {r.key.site for r in candidate.records if told.call(r.key.site)}
    assert len(theirs & calls) / len(calls) >= 0.9
    # Both results of one call, in order; halves of k and q, in whatever order the file has them.
    slots = [p.reference.key.slot for p in outputs if "topk" in p.reference.key.site]
    assert sorted(slots) == ["0", "1"]
    if level == "none":
        assert sum("/cat" in site for site in theirs) == 2
    # A Split that the exporter says nothing of is no input of the model or its modules.
    assert not any("split" in r.key.slot and "/" not in r.key.site for r in candidate.records)
    why = {text for (side, _), text in plan.reasons.items() if side == "candidate"}
    assert any(text.startswith("the same value is compared at ") for text in why)


def test_a_weight_that_no_module_owns_is_named_at_its_node(
    mixed: tuple[Path, Any], tmp_path: Path
) -> None:
    path, graph = mixed
    changed = zoo.reweighted(path, tmp_path / "c.onnx", "linear_1", lambda w: -w)
    table = driftline.compare(graph, run_of(changed, graph, optimize="none"))
    assert table.verdict == "fail"
    assert "'(root)/linear_1'" in table.finding


class Repeated(torch.nn.Module):
    """One layer three times, one activation five times, and two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.both = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.act = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.act(self.layer(x))
        left, right = (layer(x) for layer in self.both)
        return self.act(left) - self.act(right)


@pytest.mark.parametrize("dynamo", [True, False])
def test_modules_that_are_called_again_pair_call_by_call(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = Repeated().eval(), torch.randn(4, 8)
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    path = zoo.export(model, given, tmp_path / "m.onnx", dynamo=dynamo)
    for level in ("none", "all"):
        candidate = run_of(path, sink.run(), optimize=level)
        plan = driftline.align(sink.run(), candidate)
        clean(driftline.compare(sink.run(), candidate, plan=plan))
        calls = {(p.reference.key.site, p.reference.key.visit) for p in plan.pairs}
        assert {("act", visit) for visit in range(5)} | {("both.0", 0), ("both.1", 0)} <= calls


def test_an_input_is_never_set_against_what_another_made(tmp_path: Path) -> None:
    """Two modules begin with the same operator, which the exporter leaves to one of them."""
    import onnx
    from onnx import helper

    class Bent(torch.nn.Module):
        def __init__(self, power: float) -> None:
            super().__init__()
            self.power = power

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * self.power

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.left, self.right = Bent(2.0), Bent(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.left(x) + self.right(x)

    model, given = Both().eval(), torch.randn(4, 8)
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    exported = onnx.load(str(zoo.export(model, given, tmp_path / "m.onnx")))
    bends = [node for node in exported.graph.node if node.op_type == "Relu"]
    if len(bends) == 2:  # as a pass over common subexpressions has it
        for node in exported.graph.node:
            node.input[:] = [
                bends[0].output[0] if name == bends[1].output[0] else name for name in node.input
            ]
        exported.graph.node.remove(bends[1])
    assert helper.printable_graph(exported.graph).count("Relu") == 1
    (tmp_path / "once.onnx").write_bytes(exported.SerializeToString())
    candidate = run_of(tmp_path / "once.onnx", sink.run(), optimize="none")
    table = driftline.compare(sink.run(), candidate)
    assert not table.failing, table.finding
    # Two values leave 'left' now, and which of them it gave cannot be told: one module of three.
    assert table.verdict == "incomplete" and "66.7% of the 3 calls" in table.finding


class LSTM(torch.nn.Module):
    """Gives several tensors, batch first; what it computes does not matter here."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), x[:1]


class Fork(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3


class Negative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Several(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fork, self.last = LSTM(), Fork(), Negative()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fork(self.lstm(x)[0])[1])


@pytest.mark.parametrize("times", [3, 4])
def test_the_only_output_that_is_used_is_not_taken_for_the_first(
    times: int, tmp_path: Path
) -> None:
    make = onnx.helper.make_node
    nodes = [
        zoo.placed(make("Relu", ["x"], ["a"]), "lstm"),
        zoo.placed(make("Transpose", ["a"], ["b"], perm=[1, 0, 2]), "lstm"),
        zoo.placed(make("Transpose", ["b"], ["c"], perm=[1, 0, 2]), "fork"),
        zoo.placed(make("Mul", ["c", "factor"], ["d"]), "fork"),
        zoo.placed(make("Neg", ["d"], ["y"]), "last"),
    ]
    given = onnx.helper.make_tensor_value_info("x", zoo.F32, [2, 5, 4])
    factor = onnx.numpy_helper.from_array(np.float32(times), "factor")
    path = zoo.write(tmp_path / "m.onnx", nodes, [given], ["y"], [factor])
    sink = MemorySink()
    model = Several()
    with torch.no_grad(), driftline.capture(model, sink):
        model(torch.randn(2, 5, 4))
    candidate = run_of(path, sink.run(), optimize="none")
    for both in ((sink.run(), candidate), (candidate, sink.run())):
        plan = driftline.align(*both)
        pairs = {(p.reference.key.site, p.reference.key.port): p for p in plan.pairs}
        turned = (
            pairs["lstm", "output"].reference_recipe or pairs["lstm", "output"].candidate_recipe
        )
        assert turned is not None and "transpose(1,0,2)" in str(turned)
        table = driftline.compare(*both, plan=plan)
        if times == 3:
            clean(table)
        else:
            assert first_of(table).site == "fork"


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.again = LSTM(), LSTM()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.lstm(x)[0])[0]


def test_recurrent_layers_with_as_many_steps_as_rows_are_not_set_against_each_other_turned(
    tmp_path: Path,
) -> None:
    make = onnx.helper.make_node
    nodes = [
        zoo.placed(make("Relu", ["x"], ["a"]), "lstm"),
        zoo.placed(make("Transpose", ["a"], ["b"], perm=[1, 0, 2]), "lstm"),
        zoo.placed(make("Relu", ["b"], ["c"]), "again"),
        zoo.placed(make("Transpose", ["c"], ["y"], perm=[1, 0, 2]), "again"),
    ]
    given = onnx.helper.make_tensor_value_info("x", zoo.F32, [4, 4, 3])
    path = zoo.write(tmp_path / "m.onnx", nodes, [given], ["y"])
    sink = MemorySink()
    model = Twice()
    with torch.no_grad(), driftline.capture(model, sink):
        model(torch.randn(4, 4, 3))
    candidate = run_of(path, sink.run(), optimize="none")
    clean(driftline.compare(sink.run(), candidate))
    clean(driftline.compare(candidate, sink.run()))


def test_calls_that_the_exporter_left_out_make_no_wrong_pairs() -> None:
    scopes = [
        Scope(("a",), (), "mul_1", "aten.mul.Tensor", "net.py:2"),
        Scope(("a",), (), "mul", "aten.mul.Scalar", "net.py:1"),  # in another order than torch's
        Scope(("b",), (), "mul_3", "aten.mul.Tensor"),  # mul_2 was a's or b's: nobody knows
        Scope(("b",), (), "add", "aten.add.Tensor"),
        Scope(("c",), (), "mul_4", "aten.mul.Tensor"),
        Scope(("c",), (), "pow_1", "aten.pow.Tensor_Scalar"),
        Scope(("c",), (), "pow_2", "aten.pow.Tensor_Scalar"),
    ]
    assert count(scopes) == {
        "mul": Call(0, 2, False, 0, 1),
        "mul_1": Call(1, 2, False, 0, 1),
        "mul_3": Call(0, 1, False, 0, 1),
        "add": Call(0, 1, True, 0, 1),
        "mul_4": Call(0, 1, True, 0, 1),
        "pow_1": Call(0, 2, True, 0, 2),
        "pow_2": Call(1, 2, True, 1, 2),
    }


def test_only_a_look_up_of_a_table_of_weights_by_computed_ids_is_an_embedding() -> None:
    def look_up(table: str, ids: str) -> Any:
        return onnx.helper.make_node("Gather", [table, ids], [f"{ids} of {table}"])

    integers, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    made = onnx.helper.make_graph(
        [
            look_up("table", "ids"),
            look_up("table", "first"),
            look_up("scales", "ids"),
            look_up("x", "ids"),
        ],
        "look-ups",
        [
            onnx.helper.make_tensor_value_info("ids", integers, [5]),
            onnx.helper.make_tensor_value_info("x", floats, [3, 4]),
        ],
        [onnx.helper.make_tensor_value_info("ids of table", floats, [5, 4])],
        [
            onnx.numpy_helper.from_array(np.zeros((3, 4), np.float32), "table"),
            onnx.numpy_helper.from_array(np.zeros(3, np.float32), "scales"),
            onnx.numpy_helper.from_array(np.zeros(1, np.int64), "first"),
        ],
    )
    names: Any = SimpleNamespace(site=lambda value: value)
    assert weighted_nodes(Graph(onnx.helper.make_model(made)), names) == [
        {"kind": "embedding", "takes": "ids", "makes": "ids of table", "shape": [5, 4]}
    ]
