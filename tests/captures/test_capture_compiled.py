"""A captured compiled model is compiled to the same graphs and computes the same bits."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
from capture_zoo import build, feed, one_thread
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import driftline
from driftline.captures.torch.framework import capture
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if self.breaks and i == 1:
                torch._dynamo.graph_break()
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    with one_thread():
        yield
    torch._dynamo.reset()


def _model(**options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options).eval()


def _run(call: Any, counter: CompileCounterWithBackend) -> tuple[torch.Tensor, int, int]:
    torch.manual_seed(2)
    x = torch.randn(5, 8)
    with torch.no_grad():
        call(x)
        out = call(x)
    return out, counter.frame_count, counter.op_count


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("order", ["compiled_before", "compiled_inside"])
def test_the_same_graphs_are_compiled_and_give_the_same_bits(breaks: bool, order: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    plain = _run(torch.compile(_model(breaks=breaks), backend=counter), counter)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, sink = _model(breaks=breaks), MemorySink()
    compiled = torch.compile(model, backend=counter) if order == "compiled_before" else None
    with capture(model, sink):
        if compiled is None:
            compiled = torch.compile(model, backend=counter)
        seen = _run(compiled, counter)
    assert plain[1] > 0
    assert plain[1:] == seen[1:]
    assert torch.equal(plain[0], seen[0])
    records = sink.run().records
    assert {r.key.step for r in records} == {0, 1}
    assert {r.key.port for r in records if r.key.site == "(root)"} == {"input", "output"}
    assert [r.key.visit for r in records if r.key.site == "(root)"] == [0] * 4
    assert {r.key.site for r in records} <= {"(root)", *(n for n, _ in model.named_modules())}


@pytest.mark.parametrize("how", ["in_place", "torch_nn", "function"])
def test_other_ways_to_compile_are_seen_at_module_level_where_there_is_one(how: str) -> None:
    def make() -> tuple[nn.Module, Any, CompileCounterWithBackend]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        if how == "torch_nn":
            torch.manual_seed(1)
            model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
            return model, torch.compile(model, backend=counter), counter
        model = _model()
        if how == "in_place":
            model.compile(backend=counter)
            return model, model, counter
        return model, torch.compile(lambda x: model(x) * 2, backend=counter), counter

    _, call, counter = make()
    plain = _run(call, counter)
    model, call, counter = make()
    sink = MemorySink()
    with capture(model, sink):
        seen = _run(call, counter)
    assert plain[1:] == seen[1:] and plain[1] > 0
    assert torch.equal(plain[0], seen[0])
    sites = {r.key.site for r in sink.run().records}
    assert sites == (set() if how == "function" else {"(root)"})
    (note,) = [e["message"] for e in sink._events if e["kind"] == "compiled"]
    seen_of_it = "of which nothing was seen" if how == "function" else "only inputs and outputs"
    assert seen_of_it in note and "--graph auto" in note


def test_fullgraph_still_compiles_under_a_process_wide_capture() -> None:
    sink = MemorySink()
    session = CaptureSession(sink).start()
    try:
        model = _model()
        counter = CompileCounterWithBackend("aot_eager")
        _run(torch.compile(model, backend=counter, fullgraph=True), counter)
    finally:
        session.stop()
    assert counter.frame_count == 1
    assert {r.key.site for r in sink.run().records} == {"(root)"}
    (note,) = [e["message"] for e in sink._events if e["kind"] == "compiled"]
    assert "only inputs and outputs of compiled modules were seen" in note
    assert "--graph auto" in note


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_generates_the_same_kernels_and_bits_for_a_captured_llama() -> None:
    from torch._inductor import metrics

    def run(sink: MemorySink | None) -> tuple[torch.Tensor, int]:
        torch._dynamo.reset()
        metrics.reset()
        model, inputs = build("llama"), feed("llama")
        session = CaptureSession(sink).start() if sink else None
        compiled = torch.compile(model)
        with torch.no_grad():
            compiled(**inputs)
            logits = compiled(**inputs).logits
        if session:
            session.stop()
        return logits, metrics.generated_kernel_count

    sink = MemorySink()
    plain, seen = run(None), run(sink)
    assert plain[1] == seen[1] > 0
    assert torch.equal(plain[0], seen[0])
    assert {r.key.site for r in sink.run().records} == {"(root)"}


def test_training_a_compiled_model_gives_the_same_gradients() -> None:
    def run(sink: MemorySink | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = _model().train()
        compiled = torch.compile(model, backend="aot_eager")
        torch.manual_seed(3)
        x = torch.randn(4, 8)
        if sink is None:
            compiled(x).square().sum().backward()
        else:
            with capture(model, sink, levels=("modules", "gradients")):
                compiled(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, seen = run(None), run(MemorySink())
    assert len(plain) == len(seen) > 4
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_the_plain_call_is_back_when_the_last_session_ends() -> None:
    before = nn.Module.__call__
    with capture(_model(), MemorySink()):
        assert nn.Module.__call__ is not before
        with capture(_model(), MemorySink()):
            pass
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before


def test_a_wrapper_that_another_library_set_meanwhile_stays_when_a_capture_ends() -> None:
    before = nn.Module.__call__
    model, x = _model(), torch.ones(2, 8)
    seen: list[str] = []
    try:
        with capture(model, MemorySink()):
            below = nn.Module.__call__

            def another(self: nn.Module, *args: object, **kwargs: object) -> object:
                seen.append(type(self).__name__)
                return below(self, *args, **kwargs)

            nn.Module.__call__ = another
            model(x)
        seen.clear()
        assert nn.Module.__call__ is another
        model(x)
        calls = len(seen)
        assert calls > 4
        # Ours stays below the other one, and is not set twice by the next capture.
        sink = MemorySink()
        with capture(model, sink):
            model(x)
        assert nn.Module.__call__ is another
        assert len({record.key.site for record in sink.run().records}) > 2
        assert len(seen) == 2 * calls
        nn.Module.__call__ = below  # it leaves, as it came
        with capture(model, MemorySink()):
            model(x)
        assert nn.Module.__call__ is before
    finally:
        nn.Module.__call__ = before


@pytest.mark.parametrize("how", ["function", "method", "blocks"])
def test_two_compiled_runs_that_show_the_ends_of_regions_are_incomplete(how: str, tmp_path) -> None:
    """Neither side has seen what is inside: how much that is, the model's own tree says."""

    def dumped(name: str, *, compiled: bool) -> None:
        torch._dynamo.reset()
        model = _model(breaks=True)
        call: Any = model
        if compiled and how == "function":
            call = torch.compile(model, backend="eager")
        elif compiled:
            for part in model.blocks if how == "blocks" else (model,):
                part.compile(backend="eager")
        with driftline.capture(model, tmp_path / name), torch.no_grad():
            call(torch.ones(5, 8))

    dumped("eager", compiled=False)
    dumped("one", compiled=True)
    dumped("other", compiled=True)
    for reference in ("one", "eager"):
        table = driftline.compare(tmp_path / reference, tmp_path / "other")
        assert table.verdict == "incomplete", table.finding
        assert "--graph auto" in table.finding
