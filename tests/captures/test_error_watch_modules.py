"""The error watch at module level: cheaper, and as exact as a module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from driftline.captures.torch.errcheck.api import ErrorWatch, watch_errors

INF = float("inf")


@pytest.fixture
def watch(tmp_path: Path):
    def watch(types: str | list[str] = "overflow") -> ErrorWatch:
        return watch_errors(tmp_path / "found", types=types, level="module")

    return watch


def test_the_innermost_module_is_the_producer(watch) -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x - 10)

    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Bad()), nn.Linear(2, 2))
    with torch.no_grad(), watch() as w:
        net(torch.ones(1, 2))
    (found,) = w.findings
    assert (found.site, found.operator, found.phase) == ("1.1", "Bad", "forward")
    assert w.reporter.propagators == 3


def test_masks_between_modules_do_not_alarm(watch) -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, -INF).triu(1)

    net = nn.Sequential(Mask(), nn.Identity())
    with torch.no_grad(), watch() as w:
        net(torch.ones(3, 3))
    assert w.findings == []


def test_a_gradient_in_front_of_the_optimizer_is_seen(watch) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch() as w:
        (net(torch.ones(1, 2)).sum() * 1e38 * 1e38).backward()
        optimizer.step()
    assert w.findings and w.findings[0].phase == "backward"
    assert "--level operator" in w.findings[0].reason


def test_a_second_forward_after_a_finding_is_judged_anew(watch) -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    net = nn.Sequential(Bad(), nn.Identity())
    with torch.no_grad(), watch() as w:
        net(-torch.ones(2))
        net(torch.ones(2))
        net(-torch.ones(2))
    assert [(f.site, f.step) for f in w.findings] == [("0", 0), ("0", 2)]


def test_weights_that_are_not_finite_are_said_to_have_come_in(watch) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        net[0].bias[0] = float("nan")
    with torch.no_grad(), watch() as w:
        net(torch.ones(1, 2))
    assert w.findings[0].cause == "entered" and w.findings[0].entered == ("bias",)
