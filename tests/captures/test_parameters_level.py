"""Parameters and buffers: each once, with the values the call begins with."""

from __future__ import annotations

import torch
from capturing import capturing
from torch import nn

from driftline.captures.torch.gradients import ParameterTap
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink


def test_every_parameter_and_buffer_is_written_once_before_the_first_call():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with capturing("params", model=model) as captured:
        for _ in range(3):
            model(torch.randn(8, 4))
    rows = {f"{key.site}.{key.slot}": value for key, value in captured.of("param").items()}
    assert rows.keys() == before.keys()
    for name, value in rows.items():
        assert torch.equal(value, before[name].double()), name
    assert all(key.moment == "before" for key in captured.of("param"))


def test_a_tied_parameter_is_written_at_its_first_owner_only():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with capturing("params", model=model) as captured:
        model(torch.randn(2, 3))
    assert [k.site for k in captured.of("param") if k.slot == "weight"] == ["0"]


def test_the_root_s_own_parameters_and_later_models_are_named():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with capturing("params") as captured:
        second(first(torch.randn(1, 2)))
    sites = [key.site for key in captured.of("param", slot="weight")]
    assert sites[0] == "(root)" and sites[1].startswith("Linear")


def test_parameters_of_every_step_show_the_optimizer_s_work():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sink = MemorySink()
    session = CaptureSession(sink, levels=(), model=model)
    tap = ParameterTap(session, every="step")
    session.taps.append(tap)
    session.start()
    values = []
    for _ in range(3):
        values.append(model.weight.detach().clone())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    session.stop()
    run = sink.run()
    for step, value in enumerate(values):
        got = run.get(site="(root)", port="param", slot="weight", step=step)
        assert torch.equal(torch.from_numpy(got.numpy().copy()), value)
    assert not torch.equal(values[0], values[2])


def test_a_lazy_parameter_is_written_as_soon_as_it_has_values():
    model = nn.Sequential(nn.LazyLinear(3))
    with capturing("params", model=model) as captured:
        model(torch.randn(2, 5))
        model(torch.randn(2, 5))
    assert captured.one("param", "0", slot="weight").shape == (3, 5)
