"""Gradients that cancel inside a norm or a softmax: no alarm, and no cover for a wrong one.

The twins compute a product in one piece and in two, as one rank and two ranks do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.shards import compare_shard, merge
from driftline.comparison.table.table import Table

WIDTH = 32


class Product(nn.Linear):
    parts = 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        pieces = zip(input.chunk(self.parts, -1), self.weight.chunk(self.parts, 1), strict=True)
        return sum((x @ w.T for x, w in pieces), start=self.bias)


class Backward(torch.autograd.Function):
    """Passes on what it is given; a plant changes what comes back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Last(nn.Module):
    """A norm, written down; its class says what it is."""

    def __init__(self, before=None, after=None, eps=1e-5):
        super().__init__()
        self.before, self.after, self.eps = before, after, eps

    def forward(self, x):
        if self.after is not None:
            x = Backward.apply(x, self.after)
        y = nn.functional.layer_norm(x, (WIDTH,))
        if self.eps != 1e-5:  # in the backward pass only
            y = y.detach() + (other := nn.functional.layer_norm(x, (WIDTH,), eps=self.eps))
            y = y - other.detach()
        return y if self.before is None else Backward.apply(y, self.before)


class LayerNorm(Last):
    pass


class Net(nn.Module):
    def __init__(self, last: nn.Module, parts: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU()
        self.down = Product(64, WIDTH)
        self.down.parts = parts
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.down(self.act(self.up(self.norm(x)))))


