"""Several iterations of training: what an optimizer has learnt is not a module's fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import driftline
from driftline.diagnosis.api import diagnose
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


def test_weights_that_training_made_different_are_no_module_s_fault() -> None:
    runs: list[Run] = []
    for activation in (torch.nn.SiLU(), torch.nn.GELU()):
        torch.manual_seed(0)
        parts = [torch.nn.Linear(16, 32), activation, torch.nn.Linear(32, 32)]
        model = torch.nn.Sequential(*parts, torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sink = MemorySink()
        with driftline.capture(model, sink, levels=("modules", "gradients"), steps="*"):
            for _ in range(3):
                loss = model(torch.randn(8, 16)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        runs.append(sink.run())
    found = diagnose(*runs)
    assert (found.first_site, found.cause) == ("1", "activation")
    # Nor is the optimizer's: what it was given came out of backward passes that were off.
    taken = {site.status for site in found.sites if site.direction == "optimizer"}
    assert taken == {"inherited"}
    (note,) = found.evidence["notes"]
    assert "from step 1 on the two models have different weights" in note


def test_a_gradient_that_changes_on_its_way_to_the_optimizer_is_found_there() -> None:
    runs: list[Run] = []
    for factor in (1.0, 2.0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sink = MemorySink()
        with driftline.capture(model, sink, levels=("modules", "gradients"), steps="*"):
            for _ in range(2):  # gradients of two batches are gathered
                model(torch.randn(4, 8)).square().mean().backward()
            assert isinstance(model[2].weight.grad, torch.Tensor)
            model[2].weight.grad *= factor
            optimizer.step()
        runs.append(sink.run())
    found = diagnose(*runs)
    assert (found.first_site, found.cause) == ("2", "scale")
    guilty = [(site.site, site.direction) for site in found.sites if site.status == "introduced"]
    assert guilty == [("2", "optimizer")]


def test_a_mistake_of_the_optimizer_is_placed_where_the_comparison_places_it(
    tmp_path: Path,
) -> None:
    for name, decay in (("right", 0.0), ("wrong", 0.3)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
        )
        groups = [
            {"params": [*model[0].parameters(), *model[2].parameters()]},
            {"params": [*model[1].parameters()], "weight_decay": decay},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        levels = ("modules", "gradients", "params")
        with driftline.capture(model, tmp_path / name, levels=levels, steps="*"):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
    runs = tmp_path / "right", tmp_path / "wrong"
    diagnosis = diagnose(*runs)
    assert diagnosis.first_site == driftline.compare(*runs).first_site == "(optimizer)"
    # That the norm's weights are smaller by a factor explains what it computes, not the update.
    assert diagnosis.cause == "scale"
    assert "1 of 6 parameters move by" in diagnosis.sentences[1]
    assert "times the weights" in diagnosis.sentences[1]


def _changed(kind: str, weights: list[torch.nn.Parameter]) -> None:
    """What a program does with gradients between the backward pass and the optimizer."""
    scale = 64.0
    if kind == "clipped late":
        _divided(weights, scale)
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
    elif kind == "clipped early":  # while they carry the scale
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        _divided(weights, scale)
    elif kind == "each for itself":
        _divided(weights, scale)
        for weight in weights:
            torch.nn.utils.clip_grad_norm_([weight], 0.5)
    elif kind == "one lost":
        _divided(weights, scale)
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        _divided(weights[2:4], 3.0)


def _divided(weights: list[torch.nn.Parameter], by: float) -> None:
    for weight in weights:
        assert weight.grad is not None
        weight.grad /= by


@pytest.mark.parametrize(
    ("kind", "site"),
    [
        ("clipped late", ""),
        ("clipped early", "(gradients)"),
        ("each for itself", "(gradients)"),
        # What happens to the gradients of one module is best looked for at its name.
        ("one lost", "2"),
    ],
)
def test_gradients_of_all_modules_that_change_before_the_update_lie_at_no_module(
    kind: str, site: str, tmp_path: Path
) -> None:
    for name, change in (("right", "clipped late"), ("wrong", kind)):
        torch.manual_seed(0)
        parts = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 24)]
        model = torch.nn.Sequential(*parts, torch.nn.LayerNorm(24), torch.nn.Linear(24, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        levels = ("modules", "gradients", "params")
        with driftline.capture(model, tmp_path / name, levels=levels, steps="*"):
            for _ in range(3):
                optimizer.zero_grad()
                (64.0 * (model(torch.randn(8, 16)) - 2.0).square().mean()).backward()
                _changed(change, [*model.parameters()])
                optimizer.step()
    runs = tmp_path / "right", tmp_path / "wrong"
    table, diagnosis = driftline.compare(*runs), diagnose(*runs)
    assert table.verdict == diagnosis.verdict == ("fail" if site else "pass")
    assert table.first_site == diagnosis.first_site == site
    if site == "(gradients)":
        assert "the gradients that the optimizer sees differ" in table.finding
        assert diagnosis.cause == "scale", diagnosis.sentences
