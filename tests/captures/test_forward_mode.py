"""Forward-mode differentiation under capture: the same bits, and a run that says what it lacks."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from capturing import capturing
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

X = torch.Generator().manual_seed(5)
W4 = torch.randn(4, generator=X)
A44 = torch.randn(4, 4, generator=X)
MEAN, VARIANCE = torch.randn(4, generator=X), torch.rand(4, generator=X) + 0.5

FORMULAS = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, W4, W4, training=True),
    "batch_norm, running": lambda x: F.batch_norm(x, MEAN, VARIANCE, W4, W4, training=False),
    "group_norm": lambda x: F.group_norm(x, 2, W4, W4),
    "instance_norm": lambda x: F.instance_norm(x[None], weight=None),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (5,), None, None, 1e-5)[0],
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.3) * x,
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "gelu": F.gelu,
    "silu": F.silu,
    "matmul": lambda x: x.transpose(1, 2) @ x,
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=1),
    "conv": lambda x: F.conv1d(x, A44[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "det": lambda x: torch.linalg.det(x[:, :, :4]),
    "in place": lambda x: x.clone().mul_(2).add_(x).tanh_(),
    "max": lambda x: x.amax(1) + x.max(),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x[0]),
    "cross_entropy": lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 2, 3])),
}


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _duals(f, x, v):
    with fwAD.dual_level():
        return tuple(fwAD.unpack_dual(f(fwAD.make_dual(x, v))))


def _by_hand(f, x, v):
    fwAD.enter_dual_level()
    try:
        return tuple(fwAD.unpack_dual(f(fwAD.make_dual(x, v))))
    finally:
        fwAD.exit_dual_level()


def _linearized(f, x, v):
    value, tangent = linearize(f, x)
    return value, tangent(v)


def _reverse_over_forward(f, x, v):
    return grad(lambda x: jvp(f, (x,), (v,))[1].sum())(x)


def _dual_that_requires_grad(f, x, v):
    x = x.clone().requires_grad_()
    with fwAD.dual_level():
        tangent = fwAD.unpack_dual(f(fwAD.make_dual(x, v))).tangent
        inside = torch.autograd.grad(tangent.square().sum(), x, retain_graph=True)[0]
        outside = tangent.sum()
    return inside, torch.autograd.grad(outside, x, allow_unused=True)[0]


WAYS = {
    "jvp": lambda f, x, v: jvp(f, (x,), (v,)),
    "jvp inside jvp": lambda f, x, v: jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,)),
    "jacfwd": lambda f, x, v: jacfwd(f)(x),
    "dual level": _duals,
    "dual level by hand": _by_hand,
    "linearize": _linearized,
    "jvp inside vmap": lambda f, x, v: vmap(lambda x, v: jvp(f, (x[None],), (v[None],)))(x, v),
    "vmap inside jvp": lambda f, x, v: jvp(vmap(lambda x: f(x[None])), (x,), (v,)),
    "hvp, jvp of grad": lambda f, x, v: jvp(grad(lambda x: f(x).sum()), (x,), (v,)),
    "grad of jvp": _reverse_over_forward,
    "backward through tangents": _dual_that_requires_grad,
    "hessian": lambda f, x, v: hessian(lambda x: f(x).square().sum())(x),
    "jacrev of jacfwd": lambda f, x, v: jacrev(jacfwd(lambda x: f(x).sum()))(x),
    "jacobian, forward-mode": lambda f, x, v: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
}


def bits(found):
    flat = torch.utils._pytree.tree_leaves(found)
    assert all(x is None or isinstance(x, torch.Tensor) for x in flat)
    return [
        None
        if x is None
        else (x.dtype, x.shape, x.detach().flatten().clone().view(torch.uint8).tolist())
        for x in flat
    ]


def outcome(way, f, x, v):
    """The bits of a result; where torch knows no such derivative, its kind of error."""
    try:
        return bits(way(f, x, v))
    except (RuntimeError, TypeError) as error:
        return type(error)


QUICK = ("jvp", "dual level", "jacfwd", "hvp, jvp of grad")
"""Ways that every run of the suite takes; the others are slow together."""


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *(
            pytest.param(name, True, marks=[] if name in QUICK else [pytest.mark.slow])
            for name in WAYS
        ),
        *(("jvp", False), ("dual level", False), ("hessian", False)),
    ],
    ids=lambda value: {True: "whole process", False: "one model"}.get(value, value),
)
def test_tangents_are_the_same_bits_with_capture_and_without(name, whole):
    way = WAYS[name]
    x, v = numbers(1, 3, 4, 5), numbers(2, 3, 4, 5)
    model = nn.Linear(2, 2)
    expected = {name: outcome(way, f, x, v) for name, f in FORMULAS.items()}
    assert sum(isinstance(one, list) for one in expected.values()) > len(FORMULAS) // 2
    with capturing("ops", "modules", "gradients", model=None if whole else model) as captured:
        model(torch.ones(1, 2))
        found = {name: outcome(way, f, x, v) for name, f in FORMULAS.items()}
    different = [name for name in FORMULAS if found[name] != expected[name]]
    assert not different
    said = [e["message"] for e in captured.events if e["kind"] == "operators-unseen"]
    assert any("forward-mode differentiation" in message for message in said)
    assert not captured.faults()
    assert _get_current_dispatch_mode_stack() == []


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.GroupNorm(2, 4), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).prod(-1)


@pytest.mark.parametrize("way", ["jvp", "dual level", "hvp, jvp of grad", "linearize"])
def test_a_model_s_tangents_are_the_same_at_all_levels(way):
    model, x, v = Normed(), numbers(1, 2, 4, 5), numbers(2, 2, 4, 5)
    expected = bits(WAYS[way](model, x, v))
    with capturing("ops", "modules", "gradients", "params") as captured:
        plain = model(x)
        assert bits(WAYS[way](model, x, v)) == expected
        again = model(x)
    assert torch.equal(plain, again)
    assert not [e for e in captured.faults() if e["kind"] != "refused"]
    # Before and after the level operators are seen as ever.
    seen = captured.of("output", "norm/aten.native_group_norm", slot="0")
    assert len(seen) == 2 + (way == "linearize")  # which calls the model itself first


def test_operators_after_a_level_are_seen_again_also_when_it_raised():
    x = torch.ones(3)
    with capturing("ops") as captured:
        x.sin()
        with pytest.raises(ZeroDivisionError):
            jvp(lambda x: x / (1 // 0), (x,), (x,))
        x.cos()
        jvp(torch.tan, (x,), (x,))
        x.exp()
        with pytest.raises(RuntimeError), fwAD.dual_level(), fwAD.dual_level():
            pass  # torch knows no nested ones
        x.neg()
        assert len(_get_current_dispatch_mode_stack()) == 1
    found = [key.site for key in captured.of("output")]
    names = [site.split(".")[-1] for site in found if site.split(".")[-1] != "ones"]
    assert names == ["sin", "cos", "exp", "neg"]


def test_a_capture_that_begins_inside_a_level_sees_what_comes_after_it():
    x, v = numbers(1, 3, 4, 5), numbers(2, 3, 4, 5)
    expected = bits(_duals(FORMULAS["batch_norm"], x, v))
    level = fwAD.enter_dual_level()
    with capturing("ops") as captured:
        dual = FORMULAS["batch_norm"](fwAD.make_dual(x, v))
        assert bits(tuple(fwAD.unpack_dual(dual))) == expected
        fwAD.exit_dual_level(level=level)
        x.neg()
    assert [key.site for key in captured.of("output")] == ["(program)/aten.neg"]
    assert "operators-unseen" in {event["kind"] for event in captured.events}
    assert _get_current_dispatch_mode_stack() == []


def test_a_capture_that_ends_inside_a_level_leaves_no_mode_behind():
    x = torch.ones(3)
    with capturing("ops") as first:
        with capturing("ops"):
            x.sin()
            fwAD.enter_dual_level()
        fwAD.exit_dual_level()
        assert len(_get_current_dispatch_mode_stack()) == 1
        x.cos()
        fwAD.enter_dual_level()
    fwAD.exit_dual_level()
    assert _get_current_dispatch_mode_stack() == []
    assert {key.site for key in first.of("output")} == {"(program)/aten.sin", "(program)/aten.cos"}


def test_the_program_s_own_mode_stays_where_it_was():
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    x, v = numbers(1, 3, 4, 5), numbers(2, 3, 4, 5)
    with Counting() as alone:
        expected = bits(jvp(FORMULAS["prod"], (x,), (v,)))
    with capturing("ops"), Counting() as counting:
        assert bits(jvp(FORMULAS["prod"], (x,), (v,))) == expected
        assert _get_current_dispatch_mode_stack()[-1] is counting
    assert counting.seen == alone.seen


def test_threads_differentiate_without_disturbing_each_other():
    model, x, v = Normed(), numbers(1, 2, 4, 5), numbers(2, 2, 4, 5)
    expected = bits(jvp(model, (x,), (v,)))
    found, left = [], []

    def work():
        model(x)
        found.append(bits(jvp(model, (x,), (v,))))
        left.append(len(_get_current_dispatch_mode_stack()))

    with capturing("ops") as captured:
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert found == [expected] * 3 and left == [1] * 3
    assert not captured.faults()


@pytest.mark.parametrize("whole", [True, False], ids=["whole process", "one model"])
def test_dual_tensors_that_a_watched_thread_is_handed_give_its_models_the_same_tangents(whole):
    model, x, v = Normed(), numbers(1, 2, 4, 5), numbers(2, 2, 4, 5)
    expected = bits(_duals(model, x, v))
    handed, found, left = queue.Queue(), queue.Queue(), []

    def work():
        model(x)  # from here on the thread is watched, in a whole process
        found.put(None)
        found.put(model(handed.get()))
        handed.get()
        found.put(model(x))
        left.append(len(_get_current_dispatch_mode_stack()))

    with capturing("ops", model=None if whole else model) as captured:
        thread = threading.Thread(target=work)
        thread.start()
        found.get()
        with fwAD.dual_level():
            handed.put(fwAD.make_dual(x, v))
            assert bits(tuple(fwAD.unpack_dual(found.get()))) == expected
        handed.put(None)
        found.get()
        thread.join()
    assert left == [int(whole)]
    assert len(captured.of("output", "norm/aten.native_group_norm", slot="0")) == 2


def test_a_compiled_function_with_tangents_computes_the_same():
    f = FORMULAS["prod of a dimension"]
    x, v = numbers(1, 3, 4, 5), numbers(2, 3, 4, 5)
    for backend in ("eager", "aot_eager"):
        found = []
        for watched in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, v: jvp(f, (x,), (v,)), backend=backend)
            if watched:
                with capturing("ops"):
                    found.append(bits(compiled(x, v)))
                    found.append(bits(compiled(x, v)))
            else:
                found.append(bits(compiled(x, v)))
        torch._dynamo.reset()
        assert found[1] == found[0] and found[2] == found[0]


def test_torch_gets_its_functions_back():
    predispatch = torch._functorch.predispatch
    before = predispatch._enter_dual_level_impl, predispatch._exit_dual_level_impl
    with capturing("ops"), capturing("ops"):
        assert predispatch._enter_dual_level_impl is not before[0]
    assert (predispatch._enter_dual_level_impl, predispatch._exit_dual_level_impl) == before
