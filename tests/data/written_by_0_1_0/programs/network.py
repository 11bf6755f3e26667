"""The model of the torch programs beside this file: small, seeded, on one thread."""

from __future__ import annotations

import torch
from torch import nn

IDS = torch.tensor([[1, 5, 9], [2, 4, 10]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TanhGelu(nn.GELU):
    """The planted fault: another activation, and a quarter too large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.25 * nn.functional.gelu(x, approximate="tanh")


def build(dtype: str = "float32", *, fault: bool = False) -> Network:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Network()
    if fault:
        network.layers[1].act = TanhGelu()
    return network.to(getattr(torch, dtype))
