"""Operators: each aten call is seen where it ran, with its values, and nothing is changed."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from capturing import capturing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

WITHOUT_VALUES = {"aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.new_empty"}


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(7)


class Logging(TorchDispatchMode):
    """A plain mode: what the program's operators are."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((func, out))
        return out


def with_values(seen):
    """Name and first output of the operators that have values of their own."""
    named = [
        (func._schema.name.replace("::", "."), func.is_view, out[0] if type(out) is tuple else out)
        for func, out in seen
    ]
    return [
        (name, out)
        for name, is_view, out in named
        if not is_view and name not in WITHOUT_VALUES and isinstance(out, torch.Tensor)
    ]


def llama():
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


IDS = torch.arange(24).reshape(2, 12) % 61


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_operators_are_those_a_plain_dispatch_mode_sees(mode):
    model = llama().eval()
    with mode(), Logging() as log:
        model(IDS, use_cache=False)
    with capturing("ops", model=model) as captured, mode():
        model(IDS, use_cache=False)
    expected = with_values(log.seen)
    ran = [key for key in captured.of("output") if key.slot == "0"]
    assert [key.site.split("/")[1] for key in ran] == [name for name, _ in expected]
    assert len(ran) > 40
    for key, (_, value) in zip(ran, expected, strict=True):
        assert torch.equal(captured.rows[key], value.double()), str(key)


def test_an_operator_s_site_is_the_innermost_module_it_ran_in():
    model = llama().eval()
    with capturing("ops", model=model) as captured, torch.no_grad():
        model(IDS, use_cache=False)
    sites = {key.site for key in captured.rows}
    assert "model.layers.1.mlp.down_proj/aten.mm" in sites
    assert "model.layers.1.mlp/aten.mul" in sites
    assert "model.layers.0.mlp.act_fn/aten.silu" in sites
    assert "model.embed_tokens/aten.embedding" in sites
    key = next(k for k in captured.rows if k.site == "model.layers.1.mlp/aten.mul")
    assert captured.classes[key] == "aten.mul.Tensor"


def test_backward_operators_belong_to_the_module_whose_forward_made_them():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    with capturing("ops", model=model) as captured:
        torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2)).backward()
    backward = captured.of("output", phase="backward")
    sites = {key.site for key in backward}
    assert "1/aten.sigmoid_backward" in sites
    assert "(backward)/aten.mse_loss_backward" in sites
    assert len([k for k in backward if k.site == "2/aten.mm"]) == 2
    assert len([k for k in backward if k.site == "0/aten.mm"]) == 1
    weight = [v for k, v in backward.items() if k.site == "0/aten.mm"]
    assert torch.equal(weight[0].float(), model[0].weight.grad) or torch.equal(
        weight[0].float().T, model[0].weight.grad
    )


def test_views_fresh_memory_and_parameters_are_not_read():
    model = nn.Linear(4, 4)
    weight = model.weight.detach().double()
    with capturing("ops", model=model) as captured:
        model(torch.randn(2, 4)).sum().backward()
    assert not {
        k for k in captured.rows if k.site.endswith(("aten.t", "aten.detach", "aten.empty"))
    }
    assert not [
        v
        for v in captured.of("input").values()
        if v.numel() and v.shape == (4, 4) and (torch.equal(v, weight) or torch.equal(v, weight.T))
    ]
    assert captured.of("input", "(root)/aten.addmm", slot="mat1")


def test_an_in_place_operator_has_the_value_before_as_input_and_after_as_output():
    class Doubles(nn.Module):
        def forward(self, x):
            y = x + 0
            y.mul_(2)
            torch.add(y, 1, out=y)
            return y

    x = torch.randn(5)
    with capturing("ops", model=(model := Doubles())) as captured:
        model(x)
    x = x.double()
    assert torch.equal(captured.one("input", "(root)/aten.mul_", slot="self"), x)
    assert torch.equal(captured.one("output", "(root)/aten.mul_"), x * 2)
    after = captured.one("output", "(root)/aten.add", visit=1)
    assert torch.allclose(after, x * 2 + 1, atol=1e-6)
    assert torch.equal(captured.one("input", "(root)/aten.add", visit=1, slot="self"), x * 2)


def test_memory_that_is_overwritten_unread_is_no_input():
    class Fills(nn.Module):
        def forward(self, x):
            y = torch.empty_like(x).bernoulli_(0.5)
            z = torch.empty_like(x)
            torch.mul(x, y, out=z)
            return z.copy_(x)

    with capturing("ops", model=(model := Fills())) as captured:
        model(torch.randn(4))
    inputs = {(key.site, key.slot) for key in captured.of("input")}
    assert inputs == {
        ("(root)/aten.mul", "self"),
        ("(root)/aten.mul", "other"),
        ("(root)/aten.copy_", "src"),
    }
    assert captured.of("output", "(root)/aten.bernoulli_")


def test_what_an_operator_writes_into_its_arguments_counts_as_output():
    model = nn.BatchNorm1d(3)
    with capturing("ops", model=model, ports=("output",)) as captured:
        model(torch.randn(4, 3))
    written = {k.slot: v for k, v in captured.of("output").items() if "batch_norm" in k.site}
    assert torch.equal(written["running_mean"].float(), model.running_mean)
    assert torch.equal(written["running_var"].float(), model.running_var)


def test_overloads_of_one_operator_share_its_visits():
    class Adds(nn.Module):
        def forward(self, x):
            return torch.cat([x.mean() + x, x.mean(0, True) + 1, x + x])

    with capturing("ops", model=(model := Adds())) as captured:
        model(torch.randn(3))
    assert {k.visit for k in captured.of("output", "(root)/aten.mean")} == {0, 1}
    assert {k.visit for k in captured.of("output", "(root)/aten.add")} == {0, 1, 2}
    assert {k.slot for k in captured.of("input", "(root)/aten.cat")} == {
        "tensors.0",
        "tensors.1",
        "tensors.2",
    }


