"""A feed-forward block, as it was and as somebody ported it to another device.

    python port.py
    python port.py --ported
    python port.py --ported --fault

The port computes in bfloat16, as the device does. `--fault` uses the tanh form of GELU with a wrong
constant: close enough that the model still answers, and wrong.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn


class PortedGelu(nn.Module):
    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        inner = 0.7978845608 * (x + self.constant * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.activation = activation
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--ported", action="store_true")
    options.add_argument("--fault", action="store_true")
    chosen = options.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.GELU()) for _ in range(4))).eval()
    inputs = torch.randn(2, 16, 64)
    if chosen.ported:
        for index, block in enumerate(model):
            wrong = chosen.fault and index == 2
            block.activation = PortedGelu(0.447 if wrong else 0.044715)
        model, inputs = model.to(torch.bfloat16), inputs.to(torch.bfloat16)
    with torch.no_grad():
        print(f"{model(inputs).float().norm():.2f}")


if __name__ == "__main__":
    main()
