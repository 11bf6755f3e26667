"""Operators that run in no module: losses, sampling, optimizers, programs without any module."""

from __future__ import annotations

import io
import subprocess
import threading

import pytest
import torch
import torch.nn.functional as F
from capturing import capturing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from driftline.captures.torch.framework import capture
from driftline.captures.torch.operators import build_phase
from driftline.runs.memory import MemorySink


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(7)


class Logging(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def sites(captured, port="output"):
    return [key.site for key in captured.of(port)]


def test_a_functional_loss_belongs_to_the_program_and_to_the_current_step():
    model, target = network(), torch.tensor([1, 2])
    with capturing("ops", model=model) as captured:
        for _ in range(2):
            loss = F.cross_entropy(model(torch.randn(2, 6)), target)
    for step in range(2):
        found = captured.of("output", "(program)/aten.nll_loss_forward", step=step, slot="0")
        assert [key.visit for key in found] == [0]
    assert torch.equal(
        captured.one("output", "(program)/aten.nll_loss_forward", step=1, slot="0"), loss.double()
    )


def test_what_a_sampling_loop_does_with_the_logits_is_seen_step_by_step():
    model = network().eval()
    with torch.no_grad(), capturing("ops") as captured:
        x = torch.randn(1, 6)
        for _ in range(3):
            chosen = model(x).softmax(-1).argmax(-1)
            x = x + chosen
    assert [(k.step, k.visit) for k in captured.of("output", "(program)/aten.argmax")] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert captured.of("input", "(program)/aten._softmax", step=2)


def test_what_a_program_does_before_its_first_call_of_a_model_is_left_out():
    with capturing("ops") as captured:
        model = network()
        nn.init.orthogonal_(model[0].weight)
        x = torch.randn(2, 6).mul(2)
        model(x).softmax(-1)
    found = sites(captured)
    assert found[0] == "0/aten.addmm"
    assert found[-1] == "(program)/aten._softmax"
    assert not [site for site in found if "normal" in site or "randn" in site]


def test_preprocessing_in_a_module_without_parameters_is_kept():
    with capturing("ops") as captured:
        model = network()
        x = nn.Softmax(-1)(torch.randn(2, 6))
        model(x)
    assert sites(captured)[0] == "Softmax/aten._softmax"
    assert sites(captured)[1] == "0/aten.addmm"


def test_visits_do_not_count_what_was_left_out():
    with capturing("ops") as captured:
        model = network()
        torch.ones(2).mul(2).mul(3)
        torch.ones(2).mul(model(torch.ones(6)).sum())
    assert [key.visit for key in captured.of("output", "(program)/aten.mul")] == [0]


def test_a_program_without_modules_has_all_its_operators_in_order():
    with capturing("ops") as captured:
        a = torch.randn(3, 3)
        b = (a @ a).add_(1)
        b.relu_()
    assert sites(captured) == [
        "(program)/aten.randn",
        "(program)/aten.mm",
        "(program)/aten.add_",
        "(program)/aten.relu_",
    ]
    # The copy was taken before the in-place operators that followed.
    assert torch.allclose(captured.one("output", "(program)/aten.mm"), (a @ a).double())
    assert torch.equal(captured.one("output", "(program)/aten.relu_"), b.double())


def test_in_a_with_block_everything_is_captured_from_its_begin():
    model, sink = network(), MemorySink()
    with capture(model, sink, levels="ops"):
        x = torch.ones(2, 6).mul(3)
        model(x)
    found = [t.key.site for t in sink.run().tensors() if t.key.port == "output"]
    assert found[:2] == ["(program)/aten.ones", "(program)/aten.mul"]
    assert "2/aten.addmm" in found


def test_a_long_program_without_modules_is_written_while_it_runs(warm_python):
    program = """
import torch
from driftline.captures.torch.operators import build_phase as held
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink
held.MOST_BYTES = 4000
sink = MemorySink()
session = CaptureSession(sink, levels="ops").start()
x = torch.ones(100)
for _ in range(20):
    x = x.mul(1.5)
assert sink.tensors_written > 20, sink.tensors_written
session.stop()
found = [t.key.visit for t in sink.run().tensors() if t.key.site.endswith("mul")]
assert found == [visit for visit in range(20) for _ in ("self", "0")], found
"""
    assert subprocess.run([warm_python, "-c", program], check=False).returncode == 0


def test_a_large_model_is_not_held_in_memory_while_it_is_built(monkeypatch):
    monkeypatch.setattr(build_phase, "MOST_BYTES", 4000)
    with capturing("ops") as captured:
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
        assert captured.sink.tensors_written == 0
        model(torch.ones(1, 40)).exp()
    assert sites(captured)[0] == "0/aten.addmm"
    assert sites(captured)[-1] == "(program)/aten.exp"
    with capturing("ops") as never_called:
        nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
        assert model is not None
    assert "operators-left-out" in {event["kind"] for event in never_called.events}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_s_arithmetic_goes_by_its_class(kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    with capturing("ops") as captured:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 6)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.ones(2).neg()
    mine = [k for k in captured.rows if k.site.startswith(f"{kind.__name__}/")]
    assert {key.step for key in mine} == {0, 1}
    assert captured.of("output", "(program)/aten.neg", step=2)
    last = [v for k, v in captured.rows.items() if k in mine and k.step == 1 and k.port == "output"]
    weight = model[2].weight.detach().double()
    assert any(v.shape == weight.shape and torch.equal(v, weight) for v in last)


def test_an_optimizer_makes_steps_of_a_program_without_modules():
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    with capturing("ops") as captured:
        for _ in range(3):
            optimizer.zero_grad()
            w.square().sum().backward()
            optimizer.step()
    assert {key.step for key in captured.of("output", "(program)/aten.pow")} == {0, 1, 2}


def test_a_module_that_is_not_the_watched_model_s_goes_by_its_class():
    model, teacher, loss = network(), network(), nn.CrossEntropyLoss()
    with capturing("ops", model=model) as captured:
        with torch.no_grad():
            target = teacher(torch.ones(2, 6)).softmax(-1)
        loss(model(torch.ones(2, 6)), target)
    found = sites(captured)
    assert "Sequential/aten.addmm" in found
    assert "CrossEntropyLoss/aten._log_softmax" in found
    assert "(program)/aten._softmax" in found
    assert found.count("0/aten.addmm") == 1


def test_the_operators_outside_are_those_a_plain_mode_sees():
    model = network()

    def program():
        model.zero_grad()
        x = torch.randn(4, 6)
        y = F.normalize(model(x), dim=-1)
        loss = F.mse_loss(y, torch.zeros_like(y)) + y.abs().max()
        loss.backward()
        return y.detach().topk(2).indices.float().mean()

    with Logging() as alone:
        program()
    with capturing("ops", "modules", "gradients", "params", model=model) as captured:
        with Logging() as log:
            program()
        assert log.seen == alone.seen
        program()
    assert len(captured.of("output", "(program)/aten.topk")) == 4
    assert not captured.faults()


def test_two_models_that_count_their_own_steps_share_no_address():
    main, draft = network().eval(), network().eval()
    with torch.no_grad(), capturing("ops") as captured:
        x = torch.randn(1, 6)
        for _ in range(3):
            for _ in range(2):
                draft(x).softmax(-1)
            main(x).softmax(-1)
    # Nine calls; a key that came twice would have replaced the first.
    assert len(captured.of("output", "(program)/aten._softmax")) == 9
    assert len([s for s in sites(captured) if s.endswith("0/aten.addmm")]) == 9


# --- in nobody's way


def test_the_program_s_modes_come_and_go_in_any_order():
    model, outer = network(), Logging()
    x = torch.ones(2, 6)
    outer.__enter__()
    with capturing("ops", model=model) as captured:
        inner = Logging()
        inner.__enter__()
        model(x).exp()
        inner.__exit__(None, None, None)
        before = len(inner.seen)
        outer.__exit__(None, None, None)  # begun before the capture, ended inside
        assert len(_get_current_dispatch_mode_stack()) == 1
        last = Logging()
        last.__enter__()  # begun inside, ended after
        torch.ones(2).sin()
    assert _get_current_dispatch_mode_stack() == [last]
    torch.ones(2).cos()
    last.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []
    assert len(inner.seen) == before and outer.seen[-1] is inner.seen[-1]
    assert torch.ops.aten.cos.default in last.seen
    assert {"(program)/aten.exp", "(program)/aten.sin"} <= set(sites(captured))
    assert "(program)/aten.cos" not in sites(captured)


def test_a_generator_that_holds_a_mode_open_does_not_lose_it():
    def tokens():
        with Logging() as log:
            for _ in range(3):
                torch.ones(2).neg()
                yield log

    model = network()
    stream = tokens()
    next(stream)
    with capturing("ops", model=model) as captured:
        model(torch.ones(1, 6))
        log = next(stream)
        stream.close()
        assert log not in _get_current_dispatch_mode_stack()
        torch.ones(2).exp()
    assert torch.ops.aten.exp.default not in log.seen
    assert "(program)/aten.exp" in sites(captured)
    assert _get_current_dispatch_mode_stack() == []


def test_a_thread_that_calls_the_model_is_seen_and_its_stack_is_clean_afterwards():
    model = network()
    left = []

    def serve():
        model(torch.ones(2, 6)).softmax(-1)
        left.append(_get_current_dispatch_mode_stack())

    with capturing("ops", model=model) as captured:
        worker = threading.Thread(target=serve)
        worker.start()
        worker.join()
    assert left == [[]]
    assert "2/aten.addmm" in sites(captured)
    with capturing("ops") as captured:  # the whole process: a server's thread stays in sight
        worker = threading.Thread(target=serve)
        worker.start()
        worker.join()
    assert "(program)/aten._softmax" in sites(captured)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((6,), float(index)).mul(0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_workers_are_left_alone(workers):
    model = network()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=workers)
    with capturing("ops") as captured:
        got = [model(batch) for batch in loader]
    assert all(
        torch.equal(a, model(b))
        for a, b in zip(got, torch.utils.data.DataLoader(Numbers(), 4), strict=True)
    )
    assert not captured.faults()
    assert (("(program)/aten.mul") in sites(captured)) == (workers == 0)


def _fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = torch.randn(3, 4) @ torch.randn(4, 5)
    return torch.tensor(y.shape)


def _compiled(backend):
    def run():
        torch._dynamo.reset()
        x = torch.randn(8, 8, requires_grad=True)
        f = torch.compile(lambda x: (x.sin() @ x).softmax(-1).sum(), backend=backend)
        f(x).backward()
        torch._dynamo.reset()
        return x.grad

    return run


def _export():
    program = torch.export.export(network(), (torch.ones(2, 6),))
    text = str(program.graph).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _made_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: x.sin().sum() * 2)(torch.ones(3))
    return torch.frombuffer(bytearray(str(graph.code).encode()), dtype=torch.uint8)


