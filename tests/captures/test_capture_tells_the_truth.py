"""What is captured is what was there: checked against plain clones."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import capture_zoo as zoo
import numpy as np
import pytest
import torch
from torch import nn

from driftline.captures.torch.framework import capture
from driftline.runs.memory import MemorySink


@pytest.fixture(autouse=True)
def _one_thread():
    with zoo.one_thread():
        yield


def _clones(model: nn.Module, log: dict[tuple[str, int], list[torch.Tensor]]) -> list[Any]:
    """Ordinary hooks that keep a copy of every output, by module and visit."""
    visits: dict[str, int] = {}
    handles = []

    def hook_for(name: str):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            visit = visits.get(name, 0)
            visits[name] = visit + 1
            found: list[torch.Tensor] = []
            zoo.collect(output, found)
            log[name, visit] = [t.detach().clone() for t in found]

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(hook_for(name or "(root)")))
    return handles


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "cnn", "inplace_shared"])
def test_every_captured_output_equals_a_clone_taken_by_a_plain_hook(name: str, mode: Any) -> None:
    """Under no_grad addresses are used again: de-duplicating by address would fail here."""
    model, inputs = zoo.build(name), zoo.feed(name)
    oracle: dict[tuple[str, int], list[torch.Tensor]] = {}
    handles = _clones(model, oracle)
    sink = MemorySink()
    with mode(), capture(model, sink):
        model(**inputs)
    for handle in handles:
        handle.remove()
    run = sink.run()
    seen: dict[tuple[str, int], list[bytes]] = {}
    for handle in run.tensors():
        key = handle.key
        if key.port == "output" and handle.record.dtype.startswith("float"):
            seen.setdefault((key.site, key.visit), []).append(handle.raw().tobytes())
    expected = {k: [_raw(t) for t in v] for k, v in oracle.items() if v}
    # A root's cache is captured too, which the plain hook does not know how to look into.
    missing = {k for k in expected if Counter(expected[k]) - Counter(seen.get(k, []))}
    assert len(expected) > 8
    assert not missing


@pytest.mark.parametrize("name", ["llama", "t5", "inplace_shared"])
def test_every_captured_input_equals_a_clone_taken_before_the_call(name: str) -> None:
    model, inputs = zoo.build(name), zoo.feed(name)
    oracle: Counter[tuple[str, bytes]] = Counter()

    def hook_for(site: str):
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            found: list[torch.Tensor] = []
            zoo.collect((args, kwargs), found)
            oracle.update((site, _raw(t.detach().clone())) for t in found)

        return hook

    handles = [
        module.register_forward_pre_hook(hook_for(site or "(root)"), with_kwargs=True)
        for site, module in model.named_modules()
    ]
    sink = MemorySink()
    with torch.no_grad(), capture(model, sink, ports="input"):
        model(**inputs)
    for handle in handles:
        handle.remove()
    seen = Counter(
        (handle.key.site, handle.raw().tobytes())
        for handle in sink.run().tensors()
        if handle.record.dtype.startswith("float")
    )
    assert len(oracle) > 5
    assert not oracle - seen


def test_inputs_are_taken_before_the_module_changes_them_and_after_when_asked() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    model = nn.Sequential(Doubling())
    from driftline.captures.selection import Selection

    sink = MemorySink()
    with capture(model, sink, selection=Selection(sites=("0",), time=2)):
        model(torch.ones(3))
    values = {(h.key.port, h.key.moment): h.numpy().tolist() for h in sink.run().tensors()}
    assert values == {
        ("input", "before"): [1, 1, 1],
        ("input", "after"): [2, 2, 2],
        ("output", "after"): [2, 2, 2],
    }


def test_an_in_place_change_after_the_hook_does_not_reach_the_run(tmp_path: Any) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(300, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            self.truth = h.clone()
            return h.zero_()

    torch.manual_seed(0)
    model = Changing()
    import driftline

    with torch.no_grad(), capture(model, tmp_path / "run"):
        model(torch.randn(200, 300))
    run = driftline.open_run(tmp_path / "run")
    assert np.array_equal(run.get(site="inner").numpy(), model.truth.numpy())
    assert not run.get(site="(root)").numpy().any()


def test_keyword_arguments_and_positions_give_the_same_slot() -> None:
    class Attention(nn.Module):
        def forward(
            self, hidden: torch.Tensor, mask: torch.Tensor | None = None, **rest: Any
        ) -> Any:
            return (hidden + 1, None)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Attention(), Attention()

        def forward(self, x: torch.Tensor) -> Any:
            self.one(x, x > 0)
            return self.two(mask=x > 0, hidden=x, extra={"k": [x]})

    model, sink = Model(), MemorySink()
    with capture(model, sink):
        model(torch.ones(2))
    slots = [(r.key.site, r.key.slot, r.alias) for r in sink.run().records if r.key.port == "input"]
    assert ("one", "hidden", "0") in slots and ("two", "hidden", "0") in slots
    assert ("one", "mask", "1") in slots and ("two", "mask", "1") in slots
    assert ("two", "extra.k.0", "") in slots


def test_generation_with_a_cache_is_captured_token_by_token_and_unchanged() -> None:
    model, prompt = zoo.build("llama"), {"input_ids": torch.tensor([[1, 2, 3]])}
    plain = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    sink = MemorySink()
    with capture(model, sink):
        seen = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(plain, seen)
    records = sink.run().records
    assert {r.key.step for r in records} == {0, 1, 2, 3}
    layer = [r for r in records if r.key.site == "model.layers.1.self_attn" and r.key.step == 2]
    slots = {r.key.slot: r.shape for r in layer if r.key.port == "input"}
    # Its own layer of the cache, as it was before the call: prompt of 3 and one token.
    assert slots["past_key_values.1.0"][-2] == 4
    assert "past_key_values.0.0" not in slots


def test_an_exception_of_the_model_passes_through_and_the_next_call_is_clean() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.fails:
                raise KeyError("of the program")
            return y

    model, sink = nn.Sequential(Failing()), MemorySink()
    with capture(model, sink) as running:
        with pytest.raises(KeyError, match="of the program") as caught:
            model(torch.ones(1, 2))
        assert running.session.current_frame() is None
        assert caught.value.__context__ is None
        model[0].fails = False
        model(torch.ones(1, 2))
    assert {r.key.step for r in sink.run().records if r.key.port == "output"} == {0, 1}
    told = [e for e in sink._events if e["kind"] == "exception"]
    assert [e["details"]["site"] for e in told] == ["0"]


def test_a_sink_that_breaks_does_not_break_the_program() -> None:
    class Broken(MemorySink):
        def put(self, record: Any, data: Any) -> None:
            raise OSError(28, "No space left on device")

    model, sink = nn.Linear(2, 2), Broken()
    with capture(model, sink):
        assert model(torch.ones(1, 2)).shape == (1, 2)
    assert [e["kind"] for e in sink._events] == ["capture-fault"]


def test_a_fault_of_the_capture_itself_is_an_event_and_leaves_no_frame_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from driftline.captures.torch import layers

    def fails(*args: Any) -> Any:
        raise RuntimeError("planted")

    model, sink = nn.Sequential(nn.Linear(2, 2)), MemorySink()
    monkeypatch.setattr(layers, "inputs", fails)
    with capture(model, sink) as running:
        assert model(torch.ones(1, 2)).shape == (1, 2)
        assert running.session.frames() == []
        monkeypatch.undo()
        model(torch.ones(1, 2))
    assert "planted" in sink._events[0]["message"]
    assert {r.key.site for r in sink.run().records} == {"(root)", "0"}


def test_recomputation_under_checkpointing_is_a_phase_of_its_own() -> None:
    model, inputs = zoo.build("llama", train=True), zoo.feed("llama")
    model.gradient_checkpointing_enable()
    sink = MemorySink()
    with capture(model, sink, keep="digest"):
        model(**inputs).loss.backward()
    outputs = [r for r in sink.run().records if r.key.port == "output"]
    by_phase = {
        phase: {r.key.site: r.digest for r in outputs if r.key.phase == phase}
        for phase in ("forward", "recompute")
    }
    again = by_phase["recompute"]
    assert "model.layers.0.mlp.up_proj" in again and "lm_head" not in again
    assert all(by_phase["forward"][site] == digest for site, digest in again.items())


def test_two_captures_at_once_see_the_same() -> None:
    model, inputs = zoo.build("gpt2"), zoo.feed("gpt2")
    outer, inner = MemorySink(), MemorySink()
    with torch.no_grad(), capture(model, outer), capture(model, inner, ports="output"):
        model(**inputs)
    outputs = [r.digest for r in outer.run().records if r.key.port == "output"]
    assert outputs == [r.digest for r in inner.run().records]


def test_threads_keep_separate_stacks() -> None:
    import threading

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate.wait(60)
            return self.inner(x)

    gate = threading.Barrier(2)
    model = nn.ModuleDict({"a": Part(), "b": Part()})
    sink = MemorySink()
    with torch.no_grad(), capture(model, sink, ports="output"):
        workers = [threading.Thread(target=model[n], args=(torch.ones(1, 4),)) for n in "ab"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert {r.key.site for r in sink.run().records} == {"a", "b", "a.inner", "b.inner"}
