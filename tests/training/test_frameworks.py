"""The same faults are named where accelerate, transformers or Lightning write the loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from frameworks import FAULTS, with_accelerate, with_lightning, with_transformers

import driftline

TRAININGS = {
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "lightning": with_lightning,
}


@pytest.fixture(scope="module", params=TRAININGS)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed; it has an environment of its own")
    train = TRAININGS[request.param]
    return train, train(tmp_path_factory.mktemp(request.param) / "good", "")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_every_framework(good, tmp_path: Path, fault: str):
    train, reference = good
    table = driftline.compare(reference, train(tmp_path / "bad", fault))
    step, stage, words = FAULTS[fault]
    assert table.verdict == "fail", table.finding
    assert table.training is not None and table.training.broken is not None, table.finding
    broken = table.training.broken
    assert (broken.step, broken.stage) == (step, stage), table.finding
    assert words in table.finding, table.finding


def test_the_same_training_passes_in_every_framework(good, tmp_path: Path):
    train, reference = good
    table = driftline.compare(reference, train(tmp_path / "again", ""))
    assert table.verdict == "pass", table.finding
    assert "weights, loss and gradients agree in steps 1-3" in table.finding
