"""Kinds of bugs that were called by a wrong name, or by none; judged by `driftline diagnose`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import driftline
from driftline.cli.main import main

_HEADS, _SIZE = 4, 16


class Mix(nn.Module):
    """An attention, by other names; `cap` and `times` are what real ports got wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.d = nn.Linear(64, 64, bias=False)
        # In a list, so that no setting names what differs.
        self.numbers = torch.tensor([0.25, 5.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = (
            part(x).unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2)
            for part in (self.a, self.b, self.c)
        )
        times, cap = self.numbers
        scores = first @ second.transpose(-1, -2) * times
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.d((scores @ third).transpose(1, 2).flatten(2))


class Pace(nn.Module):
    """What turns heads by their position, as complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        paces = 100.0 ** (-torch.arange(0, _SIZE, 2) / _SIZE)
        angles = torch.arange(x.shape[1])[:, None] * paces
        return torch.polar(torch.ones_like(angles), angles)


class Turning(nn.Module):
    """An attention whose heads are multiplied by complex numbers; `numbers` says how it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.d = nn.Linear(64, 64, bias=False)
        # Whether heads turn, which way, and the factor of the scores.
        self.numbers = torch.tensor([1.0, 1.0, 0.25])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns, way, times = self.numbers
        pace = self.pace(x)
        pace = pace if way > 0 else pace.conj()

        def turned(y: torch.Tensor) -> torch.Tensor:
            y = y.unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2)
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * pace).flatten(-2) if turns > 0 else y

        first, second = turned(self.a(x)), turned(self.b(x))
        third = self.c(x).unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2)
        scores = first @ second.transpose(-1, -2) * times
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.d((scores @ third).transpose(1, 2).flatten(2))


class Weighed(nn.Module):
    """Is told what may be seen: by flags, or by what is added to the scores."""

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2) / 8.0
        if seen.dtype is torch.bool:
            return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ x
        return (scores + seen).softmax(-1) @ x


class Masking(nn.Module):
    """Lays out a mask in its own code and hands it to a part."""

    def __init__(self, added: float) -> None:
        super().__init__()
        self.a, self.inner, self.d = nn.Linear(64, 64), Weighed(), nn.Linear(64, 64)
        self.numbers = torch.tensor([9.0, added])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reach, added = self.numbers
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = ((back >= 0) & (back < reach)).expand(len(x), -1, -1)
        if added < 0:
            seen = torch.zeros(seen.shape).masked_fill(~seen, float(added))
        return self.d(self.inner(self.a(x), seen))


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.low, self.high = nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64)
        self.numbers = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.numbers[0] * self.high(self.low(x))