def _saved():
    buffer = io.BytesIO()
    torch.save({"a": torch.randn(5), "net": network().state_dict()}, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=True)
    return torch.cat([back["a"], back["net"]["0.weight"].flatten()])


def _printed():
    text = repr(torch.randn(4, 4)) + str(torch.randn(3, requires_grad=True) * 2)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _transforms():
    w = torch.randn(4, 3)
    f = lambda x: (x @ w).tanh().prod()  # noqa: E731
    x = torch.randn(5, 4)
    return torch.cat(
        [
            torch.func.vmap(torch.func.grad(f))(x).flatten(),
            torch.func.jacrev(lambda x: (x @ w).sin())(x[0]).flatten(),
            torch.func.hessian(lambda x: (x @ w).sin().sum())(x[0]).flatten(),
        ]
    )


def _checkpointed():
    x = torch.randn(4, 6, requires_grad=True)
    for reentrant in (True, False):
        checkpoint(lambda x: (x * 2).tanh().exp(), x, use_reentrant=reentrant).sum().backward()
    return x.grad


def _autocast():
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(torch.randn(3, 6)) @ torch.randn(5, 5), torch.zeros(3, 5))
    loss.backward()
    return model[0].weight.grad


def _inference():
    with torch.inference_mode():
        x = torch.randn(4, 4)
        x.mul_(2).add_(x @ x)
        return torch.multinomial(x.softmax(-1), 2) + x.topk(2).values


