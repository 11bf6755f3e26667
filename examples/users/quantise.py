"""Weights of eight bits: one scale for each output channel, or, wrongly, one for all of them.

python quantise.py
python quantise.py --scales channel
python quantise.py --scales tensor
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn


def quantised(weight: Tensor, scales: str) -> Tensor:
    largest = weight.abs().amax(1, keepdim=True) if scales == "channel" else weight.abs().max()
    step = largest / 127
    return (weight / step).round().clamp(-127, 127) * step


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--scales", choices=["none", "channel", "tensor"], default="none")
    chosen = options.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 16)
    )
    with torch.no_grad():
        model[2].weight[7] *= 60  # one loud channel, as trained models have them
        if chosen.scales != "none":
            for layer in (model[0], model[2], model[4]):
                layer.weight.copy_(quantised(layer.weight, chosen.scales))
        print(f"{model.eval()(torch.randn(8, 64)).norm():.2f}")


if __name__ == "__main__":
    main()
