"""The Python door: refusals before anything runs, a run afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.captures.selection import Selection
from driftline.errors import AlreadyThere, BadInput


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_a_capture_leaves_a_run_with_values_tree_and_facts(tmp_path: Path) -> None:
    model = _model()
    with driftline.capture(model, tmp_path / "run") as running:
        expected = model(torch.ones(2, 4))
    assert running.path == tmp_path / "run"
    run = driftline.open_run(tmp_path / "run")
    assert (run.get(site="(root)").numpy() == expected.detach().numpy()).all()
    assert run.get(site="0", port="input", slot="input").shape == (2, 4)
    facts = json.loads((tmp_path / "run" / "rank0" / "process.json").read_text())
    assert facts["framework"] == "torch" and facts["sealed"] and "seed" in facts
    tree = json.loads((tmp_path / "run" / "rank0" / "topology.json").read_text())
    assert tree["roots"][0]["children"][0]["ids"] == "0"


def test_an_existing_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    for _ in range(2):
        model = _model()
        with driftline.capture(model, tmp_path / "run", force=True):
            model(torch.ones(1, 4))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    for options in ({}, {"force": True}):
        with pytest.raises(AlreadyThere):
            driftline.capture(_model(), tmp_path / "full", **options)  # type: ignore[arg-type]
    assert (tmp_path / "full" / "precious").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": "ful"}, "no reduction 'ful'"),
        ({"levels": ("module",)}, "no level 'module'"),
        ({"ports": "out"}, "no port matches 'out'"),
        ({"sites": "a", "selection": Selection()}, "both a selection and filters"),
        ({"sites": 1.5}, "cannot be a filter"),
        ({"steps": "first"}, "'first' is no step"),
        ({"steps_by": "epoch"}, "no steps_by 'epoch'"),
        ({"levels": ()}, "no level was given"),
        ({"ports": "param_grad"}, "port 'param_grad' is not seen at level modules"),
        ({"max_bytes": "2GB"}, "a number of bytes, not '2GB'"),
    ],
)
def test_what_cannot_mean_anything_is_refused_before_a_folder_is_made(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        driftline.capture(_model(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_only_modules_can_be_captured(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="str is not a torch module"):
        driftline.capture("model", tmp_path / "run")  # type: ignore[arg-type]


def test_a_size_limit_keeps_the_list_and_drops_the_values(tmp_path: Path) -> None:
    model = _model()
    with driftline.capture(model, tmp_path / "run", max_bytes=40):
        model(torch.randn(2, 4))
    run = driftline.open_run(tmp_path / "run")
    assert len(run) == 6
    assert sum(record.blob is not None for record in run.records) < 6


def test_a_summary_run_has_no_shards_and_says_what_the_values_were(tmp_path: Path) -> None:
    model = _model()
    with driftline.capture(model, tmp_path / "run", keep="summary"):
        expected = model(torch.ones(2, 4)).detach()
    assert not list((tmp_path / "run" / "rank0").glob("*.safetensors"))
    summary = driftline.open_run(tmp_path / "run").get(site="(root)").summary
    assert summary.count == 8
    assert summary.max == pytest.approx(float(expected.max()))
    assert summary.l2 == pytest.approx(float(expected.double().norm()))
    assert len(summary.sketch) == 64


def test_stepping_without_a_capture_does_nothing() -> None:
    driftline.step()


def test_the_state_of_autograd_is_left_as_it_was() -> None:
    model = _model()
    from driftline.runs.memory import MemorySink

    with driftline.capture(model, MemorySink()):
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                out = model(torch.ones(1, 4))
                assert torch.is_grad_enabled() is enabled
                assert out.requires_grad is enabled


@pytest.mark.parametrize(
    ("options", "calls", "words"),
    [
        ({}, 0, "nothing was captured: the model was not called"),
        ({"sites": "O"}, 1, "nothing was captured: no site matches 'O'"),
        ({"steps": 4}, 2, "nothing was captured: 2 steps ran, and none of them is selected"),
        ({"sites": ["0", "O"]}, 1, "no site matches 'O'"),
    ],
)
def test_a_capture_that_missed_what_was_asked_for_warns(
    tmp_path: Path, options: dict[str, Any], calls: int, words: str
) -> None:
    model = _model()
    with (
        pytest.warns(UserWarning, match=words),
        driftline.capture(model, tmp_path / "run", **options),
    ):
        for _ in range(calls):
            model(torch.ones(2, 4))


def test_a_capture_is_good_for_one_block(tmp_path: Path) -> None:
    model = _model()
    with driftline.capture(model, tmp_path / "run") as running:
        model(torch.ones(2, 4))
    with pytest.raises(BadInput, match="one with block"), running:
        model(torch.ones(2, 4))
