"""Faults of a Paddle training are named where a step goes wrong, as those of torch are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import driftline  # noqa: E402
from driftline.comparison.differences.find import differences_of  # noqa: E402
from driftline.formats.registry import open_run  # noqa: E402
from driftline.runs.sidecars.step_facts import read_step_facts  # noqa: E402

STEPS = 4


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = paddle.nn.Embedding(32, 16)
        self.norm = paddle.nn.LayerNorm(16)
        self.hidden = paddle.nn.Linear(16, 24)
        self.head = paddle.nn.Linear(24, 8)

    def forward(self, tokens: Any) -> Any:
        return self.head(paddle.nn.functional.relu(self.hidden(self.norm(self.embed(tokens)))))


def optimizer_of(model: Net, fault: str) -> Any:
    decayed = {p.name for p in model.parameters() if p.ndim > 1 or fault == "norms"}
    parameters = model.parameters()
    if fault == "unregistered":
        parameters = [p for p in parameters if p is not model.hidden.weight]
    options: dict[str, Any] = {
        "learning_rate": 1e-2 if fault == "lr" else 1e-3,
        "beta1": 0.5 if fault == "betas" else 0.9,
        "epsilon": 1e-2 if fault == "epsilon" else 1e-8,
        "weight_decay": 0.5 if fault == "decay" else 0.3,
        "grad_clip": paddle.nn.ClipGradByGlobalNorm(0.1 if fault == "clip" else 0.5),
    }
    if fault == "schedule":
        options["learning_rate"] = paddle.optimizer.lr.StepDecay(1e-3, 2, 0.1)
    if fault == "coupled":
        return paddle.optimizer.Adam(parameters=parameters, **options)
    return paddle.optimizer.AdamW(
        parameters=parameters, apply_decay_param_fun=lambda name: name in decayed, **options
    )


def train(folder: Path, fault: str = "", *, steps: int = STEPS) -> Path:
    """A training of some steps with accumulation and clipping."""
    path = folder / (fault or "good")
    if path.exists():
        return path
    paddle.seed(0)
    model = Net()
    if fault == "frozen":
        for parameter in model.norm.parameters():
            parameter.stop_gradient = True
    optimizer = optimizer_of(model, fault)
    drawn = np.random.default_rng(1)
    with driftline.capture(model, path):
        for _ in range(steps):
            for _ in range(2):
                tokens = paddle.to_tensor(drawn.integers(0, 32, (4, 6)))
                labels = paddle.to_tensor(drawn.integers(0, 8, (4, 6)))
                loss = paddle.nn.functional.cross_entropy(
                    model(tokens), labels, label_smoothing=0.1 if fault == "smoothing" else 0.0
                )
                (loss if fault == "accumulation" else loss / 2).backward()
            optimizer.step()
            if fault == "schedule":
                optimizer._learning_rate.step()
            if fault != "clear_grad":
                optimizer.clear_grad()
            if fault == "swap":
                model.head.bias.set_value(paddle.ones_like(model.head.bias))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paddle")


@pytest.fixture(scope="module")
def good(place: Path) -> Path:
    return train(place)


FAULTS = {
    "lr": (0, "update", "AdamW lr: 0.001 → 0.01, for all parameters"),
    "schedule": (2, "update", "AdamW lr in group 0 from step 2: 0.001 → 0.0001"),
    "decay": (0, "update", "AdamW weight_decay: 0.3 → 0.5, for 3 parameters"),
    "coupled": (0, "update", "class of the optimizer: AdamW → Adam"),
    "norms": (0, "update", "AdamW weight_decay: 0.0 → 0.3"),
    "epsilon": (0, "update", "AdamW eps: 1e-08 → 0.01"),
    "betas": (1, "update", "AdamW betas: (0.9, 0.999) → (0.5, 0.999)"),
    "unregistered": (0, "update", "updated → not in the optimizer"),
    "frozen": (0, "gradients", "trained → frozen"),
    "clip": (0, "gradients", "0.2 times as large): clip_norm: 0.5 → 0.1"),
    "clear_grad": (1, "gradients", "zero_grad in the reference only"),
    "smoothing": (0, "loss", "the forward pass agrees in step 0, the loss differs"),
    "accumulation": (0, "loss", "2 times as large"),
    "swap": (1, "weights", "something else changes them before step 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_where_the_step_goes_wrong(good: Path, place: Path, fault: str) -> None:
    step, stage, words = FAULTS[fault]
    table = driftline.compare(good, train(place, fault))
    assert table.verdict == "fail", table.finding
    assert table.training is not None and table.training.broken is not None
    broken = table.training.broken
    assert (broken.step, broken.stage) == (step, stage), table.finding
    assert words in table.finding, table.finding


def test_two_equal_trainings_pass_and_say_what_was_compared(good: Path, place: Path) -> None:
    other = train(place, "nothing")
    table = driftline.compare(good, other)
    assert table.verdict == "pass", table.finding
    assert table.training is not None and table.training.compared == (1, 2, 3)
    assert differences_of(open_run(good), open_run(other)) == ()
    for run in map(open_run, (good, other)):
        assert not [event for event in run.events() if event["kind"] == "capture-fault"]


def test_a_training_of_one_update_is_incomplete(tmp_path: Path) -> None:
    table = driftline.compare(*(train(tmp_path, name, steps=1) for name in ("one", "other")))
    assert table.verdict == "incomplete" and "only one update was made" in table.finding


def test_groups_rates_and_decays_of_their_own_are_those_of_their_parameters(
    tmp_path: Path,
) -> None:
    runs: list[Path] = []
    for rate in (0.1, 0.5):
        paddle.seed(0)
        model = Net()
        optimizer = paddle.optimizer.Momentum(
            learning_rate=0.01,
            parameters=[
                {"params": model.head.parameters(), "learning_rate": rate},
                {"params": model.hidden.parameters()},
            ],
            weight_decay=0.02,
        )
        runs.append(tmp_path / str(rate))
        with driftline.capture(model, runs[-1]):
            for _ in range(2):
                model(paddle.to_tensor([[1, 2]])).mean().backward()
                optimizer.step()
                optimizer.clear_grad()
    table = driftline.compare(*runs)
    assert "Momentum lr: 0.001 → 0.005, for 2 parameters: head.weight, head.bias" in table.finding


def test_a_program_is_left_as_it_was(tmp_path: Path) -> None:
    """Neither the function that decides on decay, nor a method, stays wrapped."""
    methods = paddle.optimizer.AdamW.step, paddle.optimizer.Optimizer.clear_grad
    model = Net()
    optimizer = optimizer_of(model, "")
    decays = optimizer._apply_decay_param_fun
    with driftline.capture(model, tmp_path / "run"):
        model(paddle.to_tensor([[1, 2]])).mean().backward()
        optimizer.step()
    assert optimizer._apply_decay_param_fun is decays
    assert (paddle.optimizer.AdamW.step, paddle.optimizer.Optimizer.clear_grad) == methods


def test_weights_of_a_device_are_told_by_the_same_samples(tmp_path: Path) -> None:
    from driftline.captures.paddle.training_facts import PaddleReader
    from driftline.captures.step_states import host_state

    reader, tensor = PaddleReader(), paddle.randn([40, 7])
    (fetched,), shot = reader.fetch([tensor]), reader.host(tensor)
    assert fetched is not None and shot is not None
    whole = host_state(shot)
    assert whole is not None and np.array_equal(whole.samples, fetched.samples)
    assert fetched.norm == pytest.approx(whole.norm, rel=1e-5)


def test_losses_and_calls_of_steps_between_rungs_are_kept(tmp_path: Path) -> None:
    model = paddle.nn.Sequential(*(paddle.nn.Linear(256, 256) for _ in range(8)))
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    with driftline.capture(model, tmp_path / "run"):
        for _ in range(20):
            model(paddle.ones([64, 256])).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    steps = read_step_facts(open_run(tmp_path / "run"))
    assert {state.key.step for state in steps.states} >= {*range(16)}
    assert ("(root)", 19) in steps.calls