def test_recomputed_operators_are_told_apart_from_the_first_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x):
            return checkpoint(self.inner, x * 2, use_reentrant=False)

    with capturing("ops", model=(model := Model())) as captured:
        model(torch.randn(3, requires_grad=True)).sum().backward()
    phases = sorted(k.phase for k in captured.of("output", "inner/aten.tanh"))
    assert phases == ["forward", "recompute"]
    assert captured.of("output", "inner/aten.tanh_backward", phase="backward")


def test_dropout_draws_the_same_numbers_with_capture():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    expected, state = model(x), torch.get_rng_state()
    torch.manual_seed(1)
    with capturing("ops", "modules", model=model):
        assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize(
    "formula",
    [
        lambda x, v: x.prod(1),
        lambda x, v: x.prod(),
        lambda x, v: x.cumprod(1),
        lambda x, v: x.masked_fill(x > 0, v) * x,
    ],
    ids=["prod", "prod-all", "cumprod", "masked_fill"],
)
def test_gradients_that_a_mode_would_change_are_left_alone_and_the_run_says_so(formula, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.value = nn.Parameter(torch.tensor(0.3))

        def forward(self, x):
            x = self.linear(x)
            if reentrant is None:
                return formula(x, self.value)
            return checkpoint(formula, x, self.value, use_reentrant=reentrant)

    model = Model()
    watched = copy.deepcopy(model)
    x = torch.randn(7, 5)
    model(x).square().sum().backward()
    with capturing("ops", "gradients") as captured:
        watched(x).square().sum().backward()
    for p, q in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad) if p.grad is not None else q.grad is None
    assert "operators-unseen" in {event["kind"] for event in captured.events}
    assert not captured.faults()
    assert captured.of("param_grad")


def test_two_captures_at_once_see_the_same_and_the_last_one_clears_up():
    engine = torch.autograd._engine_run_backward
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with capturing("ops", "gradients", model=model) as first:
        with capturing("ops", "gradients", model=model) as second:
            model(torch.randn(2, 4)).sum().backward()
        assert torch.autograd._engine_run_backward is not engine
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert torch.autograd._engine_run_backward is engine
    assert _get_current_dispatch_mode_stack() == []
    assert first.rows.keys() == second.rows.keys()
    assert all(torch.equal(value, second.rows[key]) for key, value in first.rows.items())


def test_the_fused_path_of_the_transformer_encoder_stays_taken():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x)
        with capturing("ops", model=model) as captured:
            assert torch.equal(model(x), expected)
    assert "layers.0/aten._transformer_encoder_layer_fwd" in {key.site for key in captured.rows}


def test_the_program_s_own_mode_sees_its_own_operators_and_is_taken_off_again():
    model = llama().eval()
    with torch.no_grad(), Logging() as alone:
        model(IDS, use_cache=False)
    with capturing("ops", "modules", "gradients", "params"), torch.no_grad():
        with Logging() as log:
            model(IDS, use_cache=False)
        assert log not in _get_current_dispatch_mode_stack()
    assert _get_current_dispatch_mode_stack() == []
    assert [f for f, _ in log.seen] == [f for f, _ in alone.seen]


def test_an_exception_of_the_model_passes_and_leaves_one_mode():
    class Fails(nn.Module):
        def forward(self, x):
            return torch.mm(x + 1, x)

    model = Fails()
    with capturing("ops", model=model) as captured:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(2, 3))
        assert len(_get_current_dispatch_mode_stack()) == 1
        model(torch.randn(3, 3))
    assert len(captured.of("output", "(root)/aten.add")) >= 1
    assert captured.of("output", "(root)/aten.mm")


def counting_backend(counts):
    def backend(graph, _inputs):
        counts.append(len(list(graph.graph.nodes)))
        return graph.forward

    return backend


@pytest.mark.parametrize("form", ["wrapped", "in place"])
def test_a_compiled_model_is_compiled_to_the_same_graphs(form):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.down(nn.functional.gelu(self.up(x)))

    plain = Mlp()
    x = torch.randn(3, 4)
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        counts = []
        model = copy.deepcopy(plain)
        if form == "wrapped":
            call = torch.compile(model, backend=counting_backend(counts))
        else:
            model.compile(backend=counting_backend(counts))
            call = model
        if watched:
            with capturing("ops", "modules", "gradients") as captured:
                out = call(x)
                out.sum().backward()
                out = call(x)
            assert not captured.faults()
        else:
            out = call(x)
            out.sum().backward()
            out = call(x)
        results.append((counts, out.detach(), model.up.weight.grad))
    torch._dynamo.reset()
    (counts, out, gradient), (counts_w, out_w, gradient_w) = results
    assert counts and counts_w == counts
    assert torch.equal(out, out_w) and torch.equal(gradient, gradient_w)


def test_flex_attention_runs_under_capture():
    from torch.nn.attention.flex_attention import flex_attention

    class Attention(nn.Module):
        def forward(self, q):
            return flex_attention(q, q, q)

    q = torch.randn(1, 2, 16, 8)
    model = Attention()
    with torch.no_grad():
        expected = model(q)
        with capturing("ops", "modules", model=model) as captured:
            got = model(q)
    torch._dynamo.reset()
    assert torch.equal(got, expected)
    assert not captured.faults()
    assert captured.rows


def test_capture_of_operators_does_not_load_dynamo():
    program = """
import sys, torch
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink
sink = MemorySink()
session = CaptureSession(sink, levels=("ops", "gradients", "params")).start()
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
session.stop()
assert sink.tensors_written > 8, sink.tensors_written
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
