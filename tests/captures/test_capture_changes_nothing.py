"""Outputs, losses and gradients are bitwise the same with capture and without."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import capture_zoo as zoo
import pytest
import torch

from driftline.captures.torch.framework import capture
from driftline.runs.memory import MemorySink

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "eager": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "checkpointing": contextlib.nullcontext,
}


@pytest.fixture(autouse=True)
def _one_thread():
    with zoo.one_thread():
        yield


def _execute(
    name: str, mode: str, sink: MemorySink | None, levels: tuple[str, ...], keep: str
) -> Any:
    """Two training iterations (or plain calls); everything that could have changed."""
    model = zoo.build(name, train=True)
    if mode == "checkpointing":
        model.gradient_checkpointing_enable()
    inputs = zoo.feed(name)
    learns = mode not in ("no_grad", "inference_mode")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if learns else None
    watched = capture(model, sink, levels=levels, keep=keep) if sink else contextlib.nullcontext()
    kept: list[torch.Tensor] = []
    torch.manual_seed(5)
    with watched:
        for _ in range(2):
            with MODES[mode]():
                output = model(**inputs)
                loss = zoo.loss_of(output)
            zoo.collect(output, kept)
            kept.append(loss)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
    kept += [p.detach().clone() for p in model.parameters()]
    kept += [b.detach().clone() for b in model.buffers()]
    kept.append(torch.get_rng_state())
    return kept


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_results_are_bitwise_the_same_with_capture(name: str, mode: str) -> None:
    if mode == "checkpointing" and not zoo.ZOO[name].checkpointing:
        mode = "eager"
    plain = _execute(name, mode, None, (), "full")
    sink = MemorySink()
    seen = _execute(name, mode, sink, ("modules",), "full")
    assert sink.tensors_written > 10
    assert len(plain) == len(seen)
    assert all(_same_bits(a, b) for a, b in zip(plain, seen, strict=True))
    assert not [e for e in sink._events if e["kind"] == "capture-fault"]


@pytest.mark.parametrize("mode", ["eager", "autocast", "checkpointing"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral", "cnn", "inplace_shared"])
def test_results_are_bitwise_the_same_with_every_level(name: str, mode: str) -> None:
    if mode == "checkpointing" and not zoo.ZOO[name].checkpointing:
        mode = "eager"
    plain = _execute(name, mode, None, (), "full")
    sink = MemorySink()
    levels = ("modules", "gradients", "params", "ops")
    seen = _execute(name, mode, sink, levels, "digest")
    assert all(_same_bits(a, b) for a, b in zip(plain, seen, strict=True))
    faults = [e for e in sink._events if e["kind"] == "capture-fault"]
    assert not faults, faults[:2]


def test_the_fast_path_of_transformer_layers_is_still_taken() -> None:
    """torch leaves it when a module has hooks; a wrapped call is not a hook."""
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run() -> tuple[torch.Tensor, set[str]]:
        with torch.inference_mode(), torch.profiler.profile() as profile:
            out = model(x, src_key_padding_mask=padding)
        return out, {event.key for event in profile.key_averages()}

    plain = run()
    sink = MemorySink()
    with capture(model, sink):
        seen = run()
    assert torch.equal(plain[0], seen[0])
    assert "aten::_transformer_encoder_layer_fwd" in plain[1]
    assert "aten::_transformer_encoder_layer_fwd" in seen[1]
    assert {e["kind"] for e in sink._events} == {"refused"}


def test_the_programs_own_modes_see_nothing_of_the_capture() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    class CountingFunctions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model, inputs = zoo.build("gpt2"), zoo.feed("gpt2")

    def run() -> tuple[list[str], list[str]]:
        with torch.no_grad(), Counting() as ops, CountingFunctions() as functions:
            model(**inputs)
        return ops.calls, functions.calls

    plain = run()
    sink = MemorySink()
    with capture(model, sink, keep="sample(4)"):
        seen = run()
    assert sink.tensors_written > 10
    assert plain == seen


def test_modules_nested_by_the_hundred_do_not_run_out_of_recursion() -> None:
    model: torch.nn.Module = torch.nn.Identity()
    for _ in range(230):
        model = torch.nn.Sequential(model)
    before = sys.getrecursionlimit()
    depth = len(traceback.extract_stack())
    try:
        sys.setrecursionlimit(depth + 1000)
        model(torch.ones(1))
        sink = MemorySink()
        with capture(model, sink):
            model(torch.ones(1))
        assert sink.tensors_written == 2 * 231
        assert sys.getrecursionlimit() == depth + 1000
    finally:
        sys.setrecursionlimit(before)