def _traced():
    f = torch.jit.trace(lambda x: (x * 2 + 0.5).sin() / x.shape[0], torch.ones(3))
    g = torch.jit.script(scripted)
    return torch.cat([f(torch.randn(3)), g(torch.randn(3)), g(torch.randn(3))])


def scripted(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    for i in range(3):
        y = y + torch.full([1], 0.1 * i)
    if bool(y.sum() > 0):
        y = y.relu()
    return y


def _linear_algebra():
    a = torch.randn(40, 40)
    s = a @ a.T
    return torch.cat(
        [
            torch.linalg.svdvals(a),
            torch.linalg.eigvalsh(s),
            torch.linalg.cond(a)[None],
            torch.linalg.norm(a, 2)[None],
            torch.linalg.matrix_norm(a, "nuc")[None],
            torch.norm(a, "nuc")[None],
            torch.linalg.matrix_rank(s).float()[None],
        ]
    )


def _trained():
    model = network()
    results = []
    for kind, how in [("Adam", {"fused": True}), ("AdamW", {"foreach": True}), ("LBFGS", {})]:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **how)
        x = torch.randn(8, 6)

        def closure(optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean() * x.cumprod(0).mean()
            loss.backward()
            return loss

        for _ in range(2):
            results.append(torch.as_tensor(optimizer.step(closure)).detach())
    return torch.cat([torch.stack(results), *(p.detach().flatten() for p in model.parameters())])


def _scaled():
    w = torch.randn(3, requires_grad=True)
    gradient = torch.autograd.grad((w.prod() * w).sum(), w, create_graph=True)[0]
    return torch.autograd.grad(gradient.square().sum(), w)[0]


def _determined():
    a = torch.randn(3, 5, 5, requires_grad=True)
    first = torch.autograd.grad(torch.linalg.det(a).sum(), a, create_graph=True)[0]
    return torch.stack([first.detach(), torch.autograd.grad(first.square().sum(), a)[0]])


PROGRAMS = {
    "fake tensors": _fake,
    "compiled, aot_eager": _compiled("aot_eager"),
    "compiled, eager": _compiled("eager"),
    "exported": _export,
    "make_fx": _made_fx,
    "saved and loaded": _saved,
    "printed": _printed,
    "torch.func": _transforms,
    "checkpointed": _checkpointed,
    "autocast": _autocast,
    "inference mode": _inference,
    "traced": _traced,
    "linear algebra": _linear_algebra,
    "trained": _trained,
    "gradient of a gradient": _scaled,
    "gradient of a determinant's gradient": _determined,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("whole", [True, False], ids=["whole process", "one model"])
def test_a_program_computes_the_same_bits_and_draws_the_same_numbers(program, whole):
    torch.manual_seed(3)
    expected, state = program(), torch.get_rng_state()
    model = network()
    with capturing("ops", "gradients", model=None if whole else model) as captured:
        model(torch.ones(1, 6))
        torch.manual_seed(3)
        got, after = program(), torch.get_rng_state()
    assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert torch.equal(after, state)
    assert not captured.faults()
    assert _get_current_dispatch_mode_stack() == []


def test_functions_that_a_mode_would_change_are_left_alone_and_the_run_says_so():
    a = torch.randn(4, 4)
    with capturing("ops") as captured:
        torch.linalg.svdvals(a)
        torch.linalg.norm(a)
    said = [e["message"] for e in captured.events if e["kind"] == "operators-unseen"]
    assert len(said) == 1 and "torch.linalg.svdvals" in said[0]
    assert torch.linalg.svdvals.__name__ == "linalg_svdvals"
    assert not hasattr(torch.linalg.svdvals, "__wrapped__")
