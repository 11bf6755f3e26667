"""Gradients: what is read is right, and reading it changes nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from capturing import capturing
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from driftline.captures.torch.session import CaptureSession

EVERYTHING = ("modules", "gradients", "ops", "params")


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(7)


def llama(**options):
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config).train()


def gpt2():
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return GPT2LMHeadModel(config).train()


def language_loss(model):
    ids = torch.arange(24).reshape(2, 12) % 61
    return model(input_ids=ids, labels=ids, use_cache=False).loss


class InPlaceCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.conv(x)
        y += x
        y = self.act(y)
        y = self.act(self.conv(y) * 2)
        return self.head(y.mean((2, 3)))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.out = nn.Linear(6, 6)
        self.out.weight = self.block[0].weight

    def forward(self, x):
        parts = torch.stack([self.block(x), self.block(x * 2)]).unbind(0)
        return self.out(parts[0] + self.block(parts[1]))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 6))
            for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x)
        z, _ = self.attention(y, y, y, need_weights=False)
        return z.cumsum(1) * torch.cumprod(y.sigmoid(), 1) + x.norm(dim=-1, keepdim=True)


def plain_loss(shape):
    def loss(model):
        torch.manual_seed(3)
        return model(torch.randn(shape)).square().mean()

    return loss


def autocast_loss(model):
    with torch.autocast("cpu", torch.bfloat16):
        return plain_loss((4, 6))(model)


MODELS = {
    "llama": (llama, language_loss),
    "llama-eager-tied": (
        lambda: llama(attn_implementation="eager", tie_word_embeddings=True),
        language_loss,
    ),
    "gpt2": (gpt2, language_loss),
    "in-place-cnn": (InPlaceCnn, plain_loss((2, 3, 9, 9))),
    "shared": (Shared, plain_loss((4, 6))),
    "recurrent": (Recurrent, plain_loss((2, 5, 6))),
    "checkpoint-reentrant": (lambda: Checkpointed(True), plain_loss((4, 6))),
    "checkpoint-not-reentrant": (lambda: Checkpointed(False), plain_loss((4, 6))),
    "autocast": (lambda: Checkpointed(None), autocast_loss),
}


def same_bits(model, other):
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), f"gradient of {name} changed"
    for (name, p), (_, q) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(p, q), f"buffer {name} changed"


@pytest.mark.parametrize("levels", [("gradients",), EVERYTHING], ids=["gradients", "everything"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_random_state_are_bitwise_those_without_capture(name, levels):
    build, loss_of = MODELS[name]
    model = build()
    watched = copy.deepcopy(model)
    losses, states = [], []
    for _ in range(2):
        torch.manual_seed(11)
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.detach())
        states.append(torch.get_rng_state())
    with capturing(*levels) as captured:
        for expected, state in zip(losses, states, strict=True):
            torch.manual_seed(11)
            loss = loss_of(watched)
            loss.backward()
            assert torch.equal(loss.detach(), expected)
            assert torch.equal(torch.get_rng_state(), state)
    same_bits(model, watched)
    assert not captured.faults()
    assert captured.of("grad_output") and captured.of("grad_input") and captured.of("param_grad")


@pytest.mark.parametrize("name", MODELS)
def test_two_captures_of_one_program_hold_the_same_keys_and_values(name):
    build, loss_of = MODELS[name]
    model = build()
    runs = []
    for garbage in (float("nan"), 3.0):
        one = copy.deepcopy(model)
        # Freed memory holds this now: whoever reads what was never written reads it.
        litter = [torch.full((size,), garbage) for size in range(1, 2000)]
        del litter
        torch.manual_seed(5)
        with capturing(*EVERYTHING) as captured:
            loss_of(one).backward()
        runs.append(captured.rows)
    assert list(runs[0]) == list(runs[1])
    for key, value in runs[0].items():
        assert torch.allclose(value, runs[1][key], 0, 0, equal_nan=True), str(key)


@pytest.mark.parametrize("name", ["llama", "llama-eager-tied", "gpt2"])
def test_module_gradients_equal_those_of_a_full_backward_hook(name):
    build, loss_of = MODELS[name]
    model = build().eval()
    oracle = copy.deepcopy(model)
    expected = {}
    for site, module in oracle.named_modules():

        def keep(_, inputs, outputs, site=site or "(root)"):
            expected[site] = (inputs, outputs)

        module.register_full_backward_hook(keep)
    with pytest.warns(UserWarning):  # the oracle's own, on outputs it cannot hook
        loss_of(oracle).backward()
    with capturing("gradients") as captured:
        loss_of(model).backward()
    compared = 0
    for site, (inputs, outputs) in expected.items():
        if isinstance(oracle.get_submodule(site.replace("(root)", "")), nn.Dropout):
            continue  # the identity in eval mode: its tensor's gradient is not the module's alone
        for port, gradients in (("grad_input", inputs), ("grad_output", outputs)):
            for gradient in gradients:
                if gradient is None:
                    continue
                rows = [
                    value.float()
                    for value in captured.of(port, site).values()
                    if value.shape == gradient.shape
                ]
                assert any(torch.allclose(r, gradient, rtol=1e-4, atol=1e-8) for r in rows), (
                    f"{port} of {site}"
                )
                compared += 1
    assert compared > 40


def test_grad_input_is_the_module_s_own_part_and_not_the_tensor_s_total():
    inner = nn.Linear(4, 4, bias=False)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return x + self.inner(x)

    x = torch.randn(3, 4, requires_grad=True)
    with capturing("gradients") as captured:
        Residual()(x).sum().backward()
    own = torch.ones(3, 4) @ inner.weight
    assert torch.allclose(captured.one("grad_input", "inner").float(), own)
    assert torch.allclose(captured.one("grad_input", "(root)").float(), own + 1)
    assert torch.allclose(x.grad, own + 1)
    assert torch.equal(captured.one("grad_output", "inner").float(), torch.ones(3, 4))


def test_an_input_that_several_operations_use_gets_the_sum_of_their_parts():
    class Thrice(nn.Module):
        def forward(self, x, y):
            return (x * 2) * (x * 3).exp() - x, y.detach(), x[0] + y[0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.thrice = Thrice()

        def forward(self, x):
            a, _, b = self.thrice(x.sin(), y=x.cos())
            return a.sum() + b.square().sum() + x.sin().sum()

    x = torch.randn(5, 3, requires_grad=True)
    with capturing("gradients", model=(model := Outer())) as captured:
        model(x).backward()
    s, c = x.detach().sin().requires_grad_(), x.detach().cos().requires_grad_()
    a, _, b = Thrice()(s, c)
    (a.sum() + b.square().sum()).backward()
    assert torch.allclose(captured.one("grad_input", "thrice", slot="x").float(), s.grad)
    assert torch.allclose(captured.one("grad_input", "thrice", slot="y").float(), c.grad)
    assert len(captured.of("grad_output", "thrice")) == 2


def test_a_loss_that_ignores_one_output_still_gives_the_grad_input_of_the_other():
    class Two(nn.Module):
        def forward(self, x):
            return x * 2, x * 3

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = Two()

        def forward(self, x):
            return self.two(x + 0)[1]

    x = torch.randn(4, requires_grad=True)
    with capturing("gradients", model=(model := Outer())) as captured:
        model(x).sum().backward()
    assert torch.equal(captured.one("grad_input", "two").float(), torch.full((4,), 3.0))
    assert list(captured.of("grad_output", "two", slot="1"))
    assert not captured.of("grad_output", "two", slot="0")


def test_an_in_place_activation_has_gradients_on_both_sides():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with capturing("gradients", model=model) as captured:
        model(x).sum().backward()
    before = F.linear(x, model[0].weight, model[0].bias)
    arriving = torch.ones(3, 2) @ model[2].weight
    assert torch.allclose(captured.one("grad_output", "1").float(), arriving)
    assert torch.allclose(captured.one("grad_input", "1").float(), arriving * (before > 0))
    assert torch.allclose(captured.one("grad_output", "0").float(), arriving * (before > 0))
    assert not captured.of("grad_input", "0"), "the data need no gradient"


def test_a_module_that_writes_into_a_slice_of_its_input_has_the_right_grad_input():
    class Masks(nn.Module):
        def forward(self, x):
            x[:, 1:].mul_(0.5)
            return x

    model = nn.Sequential(nn.Linear(3, 3), Masks(), nn.Linear(3, 1))
    with capturing("gradients", model=model) as captured:
        model(torch.randn(2, 3)).sum().backward()
    arriving = model[2].weight.detach().expand(2, 3)
    assert torch.allclose(captured.one("grad_output", "1").float(), arriving)
    assert torch.allclose(
        captured.one("grad_input", "1").float(), arriving * torch.tensor([1.0, 0.5, 0.5])
    )


def test_calls_of_one_module_are_visits_in_the_order_of_the_forward_pass():
    model = Shared()
    x = torch.randn(4, 6, requires_grad=True)
    with capturing("gradients", model=model) as captured:
        model(x).sum().backward()
    assert {key.visit for key in captured.of("grad_output", "block")} == {0, 1, 2}
    last = captured.one("grad_output", "block", visit=2).float()
    assert torch.allclose(last, torch.ones(4, 6) @ model.out.weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_have_the_gradients_of_the_plain_model(reentrant):
    plain = Checkpointed(None).eval()
    model = copy.deepcopy(plain)
    model.reentrant = reentrant
    x = torch.randn(4, 6)
    rows = []
    for one in (plain, model):
        with capturing("gradients", model=one) as captured:
            one(x).square().sum().backward()
        assert not captured.faults()
        rows.append(captured)
    for key, value in rows[0].rows.items():
        assert torch.allclose(rows[1].rows[key], value), str(key)
    assert {k for k in rows[0].rows if k.site.startswith("layers.1.")}


def test_a_second_backward_pass_over_one_call_is_a_visit_of_its_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with capturing("gradients", model=model) as captured:
        loss = model(torch.randn(2, 3)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    first = captured.one("grad_input", "1", visit=0)
    assert torch.equal(first, captured.one("grad_input", "1", visit=1))
    assert len(captured.of("param_grad", "0", slot="weight")) == 2


def test_double_backward_gives_the_gradients_it_gives_without_capture():
    model = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 1))
    watched = copy.deepcopy(model)
    x = torch.randn(4, 3)

    def penalty(one):
        data = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(one(data).sum(), data, create_graph=True)
        gradient.square().sum().backward()

    penalty(model)
    with capturing(*EVERYTHING) as captured:
        penalty(watched)
    same_bits(model, watched)
    assert not captured.faults()


def test_the_graph_dies_with_the_program_s_last_reference_to_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    kept = []
    model[1].register_forward_hook(lambda *call: kept.append(weakref.ref(call[2])))
    gc.collect()
    gc.disable()
    try:
        with capturing(*EVERYTHING, model=model):
            for backward in (True, False):
                loss = model(torch.randn(2, 4)).sum()
                if backward:
                    loss.backward()
                del loss
                assert kept[-1]() is None
    finally:
        gc.enable()


def test_a_dropped_model_is_not_kept_by_the_capture():
    with capturing("gradients", "ops", "params"):
        model = nn.Linear(4, 4)
        model(torch.randn(2, 4)).sum().backward()
        weight = weakref.ref(model.weight)
        del model
        gc.collect()
        assert weight() is None


def test_nothing_that_fails_in_the_capture_reaches_the_backward_pass(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    watched = copy.deepcopy(model)
    x = torch.randn(2, 4)
    model(x).sum().backward()

    def broken(*_args, **_kwargs):
        raise RuntimeError("planted")

    with capturing(*EVERYTHING, model=watched) as captured:
        out = watched(x).sum()
        monkeypatch.setattr(CaptureSession, "emit", broken)
        out.backward()
        monkeypatch.undo()
    same_bits(model, watched)
    assert any("planted" in event["message"] for event in captured.events)


def test_micro_batches_are_visits_and_add_up_to_what_the_optimizer_sees_before_clipping():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulated = None
    with capturing("gradients", model=model) as captured:
        for step in range(2):
            for _ in range(3):
                model(torch.randn(5, 4)).square().mean().backward()
            if step == 0:
                accumulated = model.weight.grad.clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step == 0:
                clipped = model.weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    parts = captured.of("param_grad", slot="weight", step=0)
    assert {key.visit for key in parts} == {0, 1, 2}
    assert torch.allclose(sum(parts.values()).float(), accumulated)
    seen = captured.one("optimizer_grad", "(root)", slot="weight", step=0)
    assert torch.equal(seen.float(), clipped)
    assert not torch.allclose(clipped, accumulated)
    assert len(captured.of("optimizer_grad")) == 4


def test_a_tied_parameter_gets_one_total_per_pass_at_its_first_owner():
    model = Shared()
    with capturing("gradients", model=model) as captured:
        model(torch.randn(4, 6)).sum().backward()
    rows = [key for key in captured.of("param_grad") if key.slot == "weight"]
    assert [key.site for key in rows] == ["block.0"]
    assert torch.equal(captured.rows[rows[0]].float(), model.out.weight.grad)


def test_parameters_used_without_calling_their_module_are_known_too():
    model = nn.MultiheadAttention(4, 2)
    with capturing("gradients", model=model) as captured:
        x = torch.randn(3, 1, 4)
        model(x, x, x)[0].sum().backward()
    got = captured.one("param_grad", "out_proj", slot="weight")
    assert torch.equal(got.float(), model.out_proj.weight.grad)


def test_a_parameter_that_is_thawed_later_is_seen_from_then_on():
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    with capturing("gradients", model=model) as captured:
        model(torch.randn(2, 3)).sum().backward()
        model.weight.requires_grad_(True)
        model(torch.randn(2, 3)).sum().backward()
    assert len(captured.of("param_grad", slot="weight")) == 1
    assert len(captured.of("param_grad", slot="bias")) == 2


def test_an_optimizer_s_parameter_outside_every_model_is_named_by_its_place():
    loose = torch.randn(3, requires_grad=True)
    optimizer = torch.optim.SGD([loose], lr=0.1)
    with capturing("gradients") as captured:
        loose.sum().backward()
        optimizer.step()
    assert torch.equal(
        captured.one("optimizer_grad", "(optimizer)", slot="0.0").float(), loose.grad
    )


def test_what_the_user_s_tensor_hooks_change_is_what_is_captured_downstream():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_forward_hook(lambda *call: call[2].register_hook(lambda g: g * 2) and None)
    with capturing("gradients", model=model) as captured:
        model(torch.randn(2, 3)).sum().backward()
    through = captured.one("grad_input", "1")
    assert torch.equal(captured.one("grad_output", "0"), through * 2)


def test_stopping_leaves_no_hook_behind():
    model = nn.Linear(3, 3)
    engine = torch.autograd._engine_run_backward
    with capturing(*EVERYTHING, model=model):
        out = model(torch.randn(2, 3)).sum()
        assert torch.autograd._engine_run_backward is not engine
    assert torch.autograd._engine_run_backward is engine
    assert not model.weight._backward_hooks
    assert not _global_optimizer_pre_hooks
    out.backward()  # hooks that are still in this graph stay silent
    assert model.weight.grad is not None


def test_hooks_do_not_pile_up_on_a_graph_that_is_kept_and_used_again():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.kept = None

        def forward(self):
            if self.kept is None:
                self.kept = self.weight * 2
            return self.kept

    model = Cached()
    with capturing("gradients", model=model) as captured:
        for _ in range(4):
            model().sum().backward(retain_graph=True)
    assert len(captured.of("grad_output")) == 4
    assert len(captured.of("param_grad")) == 4


def test_an_identity_has_a_grad_output_and_no_grad_input_of_its_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Tanh())
    with capturing("gradients", model=model) as captured:
        model(torch.randn(2, 3)).sum().backward()
    assert torch.equal(captured.one("grad_output", "1"), captured.one("grad_input", "2"))
    assert not captured.of("grad_input", "1")


def test_torch_func_transforms_pass_through_unharmed():
    model = nn.Linear(3, 1)
    parameters = dict(model.named_parameters())
    x = torch.randn(4, 3)

    def loss(parameters, one):
        return torch.func.functional_call(model, parameters, (one,)).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    with capturing(*EVERYTHING, model=model):
        got = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"autocast"}))
def test_on_a_cuda_device_nothing_changes_and_the_values_are_those_of_the_host(name, monkeypatch):
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # else products may differ by themselves
    build, loss_of = MODELS[name]
    host = build()
    for module in host.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # devices draw different numbers
    model, watched = copy.deepcopy(host).cuda(), copy.deepcopy(host).cuda()
    with capturing("gradients") as expected:
        loss_of(host).backward()
    torch.set_default_device("cuda")  # the losses make their own data
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        monkeypatch.setattr(torch, "randn", on_host(torch.randn))
        loss = loss_of(model)
        loss.backward()
        with capturing(*EVERYTHING) as captured:
            seen = loss_of(watched)
            seen.backward()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_device("cpu")
    assert torch.equal(loss, seen)
    same_bits(model, watched)
    assert not captured.faults()
    rows = {key: value for key, value in captured.rows.items() if key in expected.rows}
    assert len(rows) == len(expected.rows) > 4
    for key, value in rows.items():
        assert torch.allclose(value, expected.rows[key], rtol=5e-2, atol=1e-4), str(key)


def on_host(function):
    """Random numbers differ between devices: draw them on the host."""
    return lambda *args: function(*args, device="cpu").cuda()