class Turned(nn.Module):
    """Channels first, for norms that want them there."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def trained(
    path: Path,
    last: nn.Module,
    parts: int,
    loss: str = "squares",
    plant: Callable[[Net], None] | None = None,
) -> Path:
    torch.manual_seed(0)
    model, x = Net(last, parts), torch.randn(3, 16, WIDTH)
    if plant is not None:
        plant(model)
    with driftline.capture(model, path, levels=["modules", "gradients"], steps="*"):
        out = model(x)
        (out.square().mean() if loss == "squares" else out.sum()).backward()
    return path


def compared(folder: Path, theirs: nn.Module, plant: Callable[[Net], None] | None = None) -> Table:
    ours = trained(folder / "ours", LayerNorm(), 1)
    return driftline.compare(ours, trained(folder / "theirs", theirs, 2, plant=plant))


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: nn.LayerNorm(WIDTH), "squares"),
        (lambda: nn.LayerNorm(WIDTH), "sum"),
        (lambda: nn.RMSNorm(WIDTH), "squares"),
        (lambda: Turned(nn.BatchNorm1d(WIDTH)), "squares"),
        (lambda: Turned(nn.GroupNorm(4, WIDTH)), "squares"),
        (lambda: nn.Softmax(-1), "sum"),
        (lambda: nn.LogSoftmax(-1), "squares"),
    ],
)
def test_what_a_norm_or_a_softmax_leaves_of_a_gradient_is_no_alarm(
    tmp_path: Path, make: Callable[[], nn.Module], loss: str
) -> None:
    table = driftline.compare(
        trained(tmp_path / "ours", make(), 1, loss), trained(tmp_path / "theirs", make(), 2, loss)
    )
    assert table.verdict == "pass", table.finding
    plain = driftline.compare(tmp_path / "ours", tmp_path / "theirs", limits={"relative_l2": 1e-4})
    if plain.failing:
        (row,) = (one for one in table.rows if "cancelled_l2" in one.metrics)
        assert row.key.port == "grad_input" and row.limit_from.endswith("gradients that cancel")
    others = {row.status for row in table.rows if row.key.port in ("input", "output")}
    assert others == {"pass"}


def test_what_is_made_of_it_is_as_far_off_and_says_so(tmp_path: Path) -> None:
    table = compared(tmp_path, LayerNorm())
    assert table.verdict == "pass", table.finding
    made = [row for row in table.rows if row.limit_from.endswith("as a gradient that cancels")]
    assert {row.key.site for row in made} >= {"down", "up"}
    assert all("made of one that cancels" in row.reason for row in made)
    sides = tmp_path / "ours", tmp_path / "theirs"
    assert merge([compare_shard(*sides, f"{n}/3") for n in (1, 2, 3)]).rows == table.rows


def half(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:, ::2] = 0.0
    return gradient


@pytest.mark.parametrize(
    ("last", "port"),
    [
        (LayerNorm(after=torch.neg), "grad_input"),
        (LayerNorm(after=half), "grad_input"),
        (LayerNorm(before=half), "grad_input"),
        (LayerNorm(eps=1e-3), "grad_input"),
        (LayerNorm(before=lambda one: one + 1e-3 * torch.roll(one, 1, -1)), "grad_input"),
    ],
    ids=["sign", "half is lost", "half of what arrives", "epsilon", "another gradient"],
)
def test_a_wrong_backward_of_the_norm_is_named(tmp_path: Path, last: nn.Module, port: str) -> None:
    table = compared(tmp_path, last)
    assert (table.first.key.site, table.first.key.port) == ("last", port), table.finding


def test_a_wrong_gradient_behind_it_is_named(tmp_path: Path) -> None:
    def plant(model: Net) -> None:
        model.up.weight.register_hook(lambda gradient: 1.5 * gradient)

    table = compared(tmp_path, LayerNorm(), plant)
    assert [(one.key.site, one.key.slot) for one in table.failing] == [("up", "weight")]


def test_steps_after_it_are_not_alarms_and_a_fault_in_them_is_named(tmp_path: Path) -> None:
    def steps(path: Path, parts: int, *, wrong: bool = False) -> Path:
        torch.manual_seed(0)
        model, x = Net(LayerNorm(), parts), torch.randn(3, 16, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), 0.03)
        with driftline.capture(model, path, levels=["modules", "gradients"], steps="*"):
            for number in range(2):
                if wrong and number:
                    model.up.weight.data *= 1.3
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return path

    ours = steps(tmp_path / "ours", 1)
    table = driftline.compare(ours, steps(tmp_path / "clean", 2))
    assert table.verdict == "pass", table.finding
    assert any("in step 0 its weights were given" in row.reason for row in table.rows)
    table = driftline.compare(ours, steps(tmp_path / "wrong", 2, wrong=True))
    assert (table.first.key.site, table.first.key.step) == ("up", 1), table.finding


def test_operators_of_the_backward_pass_are_judged_alike(tmp_path: Path) -> None:
    def ops(path: Path, parts: int, after: Callable[..., torch.Tensor] | None = None) -> Path:
        torch.manual_seed(0)
        model, x = Net(LayerNorm(after=after), parts), torch.randn(3, 16, WIDTH)
        with driftline.capture(model, path, levels="ops"):
            model(x).square().mean().backward()
        return path

    def failing(table: Table) -> set[str]:
        return {one.key.site for one in table.failing if not one.key.site.startswith("down/")}

    ours = ops(tmp_path / "ours", 1)
    table = driftline.compare(ours, ops(tmp_path / "clean", 2))
    assert not failing(table), table.finding
    far = [one for one in table.rows if one.key.site == "last/aten.native_layer_norm_backward"]
    assert any(one.limit_from.endswith("of the gradients that cancel") for one in far)
    table = driftline.compare(ours, ops(tmp_path / "sign", 2, torch.neg))
    assert "norm/aten.native_layer_norm_backward" in failing(table)


def test_a_gradient_that_did_not_cancel_has_the_usual_limit(tmp_path: Path) -> None:
    def loss(path: Path, parts: int, size: float) -> Path:
        torch.manual_seed(0)
        model, x = Net(LayerNorm(after=lambda one: size * one), parts), torch.randn(3, 16, WIDTH)
        with driftline.capture(model, path, levels=["modules", "gradients"], steps="*"):
            model(x)[..., 0].sum().backward()
        return path

    ours = loss(tmp_path / "ours", 1, 1.0)
    assert driftline.compare(ours, loss(tmp_path / "clean", 2, 1.0)).verdict == "pass"
    table = driftline.compare(ours, loss(tmp_path / "wrong", 2, 1.0003))
    assert (table.first.key.site, table.first.key.port) == ("last", "grad_input")
