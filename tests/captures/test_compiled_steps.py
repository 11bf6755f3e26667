"""Optimizers whose step is compiled: steps are counted, and whose tensors they work on is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn

import driftline
from driftline.formats.registry import open_run

STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(5, 3)

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    forward = torch.compile(loss, backend="eager")
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    with driftline.capture(model, path, graph="fx", levels=["modules", "gradients"]):
        for _ in range(STEPS):
            forward().backward()
            update()
            optimizer.zero_grad()
    torch._dynamo.reset()
    return path


def test_a_compiled_optimizer_ends_the_steps_of_a_compiled_function(trained: Path) -> None:
    run = open_run(trained)
    assert {record.key.step for record in run.records} == set(range(STEPS))
    assert not [str(r.key) for r in run.records if r.key.visit]


def test_its_hooks_are_not_compiled_with_it(trained: Path) -> None:
    kinds = {event["kind"] for event in open_run(trained).events()}
    assert kinds <= {"estimate", "step", "graphs"}
