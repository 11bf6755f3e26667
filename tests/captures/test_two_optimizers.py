"""A program with an optimizer for each of its models: all of them conclude the same step."""

from __future__ import annotations

import torch
from torch import nn

import driftline
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


def trained(optimizers_in_step: int) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    parts = [model[0], model[1]] if optimizers_in_step == 2 else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    with driftline.capture(model, sink := MemorySink(), levels=("modules", "gradients")):
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return sink.run()


def test_what_a_second_optimizer_sees_belongs_to_the_step_that_the_first_has_ended() -> None:
    one, two = trained(1), trained(2)
    places = [{(r.key.step, r.key.site, r.key.port) for r in run.records} for run in (one, two)]
    assert places[0] == places[1]
    assert {step for step, _, _ in places[1]} == {0, 1}
    assert driftline.compare(one, two).coverage.share == 1.0


def test_a_backward_pass_after_an_optimizer_belongs_to_the_step_of_its_call() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.ModuleList([first, second])
    with driftline.capture(both, sink := MemorySink(), levels=("modules", "gradients")):
        here, there = (each(torch.ones(1, 2)).sum() for each in (first, second))
        for loss, model in ((here, first), (there, second)):
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert {record.key.step for record in sink.run().records} == {0}
