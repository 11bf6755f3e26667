"""Paddle against torch: one small decoder in both, with the same weights, trained for two steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import driftline
from benchmarks.engines.cases import Case, Measured, measured, seconds

WIDTH, WORDS = 32, 50
IDS = np.random.default_rng(0).integers(0, WORDS, (4, 12))
LEVELS = ("modules", "gradients", "params")


def decoder(nn: Any, holder: Any) -> Any:
    """The network, of the layers of either framework: they are called alike."""

    class Block(holder):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.act(self.up(self.norm(x))))

    class Decoder(holder):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Any) -> Any:
            return self.head(self.blocks(self.embed(ids)))

    return Decoder()


def measure(optimizer: str, folder: Path) -> Measured:
    import paddle

    torch.manual_seed(0)
    network = decoder(nn, nn.Module)
    weights = {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}

    def in_torch() -> None:
        steps = getattr(torch.optim, optimizer)(network.parameters(), lr=1e-3)
        for _ in range(2):
            loss = nn.functional.cross_entropy(
                network(torch.tensor(IDS)).reshape(-1, WORDS), torch.tensor(IDS).reshape(-1)
            )
            loss.backward()
            steps.step()
            steps.zero_grad()

    def twin(epsilon: float = 1e-5) -> Any:
        other = decoder(paddle.nn, paddle.nn.Layer)
        for name, parameter in other.named_parameters():
            value = weights[name]
            is_turned = value.ndim == 2 and "embed" not in name
            parameter.set_value(paddle.to_tensor(value.T if is_turned else value))
        other.blocks[1].norm._epsilon = epsilon
        return other

    def in_paddle(other: Any) -> None:
        steps = getattr(paddle.optimizer, optimizer)(1e-3, parameters=other.parameters())
        for _ in range(2):
            logits = other(paddle.to_tensor(IDS)).reshape([-1, WORDS])
            paddle.nn.functional.cross_entropy(
                logits, paddle.to_tensor(IDS).reshape([-1])
            ).backward()
            steps.step()
            steps.clear_grad()

    def captured(other: Any, name: str) -> None:
        with driftline.capture(other, folder / name, levels=LEVELS, steps="*"):
            in_paddle(other)

    with driftline.capture(network, folder / "torch", levels=LEVELS, steps="*"):
        in_torch()
    in_paddle(twin())  # what the framework does once in a process is no part of either
    plain = seconds(lambda: in_paddle(twin()))
    cost = seconds(lambda: captured(twin(), "paddle")) / plain
    captured(twin(epsilon=1e-3), "faulty")
    clean = driftline.compare(folder / "torch", folder / "paddle")
    wrong = driftline.compare(folder / "torch", folder / "faulty")
    return measured(clean, wrong, "a norm's epsilon of 0.001", ("blocks.1.norm",), cost)


CASES = tuple(
    Case(f"Paddle against torch, training with {name}", "decoder", partial(measure, name))
    for name in ("SGD", "AdamW")
)