class Adapted(nn.Module):
    """An adapter as libraries attach them: its parts in dictionaries, much louder than the base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.low = nn.ModuleDict({"default": nn.Linear(64, 4, bias=False)})
        self.high = nn.ModuleDict({"default": nn.Linear(4, 64, bias=False)})
        self.numbers = torch.tensor([8.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.numbers[0] * self.high["default"](self.low["default"](x))


# Such a library calls it as what it replaces, so that by its class every linear is its like.
Adapted.__name__ = "Linear"


class Padded(nn.Module):
    """A convolution that is padded by its own code, on both sides alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 1, 7))
        self.numbers = torch.tensor([3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = int(self.numbers[0])
        x = nn.functional.pad(x, (before, 6 - before))
        return nn.functional.conv1d(x, self.weight, groups=40)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.tensor([10000.0])
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.angles(x))

    def angles(self, x: torch.Tensor) -> torch.Tensor:
        paces = self.numbers[0] ** (-torch.arange(0, 32, 2) / 32)
        angles = torch.arange(x.shape[1])[:, None] * paces
        return torch.cat([angles, angles], -1).cos().expand(x.shape[0], -1, -1)


class Groups(nn.Module):
    """A group norm without the attribute that says its epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3)
        self.norm = OwnNorm()
        self.leave = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(16))
        self.numbers = torch.tensor([1e-6])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(x, 4, self.weight, None, float(self.numbers[0]))


def _set(number: int, value: float, path: str = "") -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        model.get_submodule(path).numbers[number] = value

    return plant


def _replaced(module: nn.Module) -> Callable[[nn.Module], None]:
    return lambda model: model.__setitem__(1, module)  # type: ignore[operator]


def _permuted(model: nn.Module) -> None:
    with torch.no_grad():
        weight = model.b.weight
        weight.copy_(weight.view(_HEADS, _SIZE, 64).flip(0).reshape(64, 64))


def _unrelated(model: nn.Module) -> None:
    nn.init.normal_(model[2].weight, std=0.2)


def _layers(function: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), function, nn.Linear(64, 48))


class Bug(NamedTuple):
    """A model, what is done to it, and what is to be said.

    Attributes:
        model: Makes the right model.
        plant: Makes it wrong.
        site: Where it lies.
        causes: What may be said.
        level: What is dumped.
    """

    model: Callable[[], nn.Module]
    plant: Callable[[nn.Module], None]
    site: str
    causes: tuple[str, ...]
    level: tuple[str, ...] = ("modules",)


BUGS: Mapping[str, Bug] = {
    "soft cap left out": Bug(Mix, _set(1, 0.0), "(root)", ("soft-cap",)),
    "scores scaled": Bug(Mix, _set(0, 0.27), "(root)", ("scale",)),
    "complex rotation left out": Bug(Turning, _set(0, 0.0), "(root)", ("positions",)),
    "complex rotation backwards": Bug(Turning, _set(1, -1.0), "(root)", ("positions",)),
    "scores scaled beside a complex rotation": Bug(Turning, _set(2, 0.3), "(root)", ("scale",)),
    **{
        f"mask of {name} laid out otherwise": Bug(
            lambda added=added: nn.Sequential(nn.Linear(64, 64), Masking(added)),
            _set(0, 7.0, "1"),
            "1",
            ("mask",),
        )
        for name, added in (("flags", 0.0), ("infinities", -torch.inf), ("large numbers", -1e9))
    },
    "adapter scaled": Bug(Adapter, _set(0, 0.5), "(root)", ("scale",)),
    "adapter without its scale": Bug(
        lambda: nn.Sequential(Adapted(), nn.Linear(64, 64)), _set(0, 1.0, "0"), "0", ("scale",)
    ),
    "base of a rotation": Bug(Turns, _set(0, 5e5), "(root)", ("positions",)),
    "epsilon of a group norm": Bug(Groups, _set(0, 1e-3, "norm"), "norm", ("scale",)),
    "leaky relu for relu": Bug(
        lambda: _layers(nn.LeakyReLU(0.01)), _replaced(nn.ReLU()), "1", ("activation",)
    ),
    "softsign for tanh": Bug(
        lambda: _layers(nn.Tanh()), _replaced(nn.Softsign()), "1", ("activation",)
    ),
    "relu for hard swish": Bug(
        lambda: _layers(nn.Hardswish()), _replaced(nn.ReLU()), "1", ("activation",)
    ),
    "hard sigmoid for sigmoid": Bug(
        lambda: _layers(nn.Sigmoid()), _replaced(nn.Hardsigmoid()), "1", ("activation",)
    ),
    "convolution padded on one side": Bug(
        lambda: nn.Sequential(nn.Conv1d(40, 40, 7, groups=40), Padded()),
        _set(0, 6, "1"),
        "1",
        ("shift",),
    ),
    "key weight permuted": Bug(Mix, _permuted, "b", ("permutation",), ("modules", "params")),
    "head not loaded": Bug(lambda: _layers(nn.GELU()), _unrelated, "2", ("weights",)),
}


@pytest.fixture
def diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Bug], dict[str, Any]]:
    def diagnose(bug: Bug) -> dict[str, Any]:
        picture = bug.model is Groups
        for name in ("right", "wrong"):
            torch.manual_seed(0)
            model = bug.model().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.mul_(2.0)
                if name == "wrong":
                    bug.plant(model)
                torch.manual_seed(1)
                x = torch.randn(2, 3, 12, 12) * 0.05 if picture else torch.randn(3, 40, 64)
                with driftline.capture(model, tmp_path / name, levels=bug.level):
                    model(x)
        code = main(["diagnose", str(tmp_path / "right"), str(tmp_path / "wrong"), "--format=json"])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return diagnose


@pytest.mark.parametrize("name", BUGS)
def test_a_real_kind_of_bug_is_called_by_its_name(
    name: str, diagnosed: Callable[[Bug], dict[str, Any]]
) -> None:
    bug = BUGS[name]
    finding = diagnosed(bug)
    assert finding["code"] == 1
    assert finding["first_site"] == bug.site, finding["finding"]
    assert finding["cause"] in bug.causes, finding["finding"]


def test_what_nothing_explains_is_unknown_with_the_two_nearest(
    diagnosed: Callable[[Bug], dict[str, Any]],
) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + 0.4 * x.roll(3, 1) * x

    finding = diagnosed(Bug(lambda: _layers(nn.GELU()), _replaced(Odd()), "1", ()))
    assert finding["first_site"] == "1"
    others = finding["evidence"]["cause"]["others"]
    assert all(share < 0.9 for _, share in others)
