"""A small network in numpy that saves what its layers compute. It does not use Driftline.

    python layers.py --output right
    python layers.py --output wrong --dtype float16 --fault-layer 5

The weights are random (a fixed seed). `--fault-layer` computes ReLU in place of SiLU in one layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

WIDTH, LAYERS = 64, 8


def silu(hidden: np.ndarray) -> np.ndarray:
    return hidden / (1 + np.exp(-hidden))


def main() -> None:
    options = argparse.ArgumentParser(description="Run a small random network, save its layers.")
    options.add_argument("--output", type=Path, required=True)
    options.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    options.add_argument("--fault-layer", type=int, default=-1)
    chosen = options.parse_args()

    dice = np.random.default_rng(0)
    chosen.output.mkdir(parents=True, exist_ok=True)
    hidden = dice.standard_normal((16, WIDTH)).astype(chosen.dtype)
    for layer in range(LAYERS):
        weight = dice.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
        linear = hidden @ weight.astype(chosen.dtype)
        activation = np.maximum(linear, 0) if layer == chosen.fault_layer else silu(linear)
        hidden = hidden + activation
        for name, tensor in (("linear", linear), ("activation", activation)):
            np.save(chosen.output / f"{layer:02}_{name}.npy", tensor)
    np.save(chosen.output / "output.npy", hidden)
    print(f"{chosen.dtype}: {LAYERS} layers in {chosen.output}")


if __name__ == "__main__":
    main()
