"""A run whose program died on the way: what is missing is listed, and why it is."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import driftline


class _Dies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no room for it")


def test_what_a_program_raised_is_told_beside_what_is_missing(tmp_path):
    whole = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    half = nn.Sequential(whole[0], _Dies(), whole[2])
    for model, name in ((whole, "whole"), (half, "half")):
        with (
            contextlib.suppress(RuntimeError),
            driftline.capture(model, tmp_path / name),
        ):
            model(torch.ones(2, 4))
    table = driftline.compare(tmp_path / "whole", tmp_path / "half")
    assert table.coverage.missing
    assert "RuntimeError was raised inside 1" in table.candidate.losses
    assert not table.reference.losses
    assert not driftline.compare(tmp_path / "half", tmp_path / "half").candidate.losses
