"""What a capture writes about a Paddle model."""

from __future__ import annotations

from pathlib import Path

import pytest

paddle = pytest.importorskip("paddle")

import driftline  # noqa: E402
from driftline.comparison.differences.find import differences_of  # noqa: E402
from driftline.formats.registry import open_run  # noqa: E402
from driftline.runs.sidecars.model_facts import read_model_facts  # noqa: E402


class Net(paddle.nn.Layer):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(4, 8)
        self.norm = paddle.nn.LayerNorm(8, epsilon=epsilon)
        self.scale = 0.5
        self.register_buffer("table", paddle.arange(6, dtype="float32"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.first(x)) * self.scale


def captured(path: Path, epsilon: float, *, training: bool = False) -> None:
    paddle.seed(3)
    model = Net(epsilon)
    model.train() if training else model.eval()
    with driftline.capture(model, path):
        model(paddle.ones([2, 4]))


def test_layers_attributes_and_weights_are_described(tmp_path: Path) -> None:
    captured(tmp_path / "run", 1e-5)
    run = open_run(tmp_path / "run")
    assert not [event for event in run.events() if event["kind"] == "capture-fault"]
    facts = read_model_facts(run)
    assert facts.framework == "paddle"
    assert facts.attributes("(root)")["scale"] == 0.5
    assert facts.attributes("norm")["_epsilon"] == 1e-5
    assert facts.modules["first"].training is False
    table = facts.weights["table"].whole()
    assert table is not None and list(table) == [0, 1, 2, 3, 4, 5]
    assert facts.tensors["first.weight"].shape == (4, 8) and facts.tensors["table"].is_buffer


def test_differences_of_paddle_models_are_named(tmp_path: Path) -> None:
    captured(tmp_path / "ref", 1e-5)
    captured(tmp_path / "cand", 1e-3, training=True)
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    assert {d.path: d.change for d in differences if d.counts} == {
        "training": "False → True",
        "norm._epsilon": "1e-05 → 0.001",
    }


def test_the_same_paddle_model_shows_no_difference(tmp_path: Path) -> None:
    captured(tmp_path / "ref", 1e-5)
    captured(tmp_path / "cand", 1e-5)
    runs = open_run(tmp_path / "ref"), open_run(tmp_path / "cand")
    assert differences_of(*runs) == ()
