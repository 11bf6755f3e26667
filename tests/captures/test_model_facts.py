"""What a capture writes about a torch model: nothing of the program runs, and nothing breaks it."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import driftline
from driftline.captures import weight_facts
from driftline.captures.model_facts import NO_SCALAR, class_line, flat_config, scalar
from driftline.captures.torch.tensors import order_free_sum
from driftline.formats.registry import open_run
from driftline.runs.sidecars.model_facts import ModelFacts, grid_of, read_model_facts


def facts_of(tmp_path: Path, model: nn.Module, *inputs: Any, **options: Any) -> ModelFacts:
    with driftline.capture(model, tmp_path / "run", **options), torch.no_grad():
        model(*inputs)
    run = open_run(tmp_path / "run")
    faults = [event for event in run.events() if event["kind"] == "capture-fault"]
    assert not faults
    return read_model_facts(run)


class Odd(nn.Module):
    """Everything that a careless reader of attributes would trip over."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.itself = self.__dict__
        self.ring: list[Any] = []
        self.ring.append(self.ring)
        self.nested: dict[str, Any] = {}
        self.nested["again"] = self.nested
        self.__dict__["raising"] = Raising()
        self.proxy = Proxy()
        self.huge = 10**400
        self.text = "x" * 100_000
        self.many = list(range(10_000))
        self.not_a_number = float("nan")
        self.shape = torch.Size((2, 3))
        self.dtype_wanted = torch.bfloat16
        self.hf_token = "hf_abcdefgh12345678"

    @property
    def costly(self) -> int:
        Odd.calls += 1
        raise RuntimeError("properties are not read")

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Raising:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("this object answers nothing")

    def __repr__(self) -> str:
        raise RuntimeError("not even its name")


class Proxy:
    def __getattr__(self, name: str) -> Any:
        return Proxy()

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("nobody may call this")

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("nobody may compare this")

    __hash__ = object.__hash__


def test_nothing_of_the_program_runs_when_attributes_are_read(tmp_path: Path) -> None:
    Odd.calls = 0
    facts = facts_of(tmp_path, Odd(), torch.ones(1, 4))
    assert Odd.calls == 0
    attributes = facts.attributes("(root)")
    assert attributes["not_a_number"] == "nan" and attributes["shape"] == [2, 3]
    assert attributes["dtype_wanted"] == "torch.bfloat16"
    assert attributes["hf_token"] == "***"
    assert not {"huge", "text", "many", "costly", "ring"} & set(attributes)
    assert facts.attributes("layer") == {"in_features": 4, "out_features": 4}


def test_a_model_that_holds_itself_is_described_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_module("back", model[0])
    facts = facts_of(tmp_path, model, torch.ones(1, 2))
    assert list(facts.modules) == ["(root)", "0"]


