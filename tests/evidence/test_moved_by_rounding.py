"""Optimizers that make steps of rounding: followed through their arithmetic, and no cover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from test_biases_without_gradient import WORDS, Text, rows_at
from torch import nn

import driftline
from driftline.comparison.shards import compare_shard, merge

STEPS = 2
Plant = Callable[[Text, torch.optim.Optimizer, int], None]


def trained(path: Path, how: str, by_hand: bool, plant: Plant | None = None) -> Path:
    torch.manual_seed(0)
    model = Text(by_hand)
    ids = torch.arange(18).view(2, 9)
    rates = [{"params": [one]} for one in model.parameters()]
    step = torch.optim.Adam(rates, 0.01)
    options: dict[str, Any] = {"graph": "fx"} if how == "fx" else {"levels": "ops"}

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids).view(-1, WORDS), ids.view(-1) % WORDS)

    def update() -> None:
        step.step()

    with driftline.capture(model, path, **options):
        if how == "fx":
            loss, update = (torch.compile(one, backend="eager") for one in (loss, update))
        for number in range(STEPS):
            loss().backward()
            if plant is not None:
                plant(model, step, number)
            update()
            step.zero_grad()
    torch._dynamo.reset()
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("ops") / "ours", "ops", False)


def test_the_state_and_the_parameter_of_a_key_s_bias_are_no_alarm(
    reference: Path, tmp_path: Path
) -> None:
    table = driftline.compare(reference, trained(tmp_path / "theirs", "ops", True))
    failing = {row.key.site for row in table.failing}
    assert all(site.startswith("attention/") for site in failing), failing  # scores by hand
    excused = [row for row in table.rows if row.decided_by == "beyond_rounding"]
    assert {row.key.port for row in excused} == {"input", "output", "param"}
    assert any(row.key.site.startswith("Adam/aten.addcdiv_") for row in excused)
    assert all("nothing but rounding" in row.reason for row in excused)
    assert any(column.name == "beyond_rounding" for column in table.columns)
    parts = [compare_shard(reference, tmp_path / "theirs", f"{n}/3") for n in (1, 2, 3)]
    assert merge(parts).rows == table.rows


def _rate(name: str) -> Plant:
    def plant(model: Text, step: torch.optim.Optimizer, number: int) -> None:
        wanted = dict(model.named_parameters())[name]
        (group,) = (one for one in step.param_groups if one["params"][0] is wanted)
        group["lr"] = 0.02

    return plant


def _gradient(name: str) -> Plant:
    def plant(model: Text, step: torch.optim.Optimizer, number: int) -> None:
        gradient = dict(model.named_parameters())[name].grad
        assert gradient is not None
        gradient += 1e-3

    return plant


def _state(model: Text, step: torch.optim.Optimizer, number: int) -> None:
    if number == 1:
        step.state[model.attention.key.weight]["exp_avg"] *= 0.5


@pytest.mark.parametrize(
    "plant",
    [
        _rate("attention.value.bias"),
        _gradient("attention.key.bias"),
        _gradient("attention.query.bias"),
        _state,
    ],
    ids=["rate of a bias", "key's gradient", "query's gradient", "state"],
)
def test_a_wrong_optimizer_is_named_beside_it(
    reference: Path, tmp_path: Path, plant: Plant
) -> None:
    table = driftline.compare(reference, trained(tmp_path / "theirs", "ops", True, plant))
    named = {row.key.site for row in table.failing if not row.key.site.startswith("attention/")}
    assert any(site.startswith("Adam/") for site in named), table.finding


@pytest.mark.slow
def test_a_compiled_optimizer_is_no_alarm_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    ours = trained(tmp_path / "ours", "fx", False)
    table = driftline.compare(ours, trained(tmp_path / "theirs", "fx", True))
    failing = {row.key.site for row in table.failing}
    assert all(site.startswith("attention/") for site in failing), failing
    assert [row for row in rows_at(table, "attention.key/addmm_1", "output") if row.key.step]
    excused = [row for row in table.rows if row.decided_by == "beyond_rounding"]
    assert {row.class_name for row in excused} >= {"placeholder", "aten.addcdiv.default"}
    wrong = trained(tmp_path / "wrong", "fx", True, _rate("attention.value.bias"))
    named = {row.key.site for row in driftline.compare(ours, wrong).failing}
    assert {site for site in named if site.startswith("(program)/addcdiv")}
