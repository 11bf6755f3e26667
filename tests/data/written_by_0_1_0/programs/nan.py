"""A division of zero by zero inside a module: what `driftline errcheck` looks for."""

from __future__ import annotations

import torch
from torch import nn


class Divide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


torch.set_num_threads(1)
with torch.no_grad():
    nn.Sequential(nn.ReLU(), Divide(), nn.ReLU())(torch.tensor([1.0, -1.0, 2.0]))
