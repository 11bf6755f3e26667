"""The list of calls and the profile: true about who feeds whom, and without any effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.captures.torch.operators.call_list import CallTap
from driftline.captures.torch.profiler import ProfileTap
from driftline.captures.torch.session import CaptureSession
from driftline.formats.ascend.atb.tables import read_operations, read_profile
from driftline.graphs.model import at_level
from driftline.graphs.sources.calls import calls_graph
from driftline.runs.sidecars.calls import Call, CallTensor, read_calls
from driftline.runs.sidecars.operator_sheets import operation_sheet
from driftline.runs.writer import RunWriter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.linear(self.norm(x)))
        h.mul_(2)
        return x + h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.reshape(2, 2, 8).transpose(0, 1).contiguous())


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


class Watched:
    """A session with the taps of `dump --type op kernel cpu_profiling`."""

    def __init__(self, path: Path, *, profile: bool = False, **more: Any) -> None:
        self.path = path
        self.writer = RunWriter(path)
        self.session = CaptureSession(self.writer, **more)
        self.session.taps.append(CallTap(self.session, self._line))
        if profile:
            self.session.taps.append(
                ProfileTap(self.session, self.writer.sheet, kernels=True, times=True)
            )

    def _line(self, text: str) -> None:
        self.writer.sheet("calls.jsonl", text)

    def __enter__(self) -> Watched:
        self.session.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.session.stop()

    @property
    def calls(self) -> list[Call]:
        return list(read_calls(driftline.open_run(self.path).sheet("calls.jsonl")))


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    yield lambda name="run", **more: Watched(tmp_path / name, **more)


def named(calls: list[Call], site: str) -> Call:
    return next(call for call in calls if call.site == site)


def test_every_tensor_comes_from_the_call_that_made_it(watch: Callable[..., Watched]) -> None:
    model = net()
    with watch() as watched, torch.no_grad():
        model(torch.ones(4, 8))
    calls = watched.calls
    by_number = {call.number: call for call in calls}
    norm, linear = named(calls, "layers.0.norm/aten.native_layer_norm"), None
    linear = named(calls, "layers.0.linear/aten.addmm")
    scaled, added = named(calls, "layers.0/aten.mul_"), named(calls, "layers.0/aten.add")
    sources = {one.slot: one.source for one in linear.inputs}
    assert sources["mat1"] == (norm.number, "0")
    assert sources["self"] == "layers.0.linear.bias"
    assert sources["mat2"] == "layers.0.linear.weight"
    assert {one.slot: one.source for one in scaled.inputs} == {"self": (linear.number, "0")}
    assert [one.source for one in added.inputs] == [norm.inputs[0].source, (scaled.number, "0")]
    # Through a view, to the copy that `contiguous` makes, and on to the next layer's matrix.
    copy = named(calls, "(root)/aten.clone")
    assert by_number[copy.inputs[0].source[0]].site == "layers.1/aten.add"  # type: ignore[index]
    head = next(c for c in calls if c.site.startswith("head/aten") and c.inputs)
    assert (copy.number, "0") in [one.source for one in head.inputs]


def test_parameters_and_shapes_are_as_the_operator_got_them(watch: Callable[..., Watched]) -> None:
    with watch() as watched, torch.no_grad():
        torch.nn.functional.softmax(net()(torch.ones(4, 8)), dim=-1)
    norm = named(watched.calls, "layers.0.norm/aten.native_layer_norm")
    assert norm.param == {"normalized_shape": [8], "eps": 1e-05}
    assert [one.shape for one in norm.outputs] == [(4, 8), (4, 1), (4, 1)]
    softmax = named(watched.calls, "(program)/aten._softmax")
    assert softmax.param == {"dim": -1, "half_to_float": False}


def test_names_are_unique_in_a_step_and_begin_with_the_ids_of_the_module(
    watch: Callable[..., Watched],
) -> None:
    with watch() as watched, torch.no_grad():
        model = net()
        model(torch.ones(4, 8)).sum()
    operators = [call.name for call in watched.calls if call.kind == "operator"]
    assert len(set(operators)) == len(operators)
    assert named(watched.calls, "layers.1.linear").ids == "0_1_1"
    assert named(watched.calls, "layers.1.linear/aten.addmm").ids == "0_1_1_0"
    assert named(watched.calls, "layers.1/aten.add").ids.startswith("0_1_")


def test_memory_that_is_used_again_is_not_taken_for_what_was_there(
    watch: Callable[..., Watched],
) -> None:
    def churn() -> None:
        for _ in range(50):
            a = torch.full((64,), 3.0)
            b = a + 1
            del a
            c = torch.full((64,), 5.0)  # as a rule where `a` was
            b * c

    with watch() as watched:
        churn()
    calls = watched.calls
    by_number = {call.number: call for call in calls}
    for call in calls:
        if call.class_name == "aten.mul.Tensor":
            left, right = (by_number[one.source[0]] for one in call.inputs)  # type: ignore[index]
            assert (left.class_name, right.class_name) == ("aten.add.Tensor", "aten.full.default")
            assert left.number < right.number < call.number


def train(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train()
    seen = []
    for step in range(2):
        loss = model(torch.full((4, 8), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(p.detach() for p in model.parameters())]


def test_a_training_is_bitwise_the_same_with_lists_and_profiles(
    watch: Callable[..., Watched],
) -> None:
    plain = train(net())
    with watch(profile=True, levels=("modules", "ops")) as watched:
        seen = train(net())
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    phases = {call.phase for call in watched.calls}
    assert phases == {"forward", "backward"}
    assert {call.step for call in watched.calls} >= {0, 1}
    events = list(driftline.open_run(watched.path).events())
    assert not [e for e in events if e["kind"] in ("capture-fault", "operator-lost")]


def test_the_csv_is_read_back_by_the_reader_of_atb_s(watch: Callable[..., Watched]) -> None:
    with watch() as watched, torch.no_grad():
        net()(torch.ones(4, 8).to(torch.float32)).sum()
    calls = sorted(watched.calls, key=lambda call: call.number)
    lines = read_operations(operation_sheet(calls, {}), 0)
    assert [line.name for line in lines] == [call.name for call in calls]
    for line, call in zip(lines, calls, strict=True):
        assert line.ids == call.ids and line.kind == call.class_name
        assert [(d.dtype, d.shape) for d in line.inputs] == [
            (t.dtype, t.shape) for t in call.inputs
        ]
        assert [d[::2] for d in line.outputs] == [(t.dtype, t.shape) for t in call.outputs]
        assert {key: line.param[key] for key in call.param} == dict(call.param)
        assert line.param["site"] == call.site


def test_kernels_and_times_have_their_operators_and_sites(watch: Callable[..., Watched]) -> None:
    with watch(profile=True) as watched, torch.no_grad():
        net()(torch.ones(4, 8))
    run = driftline.open_run(watched.path)
    kernels = read_operations(run.sheet("kernel_tensors_0.csv"), 0)
    matrix = [
        k for k in kernels if k.name == "aten::addmm" and k.param["site"].startswith("layers")
    ]
    assert [k.param["site"] for k in matrix] == ["layers.0.linear", "layers.1.linear"]
    assert {k.param["operator"] for k in matrix} == {"aten::linear"}
    assert [d.shape for d in matrix[0].inputs] == [(8,), (4, 8), (8, 8)]
    assert not [k for k in kernels if k.name in ("aten::view", "aten::empty", "aten::as_strided")]
    table = read_profile(run.sheet("operation_statistic_0.txt"), "t")
    rows = {line[0]: dict(zip(table.headings, line, strict=True)) for line in table.lines}
    assert rows["aten_linear"]["execute_callCount"] == 3
    assert rows["aten_native_layer_norm"]["execute_callCount"] == 2
    assert rows["aten_linear"]["execute_totalTime"] >= rows["aten_linear"]["execute_selfTime"] > 0
    by_site = run.sheet("operation_statistic_0.csv").splitlines()
    assert by_site[0] == "site,operator,calls,total_us,self_us,device_us"
    assert any(line.startswith("layers.1.linear,aten::addmm,1,") for line in by_site)


def test_two_models_that_count_the_same_steps_are_in_one_sheet(
    watch: Callable[..., Watched],
) -> None:
    with watch(profile=True) as watched, torch.no_grad():
        for model in (net(), net()):
            for _ in range(2):
                model(torch.ones(4, 8))
    run = driftline.open_run(watched.path)
    text = run.sheet("kernel_tensors_0.csv")
    assert text.count("CaseNum") == 1
    matrices = [k for k in read_operations(text, 0) if k.name == "aten::addmm"]
    table = read_profile(run.sheet("operation_statistic_0.txt"), "t")
    rows = {line[0]: dict(zip(table.headings, line, strict=True)) for line in table.lines}
    assert len(matrices) == rows["aten_addmm"]["execute_callCount"] == 6


def test_a_model_called_by_another_thread_is_profiled_too(watch: Callable[..., Watched]) -> None:
    def serve() -> None:
        with torch.no_grad():
            net()(torch.ones(4, 8))

    with watch(profile=True) as watched:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    kernels = read_operations(driftline.open_run(watched.path).sheet("kernel_tensors_0.csv"), 0)
    assert sum(k.param["operator"] == "aten::linear" for k in kernels) >= 3


def test_a_program_that_profiles_itself_gets_its_whole_profile(
    watch: Callable[..., Watched],
) -> None:
    model = net()
    with torch.profiler.profile() as alone, torch.no_grad():
        model(torch.ones(4, 8))
    with watch(profile=True) as watched, torch.no_grad():
        model(torch.ones(4, 8))
        with torch.profiler.profile() as own:
            model(torch.ones(4, 8))
    counts = [
        {e.key: e.count for e in one.key_averages() if e.key.startswith("aten::linear")}
        for one in (alone, own)
    ]
    assert counts[0] == counts[1] == {"aten::linear": 3}
    run = driftline.open_run(watched.path)
    assert run.sheet("kernel_tensors_0.csv"), "what ran before it is kept"
    assert "profile itself" in " ".join(str(e["message"]) for e in run.events())


def test_the_graph_of_a_run_nests_operators_in_modules(watch: Callable[..., Watched]) -> None:
    with watch() as watched, torch.no_grad():
        net()(torch.ones(4, 8))
    graph = calls_graph(watched.calls)
    assert graph is not None and graph.kind == "Net"
    first = at_level(graph, 1)
    kinds = [node.kind for node in first.nodes]
    assert kinds[:2] == ["Block", "Block"] and kinds[-1] == "Linear"
    one, two = first.nodes[:2]
    assert set(one.outputs) & set(two.inputs), "the first layer feeds the second"
    assert "layers.0.linear.weight" in one.inputs
    deepest = at_level(graph)
    made = [name for node in deepest.nodes for name in node.outputs]
    assert len(made) == len(set(made))
    dropped = next(node for node in deepest.nodes if node.kind == "Dropout")
    assert dropped.path[-1].startswith("Block"), "a module that ran no operator is a node itself"
    assert driftline.topology_to_onnx(watched.path, 1).is_file()


def test_what_is_left_of_a_killed_program_s_list_is_read() -> None:
    text = (
        Call(0, "operator", "a/aten.add", "aten.add.Tensor", "0").to_line()
        + '{"call": 1, "kind": "operator", "si'
    )
    assert [call.number for call in read_calls(text)] == [0]
    for line in ("[]", "{}", '{"call":-1,"site":"a","class":"b"}', "x", "null", '{"call":"a"}'):
        assert list(read_calls(line)) == []


def test_a_training_step_s_graph_is_its_forward_pass_without_the_optimizer(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with Watched(tmp_path / "run") as watched:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    calls = watched.calls
    assert not [call for call in calls if call.site.split("/")[-1].startswith("profiler.")]
    assert any(call.site.startswith("AdamW/") for call in calls)
    graph = calls_graph(calls)
    assert graph is not None
    assert not [node for node in at_level(graph).nodes if node.site.startswith("AdamW/")]
    assert "optimizers are not in the graph" in graph.notes[0]


def test_the_line_of_a_call_is_read_back_as_it_was() -> None:
    call = Call(
        3,
        "operator",
        'a"\\é\n/aten.x',
        "aten.x.default",
        "0_1",
        2,
        1,
        "backward",
        None,
        (
            CallTensor("a", "float32", (2, 0), "0", (1, "0.1"), (1, 0)),
            CallTensor("b", "bool", (), "", "w\u2028"),
        ),
        (CallTensor("0", "float16", (1,)),),
        {"alpha": 1.5, "text": "\ud800", "none": None, "many": [1, [True]]},
    )
    (line,) = call.to_line().splitlines()
    assert list(read_calls(line)) == [call]
    plain = Call(0, "module", "(root)", "Net", inside=7)
    assert list(read_calls(plain.to_line())) == [plain]


def test_a_buffer_that_is_overwritten_in_part_goes_into_the_operator(
    watch: Callable[..., Watched],
) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("held", torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.held[0].copy_(self.linear(x))
            return self.held.sum()

    model = Cache()
    with watch() as watched, torch.no_grad():
        model(torch.ones(3))
    copy = named(watched.calls, "(root)/aten.copy_")
    assert {one.slot: one.source for one in copy.inputs}["self"] == "held"


def test_what_is_not_seen_is_said_once(tmp_path: Path) -> None:
    class Values(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(super().forward(x))

    model = Values(3, 3)
    with driftline.capture(model, tmp_path / "run", levels=("ops",)):
        model(torch.eye(3))
    events = [e for e in driftline.open_run(tmp_path / "run").events() if "svdvals" in e["message"]]
    assert len(events) == 1
