"""Whose operators are an optimizer's: those inside its step, however the step ends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from capturing import capturing
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Fails(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["params"][0].detach().sinh()
        raise ArithmeticError("no step today")


class Outer(torch.optim.Optimizer):
    """Steps another optimizer in its own step, as sharded and averaging ones do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        parameter = self.param_groups[0]["params"][0]
        parameter.cosh()
        try:
            self.inner.step()
        except ArithmeticError:
            parameter.tan()
        parameter.atan()


@pytest.fixture
def weight():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3))
    weight.grad = torch.ones(3)
    return weight


def sites(captured):
    return [key.site for key in captured.of("output")]


def test_after_an_exception_in_a_step_operators_are_the_program_s_again(weight):
    optimizer = Fails([weight], lr=0.1)
    with capturing("ops") as captured:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        torch.ones(2).neg()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        torch.ones(2).exp()
    found = sites(captured)
    assert found.count("Fails/aten.sinh") == 2
    assert "(program)/aten.neg" in found and "(program)/aten.exp" in found
    assert not captured.faults()


def test_a_closure_that_raises_ends_the_step_too(weight):
    optimizer = torch.optim.LBFGS([weight])

    def closure():
        weight.square().sum()
        raise ArithmeticError("no loss")

    with capturing("ops") as captured:
        with pytest.raises(ArithmeticError):
            optimizer.step(closure)
        torch.ones(2).neg()
    assert "LBFGS/aten.pow" in sites(captured)
    assert "(program)/aten.neg" in sites(captured)


def test_an_optimizer_inside_an_optimizer_gives_the_name_back(weight):
    optimizer = Outer(torch.optim.AdamW([weight], lr=0.1))
    with capturing("ops") as captured:
        optimizer.step()
        torch.ones(2).neg()
    found = sites(captured)
    assert found.index("Outer/aten.cosh") < found.index("Outer/aten.atan")
    between = found[found.index("Outer/aten.cosh") + 1 : found.index("Outer/aten.atan")]
    assert between and all(site.startswith("AdamW/") for site in between)
    assert found[-1] == "(program)/aten.neg"


def test_an_inner_step_that_raises_leaves_the_outer_one_its_name(weight):
    optimizer = Outer(Fails([weight], lr=0.1))
    with capturing("ops") as captured:
        optimizer.step()
        torch.ones(2).neg()
    wanted = ["Outer/aten.cosh", "Fails/aten.sinh", "Outer/aten.tan", "Outer/aten.atan"]
    assert [site for site in sites(captured) if "/aten.ones" not in site] == [
        *wanted,
        "(program)/aten.neg",
    ]


def test_a_step_of_a_subclass_that_calls_its_parent_s_is_one_step(weight):
    torch.optim.SGD([weight])  # torch hooks the parent's step too when it was used

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][0].detach().atan()

    optimizer = Mine([weight], lr=0.1)
    with capturing("ops") as captured:
        optimizer.step()
        torch.ones(2).neg()
    found = [s for s in sites(captured) if not s.startswith("(program)")]
    assert len(found) > 1 and all(site.startswith("Mine/") for site in found)
    assert sites(captured)[-1] == "(program)/aten.neg"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_hook_that_raises_ends_the_step(weight, when):
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def hook(*_):
        weight.detach().sinh()
        raise ArithmeticError("a hook's")

    register = optimizer.register_step_pre_hook if when == "before" else None
    handle = (register or optimizer.register_step_post_hook)(hook)
    with capturing("ops") as captured:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        torch.ones(2).neg()
        handle.remove()
        optimizer.step()
        torch.ones(2).exp()
    found = sites(captured)
    assert "SGD/aten.sinh" in found
    assert "(program)/aten.neg" in found and "(program)/aten.exp" in found


def test_hooks_of_every_optimizer_that_step_another_one_keep_names_apart(weight):
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    second = torch.optim.Adagrad([other], lr=0.1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with capturing("ops") as captured:
        handle = register_optimizer_step_post_hook(
            lambda done, *_: second.step() if done is optimizer else None
        )
        try:
            optimizer.step()
        finally:
            handle.remove()
        torch.ones(2).neg()
    found = sites(captured)
    assert any(site.startswith("Adagrad/") for site in found)
    assert found[-1] == "(program)/aten.neg"


def test_a_scheduler_s_wrapper_around_the_step_changes_nothing(weight):
    optimizer = Fails([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with capturing("ops") as captured:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        torch.ones(2).neg()
    assert "Fails/aten.sinh" in sites(captured)
    assert sites(captured)[-1] == "(program)/aten.neg"


def test_a_step_that_raised_keeps_nothing_of_the_program_alive(weight):
    optimizer = Fails([weight], lr=0.1)

    class Large:
        def __call__(self):
            return None

    def fail():
        large = Large()
        died = weakref.ref(large)
        with pytest.raises(ArithmeticError):
            optimizer.step(large)
        return died

    with capturing("ops"):
        died = fail()
        gc.collect()
        assert died() is None
