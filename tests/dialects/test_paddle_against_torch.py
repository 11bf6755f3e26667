"""A Paddle model against its torch twin by the command line: steps, a weight not turned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import driftline
from driftline.cli.main import main


def twins(folder: Path, *, turned: bool) -> tuple[str, str]:
    """Runs of three calls each; without `turned` the square weight is copied as Paddle has it."""
    paddle.seed(0)
    first = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 4))
    second = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with torch.no_grad():
        for place in (0, 2):
            weight = torch.from_numpy(first[place].weight.numpy())
            square_as_it_is = place == 0 and not turned
            second[place].weight.copy_(weight if square_as_it_is else weight.T)
            second[place].bias.copy_(torch.from_numpy(first[place].bias.numpy()))
    for name, net, tensor in (("paddle", first, paddle.to_tensor), ("torch", second, torch.tensor)):
        with driftline.capture(net, folder / name, levels=("modules", "params")):
            for seed in range(3):
                given = np.random.default_rng(seed).standard_normal((2, 8)).astype(np.float32)
                net(tensor(given))
    return str(folder / "paddle"), str(folder / "torch")


@pytest.mark.parametrize("step", ["0", "1", "2"])
def test_a_step_of_both_is_compared(
    tmp_path: Path, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = twins(tmp_path, turned=True)
    assert main(["compare", *runs, "--step", step, "--format", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["verdict"] == "pass"
    # That step, and no other.
    assert {row["step"] for row in compared["rows"]} == {int(step)}


@pytest.mark.parametrize("swapped", [False, True])
def test_a_square_weight_that_was_not_turned_is_named(
    tmp_path: Path, swapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = twins(tmp_path, turned=False)
    assert main(["diagnose", *(runs[::-1] if swapped else runs)]) == 1
    assert "the drift starts at 0, cause: transpose" in capsys.readouterr().out