def test_ties_meta_lazy_and_parametrized_tensors(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.unused = nn.Linear(4, 4, device="meta")
            self.lazy = nn.LazyLinear(3)
            self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
            self.plain = torch.arange(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.normed(self.b(self.a(x)))

    facts = facts_of(tmp_path, Net(), torch.ones(1, 4))
    tensors = facts.tensors
    assert tensors["b.weight"].tied == "a.weight" and not tensors["a.weight"].tied
    assert tensors["unused.weight"].unreadable == "not readable: on the meta device"
    assert "lazy" in tensors["lazy.weight"].unreadable
    assert tensors["normed.weight"].unreadable == "not readable: computed by _WeightNorm"
    assert not [name for name in (*tensors, *facts.modules) if "parametrizations" in name]
    assert facts.modules["normed"].class_name == "torch.nn.modules.linear.Linear"
    assert tensors["plain"].is_buffer and facts.weights["plain"].digest
    assert set(facts.weights) == {"a.weight", "a.bias", "b.bias", "normed.bias", "plain"}


def test_values_are_those_before_the_first_call(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(4).train()
    with driftline.capture(norm, tmp_path / "run"):
        norm(torch.randn(8, 4) + 5)
    weights = read_model_facts(open_run(tmp_path / "run")).weights
    mean = weights["running_mean"].whole()
    assert mean is not None and not mean.any()
    assert norm.running_mean is not None and bool(norm.running_mean.any())


def test_an_optimizer_waits_until_its_weights_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = weight_facts.WeightReader.line

    def line(self: Any, *args: Any, **kwargs: Any) -> str:
        if threading.current_thread().name == "driftline-weights":
            time.sleep(0.05)
        return slow(self, *args, **kwargs)

    monkeypatch.setattr(weight_facts.WeightReader, "line", line)
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with driftline.capture(model, tmp_path / "run"):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    kept = read_model_facts(open_run(tmp_path / "run")).weights["weight"]
    assert kept.whole() is not None
    assert np.array_equal(kept.whole(), before.double().numpy())  # type: ignore[arg-type]


def test_a_model_that_changes_while_it_runs(tmp_path: Path) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            self.parts.append(nn.Linear(2, 2))
            return x

    model = Growing()
    with driftline.capture(model, tmp_path / "run"), torch.no_grad():
        model(torch.ones(1, 2))
        model.eval()
        model(torch.ones(1, 2))
    facts = read_model_facts(open_run(tmp_path / "run"))
    assert "parts.0" in facts.modules and "parts.1" not in facts.modules
    changed = {(line["kind"], line.get("site")) for line in facts.changes}
    assert ("module", "parts.1") in changed and ("module", "(root)") in changed
    root = next(line for line in facts.changes if line.get("site") == "(root)")
    assert root["mode"] == "eval" and root["step"] == 1


def test_what_is_turned_off_is_not_written(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, nn.Linear(2, 2), torch.ones(1, 2), weight_facts=False)
    assert facts.modules and not facts.weights
    assert not (tmp_path / "run" / "rank0" / "weights.jsonl").exists()


def test_samples_are_an_even_grid_and_digests_those_of_the_index(tmp_path: Path) -> None:
    model = nn.Linear(300, 200)
    with (
        driftline.capture(model, tmp_path / "run", levels=("modules", "params")),
        torch.no_grad(),
    ):
        model(torch.ones(1, 300))
    run = open_run(tmp_path / "run")
    kept = read_model_facts(run).weights["weight"]
    samples = kept.samples()
    assert samples is not None and samples.shape == grid_of((200, 300)) == (64, 64)
    assert samples[1, 1] == float(model.weight.detach()[200 // 64, 300 // 64])
    stored = {record.digest for record in run.records if record.key.port == "param"}
    assert kept.digest in stored
    half = model.weight.detach().bfloat16()
    other = nn.Linear(300, 200).bfloat16()
    other.weight.data.copy_(half)
    with driftline.capture(other, tmp_path / "other"), torch.no_grad():
        other(torch.ones(1, 300, dtype=torch.bfloat16))
    rounded = read_model_facts(open_run(tmp_path / "other")).weights["weight"]
    assert kept.rounded["bfloat16"] == rounded.digest
    assert kept.unordered["bfloat16"] == rounded.unordered["own"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "int8", "uint8"])
def test_a_device_hashes_elements_as_the_host_does(dtype: str) -> None:
    values = torch.linspace(-3e4, 3e4, 4099, dtype=torch.float64)
    values[:4] = torch.tensor([math.nan, math.inf, -0.0, -1.0])
    tensor = (
        values.to(getattr(torch, dtype))
        if "int" not in dtype
        else values[4:].to(getattr(torch, dtype))
    )
    raw = tensor.view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")
    found = weight_facts.order_free_text(tensor.numel(), int(order_free_sum(tensor)))
    assert found == weight_facts.order_free(raw)
    if "float" in dtype:
        half = np.empty(len(tensor), np.uint16)
        weight_facts._to_bfloat16(tensor.float().numpy(), half)
        rounded = int(order_free_sum(tensor, as_bfloat16=True))
        assert weight_facts.order_free_text(len(half), rounded) == weight_facts.order_free(half)
    shuffled = tensor[torch.randperm(len(tensor))]
    assert int(order_free_sum(shuffled)) == int(order_free_sum(tensor))


def test_beyond_the_limit_only_samples_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_facts, "MOST_BYTES", 1000)
    facts = facts_of(tmp_path, nn.Linear(300, 200), torch.ones(1, 300))
    kept = facts.weights["weight"]
    assert kept.basis == "sample" and not kept.digest and kept.samples() is not None
    assert any("an even sample" in note for note in facts.notes)


def test_the_process_is_described_with_its_modes(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        driftline.capture(model, tmp_path / "run"),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(torch.ones(1, 2))
    process = read_model_facts(open_run(tmp_path / "run")).process
    assert process["autocast_cpu"] == "bfloat16" and process["inference_mode"] is True
    assert process["default_dtype"] == "float32" and "math" in process["sdpa_allowed"]


def test_a_program_that_leaves_at_once_does_not_wait_for_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from driftline.captures.torch import model_facts

    slow, left = weight_facts.WeightReader.line, threading.Event()

    def line(self: Any, *args: Any, **kwargs: Any) -> str:
        if threading.current_thread().name == "driftline-weights":
            left.wait(100)
        return slow(self, *args, **kwargs)

    monkeypatch.setattr(weight_facts.WeightReader, "line", line)
    monkeypatch.setattr(model_facts, "_LAST_SECONDS", 0.05)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    capture = driftline.capture(model, tmp_path / "run")
    capture.__enter__()
    model(torch.ones(1, 4))
    thread = threading.Thread(
        target=capture.session.stop, name=model_facts.EXIT_THREAD, daemon=True
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for its weights"
    left.set()
    run = open_run(tmp_path / "run")
    assert run.sealed
    assert any("before all of its weights" in note for note in read_model_facts(run).notes)


def test_gradient_checkpointing_is_seen(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Net()
    with driftline.capture(model, tmp_path / "run"):
        model(torch.ones(1, 3)).sum().backward()
    assert read_model_facts(open_run(tmp_path / "run")).process["recomputes_forward"] is True


def test_patches_of_training_are_taken_back(tmp_path: Path) -> None:
    before = torch.autograd.backward, nn.utils.clip_grad_norm_, torch.optim.Optimizer.zero_grad
    model = nn.Linear(2, 2)
    with driftline.capture(model, tmp_path / "run"):
        assert torch.autograd.backward is not before[0]
        model(torch.ones(1, 2)).sum().backward()
    after = torch.autograd.backward, nn.utils.clip_grad_norm_, torch.optim.Optimizer.zero_grad
    assert before == after


def test_a_hundred_thousand_modules() -> None:
    from driftline.captures.model_facts import FactOptions
    from driftline.captures.torch.session import CaptureSession
    from driftline.runs.memory import MemorySink
    from driftline.runs.sidecars.model_facts import MODEL

    model = nn.Module()
    for number in range(100_000):
        model._modules[f"m{number}"] = nn.Identity()
    sink = MemorySink()
    session = CaptureSession(sink, model=model)
    session.describe_models(FactOptions())
    place = session.names.of(model, None)
    assert place is not None and session.model_facts is not None
    begun = time.process_time()
    session.model_facts.before_root(place, model)
    assert time.process_time() - begun < 20
    session.recorder.tensors = 1
    session.model_facts.finish()
    lines = sink.run().sheet(MODEL).count('"kind":"module"')
    assert lines == 100_001


def test_a_large_model_without_its_weights_costs_a_tenth_of_a_second(tmp_path: Path) -> None:
    from driftline.captures.model_facts import FactOptions
    from driftline.captures.torch.session import CaptureSession
    from driftline.runs.memory import MemorySink

    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(24)]
    model = nn.Sequential(*layers)
    session = CaptureSession(MemorySink(), model=model)
    session.describe_models(FactOptions(weights=False))
    place = session.names.of(model, None)
    assert place is not None and session.model_facts is not None
    # Processor time, and the best of several: other work on the machine is not this code's.
    times: list[float] = []
    for _ in range(5):
        session.model_facts.after_fork()
        begun = time.process_time()
        session.model_facts.before_root(place, model)
        times.append(time.process_time() - begun)
    assert min(times) < 0.1
    again: list[float] = []
    for _ in range(200):
        begun = time.process_time()
        session.model_facts.before_root(place, model)
        again.append(time.process_time() - begun)
    # Once per call of a model of 240 modules: far below a microsecond for each of their calls.
    assert min(again) / len(list(model.modules())) < 1e-6


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    facts_of(tmp_path, nn.Linear(2, 2), torch.ones(1, 2))
    path = tmp_path / "run" / "rank0" / "model.jsonl"
    weights = tmp_path / "run" / "rank0" / "weights.jsonl"
    path.write_text(
        path.read_text()
        + '[]\n{"kind":"module","site":7,"attributes":[1],"hooks":{"forward":3}}\n{"kind":"ten\n'
        + '{"kind":"tensor","shape":[-1, "x"],"name":{}}\n{"kind":"class","code":{"f":5}}\n'
    )
    weights.write_text(
        weights.read_text()
        + '{"kind":"weight","site":"(root)","name":"w","shape":[9],"dtype":"float32",'
        '"samples":"%%%","summary":{"count":"x"},"rounded":3}\n'
    )
    facts = read_model_facts(open_run(tmp_path / "run"))
    assert facts.modules["(root)"].short_class == "Linear"
    assert facts.weights["w"].samples() is None and facts.weights["w"].summary is None
    from driftline.comparison.differences.find import differences_of

    run = open_run(tmp_path / "run")
    assert differences_of(run, run) == ()


def test_a_configuration_that_refers_to_itself_is_flat() -> None:
    class Config:
        def __init__(self) -> None:
            self.size = 3
            self.inner: Any = {"rate": 0.5, "deep": {"api_key": "abc", "list": [1, 2]}}
            self.again = self

    flat = flat_config(Config(), set())
    assert flat == {
        "size": 3,
        "inner.rate": 0.5,
        "inner.deep.api_key": "***",
        "inner.deep.list": [1, 2],
    }


def test_code_that_only_moved_is_the_same() -> None:
    def made(text: str) -> Any:
        space: dict[str, Any] = {"nn": nn, "__name__": "somewhere"}
        import types

        types.FunctionType(compile(text, "made.py", "exec"), space)()
        return space["Net"]

    source = "class Net(nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    moved = "\n\n# a comment\n" + source.replace("x):\n", "x):\n        # why\n")

    def digest(line: str) -> str:
        return line.partition('"digest":"')[2].partition('"')[0]

    first, second = class_line(made(source)), class_line(made(moved))
    assert digest(first) == digest(second) != ""
    assert digest(first) != digest(class_line(made(source.replace("+ 1", "+ 2"))))


def test_scalars_of_many_kinds() -> None:
    from enum import Enum

    class Colour(Enum):
        RED = 1

    class Count(int):
        def __repr__(self) -> str:
            raise RuntimeError("a number with its own text")

    assert scalar(Colour.RED) == "Colour.RED" and scalar(Count(3)) == 3
    assert scalar(np.float32(0.5)) == 0.5 and scalar(torch.float16) == "torch.float16"
    assert scalar(np.dtype(np.int8)) == "int8" and scalar(np.zeros(2)) is NO_SCALAR
    assert scalar(torch.device("cpu")) == "cpu" and scalar(1 + 2j) == "(1+2j)"


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.proj(x).view(2, 8, 4, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def test_the_attention_back_end_in_use_is_recorded(tmp_path: Path) -> None:
    x, plain = torch.randn(2, 8, 32), nn.functional.scaled_dot_product_attention
    fast = facts_of(tmp_path / "fast", _Attends(), x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        slow = facts_of(tmp_path / "slow", _Attends(), x)
    assert fast.process["sdpa_used"] == ["flash"]
    assert slow.process["sdpa_used"] == ["math"]
    assert "sdpa_used" not in facts_of(tmp_path / "none", nn.Linear(32, 4), x).process
    assert nn.functional.scaled_dot_product_attention is plain


def test_attention_is_scripted_traced_and_compiled_as_without_a_capture(tmp_path: Path) -> None:
    model, x = _Attends(), torch.randn(2, 8, 32)
    expected = model(x)
    with driftline.capture(model, tmp_path / "run"):
        assert torch.equal(torch.jit.script(model)(x), expected)
        nodes = torch.fx.symbolic_trace(model).graph.nodes
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
        rows = torch.func.vmap(nn.functional.scaled_dot_product_attention)(*[expected[None]] * 3)
        model(x)
    assert torch._C._nn.scaled_dot_product_attention in [node.target for node in nodes]
    assert rows.shape == (1, *expected.shape)
    assert not [
        event for event in open_run(tmp_path / "run").events() if event["kind"] == "capture-fault"
    ]
